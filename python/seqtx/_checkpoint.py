"""Models in files, as seqtx.h describes them (stx_model_read)."""
import ctypes
import json
from typing import Any, Dict, List, Tuple

from ._context import lib

# per family: its name in C, and its desc
FAMILIES: Dict[str, Tuple[str, str]] = {
    "attn_span": ("span", "stx_span_desc"), "sru": ("sru_lm", "stx_sru_lm_desc"),
    "compressive": ("comp", "stx_comp_desc"), "par": ("par", "stx_par_desc")}


def family_of(family: str) -> int:
    """The C description of a family, a const stx_family *."""
    stem = FAMILIES[family][0].split("_")[0]
    return int(getattr(lib, f"stx_{stem}_family")())


def options_of(f: int) -> Dict[str, Any]:
    """The options of the trainer that wrote an open file, or {}."""
    text = lib.stx_file_meta(f, b"config") if f else None
    return dict(json.loads(text.decode())) if text else {}


def open_model(x: int, f: int) -> Tuple[str, int]:
    """Creates the model of an open file f in the context x. Returns its family and the
    model, 0 after an error of the context."""
    name = (lib.stx_file_meta(f, b"model.family") or b"").decode()
    family = name if name in FAMILIES else "attn_span"      # then the error is that of C
    return family, int(lib.stx_model_read(x, family_of(family), f) or 0)


def lists_of(family: str, model: int) -> List[int]:
    """The model's stx_params: of its weights, and of the gates of a search."""
    struct = getattr(lib, f"stx_{FAMILIES[family][0]}")
    m = ctypes.cast(model, ctypes.POINTER(struct)).contents
    gates = getattr(m, "gates", None)
    return [m.params, gates] if gates else [m.params]


def desc_of(family: str, model: int) -> Dict[str, Any]:
    """The desc of a model, with its defaults, as a dict."""
    struct = getattr(lib, f"stx_{FAMILIES[family][0]}")
    m = ctypes.cast(model, ctypes.POINTER(struct)).contents
    values = _values(m.desc)
    if family == "sru":                 # what is in effect
        stack = ctypes.cast(m.sru, ctypes.POINTER(lib.stx_sru)).contents
        values.update((k, v) for k, v in _values(stack.desc).items() if k not in values)
    return values


def _values(desc: Any) -> Dict[str, Any]:
    values = {}
    for name, kind in desc._fields_:
        value = getattr(desc, name)
        if issubclass(kind, ctypes.Array):
            values[name] = list(value)
        elif not issubclass(kind, ctypes.Structure) and kind is not ctypes.c_void_p \
                and not hasattr(kind, "argtypes"):
            values[name] = value
    return values
