"""Models from checkpoints of the trainers.

The metadata of a checkpoint has "format", which names the family, and "config", the
trainer's options in JSON. open_model() maps options to the fields of the family's desc, as
examples/*/model.h does.
"""
import ctypes
import json
from typing import Any, Callable, Dict, List, Tuple

from ._context import fill, lib

# field: option, or "HOW option". not: the opposite; list: numbers, separated by commas;
# rows: 0 means none; STX_..: the prefix of the constant for a choice.
SPAN = {
    "layers": "nlayers", "dim": "hid-sz", "heads": "nheads", "inner": "inner-hid-sz",
    "span": "attn-span", "pers": "pers-mem-size", "dropout": "dropout",
    "emb_dropout": "emb-dropout", "adapt_span": "adapt-span", "ramp": "adapt-span-ramp",
    "span_init": "adapt-span-init", "span_loss": "adapt-span-loss",
    "span_per_layer": "span-per-layer", "no_renorm": "no-renorm", "fairseq_init": "fairseq-init",
    "adapt_io": "adapt-io", "adapt_io_tied": "adapt-io-tied", "divval": "adapt-io-divval",
    "full_cache": "not adapt-span-cache", "cutoff": "list adapt-io-cutoffs"}

SRU = {
    "dim": "hid-sz", "tied": "tied", "dropout": "dropout", "io_dropout": "io-dropout",
    "emb_dropout": "emb-dropout", "adapt_io": "adapt-io", "separate_projs": "adapt-io-separate",
    "divval": "adapt-io-divval", "layers": "nlayers", "no_skip": "not skip", "rescale": "rescale",
    "highway_bias": "highway-bias", "tanh": "tanh", "v1": "v1", "v_init": "v-init",
    "norm": "STX_SRU_NORM norm", "input_first": "input-first", "rnn_dropout": "rnn-dropout"}

SRUPP = {
    "proj": "proj-sz", "heads": "nheads", "attn_dropout": "attn-dropout",
    "attention_every": "attention-every", "attention_last": "attention-last",
    "no_attention": "not attention", "no_attn_norm": "not attn-norm",
    "attn_norm_first": "attn-norm-first", "alpha_init": "alpha-init"}

COMP = {
    "layers": "nlayers", "dim": "hid-sz", "emb": "emb-sz", "inner": "inner-hid-sz",
    "heads": "nheads", "kv_heads": "kv-heads", "segment": "block-sz", "mem": "rows mem",
    "cmem": "rows cmem", "ratio": "ratio", "compress": "STX_COMP_COMPRESS compress",
    "overlap": "overlap", "conv_no_bias": "conv-no-bias", "aux": "STX_COMP_AUX aux",
    "aux_weight": "aux-weight", "aux_dropout": "aux-dropout", "bptt": "bptt",
    "positions": "STX_COMP_POSITIONS positions", "norm_after": "norm-after",
    "final_norm": "final-norm", "glu": "glu", "tied": "tied", "gate": "STX_COMP_GATE gate",
    "gate_relu": "gate-relu", "gate_bias": "gate-bias", "zero_gate_bias": "no-gate-bias",
    "mogrify": "mogrify", "recurrence": "STX_COMP_STORE recurrence", "dilation": "list dilations",
    "mems": "list mems", "cmems": "list cmems"}

PAR = {
    "dim": "hid-sz", "heads": "nheads", "head_dim": "head-sz", "inner": "inner-hid-sz",
    "segment": "block-sz", "mem": "rows mem", "positions": "STX_PAR positions",
    "sines": "STX_PAR_SINES sines", "pos_mode": "STX_PAR_POS pos-mode", "clamp_len": "clamp-len",
    "same_length": "same-length", "full_scale": "full-scale", "attn_relu": "attn-relu",
    "biases": "biases", "own_uv": "own-uv", "pre_norm": "norm-before",
    "no_final_norm": "no-final-norm", "norm_eps": "norm-eps", "dropout": "dropout",
    "attn_dropout": "attn-dropout", "inner_dropout": "inner-dropout",
    "pos_dropout": "pos-dropout", "final_dropout": "final-dropout", "init": "STX_PAR_INIT init",
    "init_std": "init-std", "proj_std": "proj-init-std", "adaptive_in": "adaptive-in",
    "words_out": "STX_PAR_OUT words-out", "emb_scale": "emb-scale", "emb": "emb-sz",
    "div_val": "div-val", "proj_factor": "proj-factor", "tie_projs": "STX_PAR_TIE tie-projs",
    "one_proj": "one-proj", "divide_all": "divide-all", "cutoff": "list cutoffs",
    "proj_dims": "list proj-dims"}

PAR_SEARCH = {
    "gate_form": "STX_PAR_FORM arch", "gate_eval": "STX_PAR_EVAL gate-eval",
    "noise": "STX_PAR_NOISE noise", "noise_tokens": "noise-tokens", "tau": "tau-start",
    "latency": "STX_PAR_LATENCY latency", "latency_w": "STX_PAR_LATENCY_OF latency-of",
    "latency_weight": "latency-weight", "latency_power": "latency-power"}

# where a choice of an option and a constant have different names
SPELLED = {
    ("STX_COMP_COMPRESS", "none"): "DROP", ("STX_COMP_STORE", "none"): "INPUT",
    ("STX_COMP_STORE", "ernie"): "OUTPUT", ("STX_PAR_SINES", "block"): "SPLIT",
    ("STX_SRU_NORM", "none"): ""}


def parse(text: bytes) -> Dict[str, Any]:
    """The options of a checkpoint. Older ones have one flag for each name of --literal."""
    config: Dict[str, Any] = json.loads(text.decode())
    flags = [k[len("literal-"):] for k, v in config.items() if k.startswith("literal-") and v]
    if flags:
        config["literal"] = ",".join(flags)
    return config


def _ints(text: Any) -> List[int]:
    return [int(word) for word in str(text).split(",")] if text else []


def _constant(prefix: str, choice: str) -> int:
    word = SPELLED.get((prefix, choice), choice.upper().replace("-", "_"))
    name = f"{prefix}_{word}".replace("_REFERENCE", "_REF")
    return int(getattr(lib, name)) if word else 0


def _fields(table: Dict[str, str], config: Dict[str, Any]) -> Dict[str, Any]:
    """The fields of a desc from options. An option that the checkpoint lacks is newer than
    the checkpoint, and off."""
    fields: Dict[str, Any] = {}
    for field, source in table.items():
        how, _, name = source.rpartition(" ")
        value = config.get(name)
        if how == "not":
            fields[field] = not config.get(name, True)
        elif value is None:
            continue
        elif how == "list":
            fields[field] = _ints(value)
        elif how == "rows":
            fields[field] = value or lib.STX_NPOS           # STX_.._NO_ROWS
        else:
            fields[field] = _constant(how, value) if how else value
    return fields


def _span(config: Dict[str, Any]) -> Dict[str, Any]:
    return _fields(SPAN, config)


def _sru(config: Dict[str, Any]) -> Dict[str, Any]:
    fields = _fields(SRU, config)
    dim, emb, layers = config["hid-sz"], config["emb-sz"], config["nlayers"]
    fields["emb_adaptive" if config["adapt-io"] else "emb"] = emb
    if config["adapt-io"]:
        fields["cutoff"] = _ints(config["adapt-io-cutoffs"])
    if config["cell"] == "sru++":
        return dict(fields, transform="STX_SRU_ATTENTION", **_fields(SRUPP, config))
    proj = config["proj-sz"]
    first = dim if config["input-first"] or config["adapt-io"] or not emb else emb
    fields["projs"] = [proj if proj < (dim if l else first) and proj < dim else 0
                       for l in range(layers)]
    return dict(fields, transform="STX_SRU_LINEAR", init_xavier=config["init-xavier"])


def _comp(config: Dict[str, Any]) -> Dict[str, Any]:
    fields = _fields(COMP, config)
    for name in ("attn", "out", "ff"):
        own = config[name + "-dropout"]
        fields[name + "_dropout"] = max(own, 0) if own else config["dropout"]
    layers = config["memory-layers"]
    if layers in ("", "none"):
        fields["no_memory"] = 1
    elif layers not in (None, "all"):
        fields["memory_layers"] = _ints(layers)
    return fields


def _par(config: Dict[str, Any]) -> Dict[str, Any]:
    fields = _fields(PAR, config)
    count, pattern = config["nlayers"], config["pattern"]
    letters = ctypes.create_string_buffer(8192)
    if pattern == "xl":
        letters.value = (b"sf" * count)[:count]
    elif pattern and pattern.startswith("par:"):
        lib.stx_par_rule(letters, 8192, count, int(pattern[4:]))
    elif pattern and pattern != "search":
        lib.stx_par_expand(letters, 8192, pattern.encode())
    fields["blocks"] = len(letters.value) or count
    plain = config["words-out"] == "plain"
    fields["tie_words"] = config["tied"] and not plain
    if config["tied"] and plain:
        fields["words_out"] = "STX_PAR_OUT_TIED"
    if config["pad-id"] >= 0:
        fields.update(pads=1, pad_id=config["pad-id"])
    if letters.value:
        return dict(fields, pattern=letters.value)
    fields.update(_fields(PAR_SEARCH, config), gate=int(config["straight-through"]))
    if fields["latency"]:               # only training reads the times and the target
        fields.update(cost=[1.0, 1.0], latency_target=float(config["latency"] == "hinge"))
    return fields


# per family: C name, its desc, fields from options, names of --literal
FAMILIES: Dict[str, Tuple[str, str, Callable[[Dict[str, Any]], Dict[str, Any]], str]] = {
    "attn_span": ("span", "stx_span_desc", _span, "eps|memory"),
    "sru": ("sru_lm", "stx_sru_lm_desc", _sru, "norm"),
    "compressive": ("comp", "stx_comp_desc", _comp, "rows|pad|target|mask|freeze"),
    "par": ("par", "stx_par_desc", _par, "")}


def _literal(family: str, value: Any, create: Callable[[int], int]) -> int:
    """The flags of --literal: names, "true" or "all" for all that apply, and "no-" before
    names to leave out. create(flags) returns the flags in effect."""
    names = FAMILIES[family][3].split("|")
    words = str(value).lower().split(",") if value else []
    every = 1 << 30
    flags, removed = 0, 0
    for word in words:
        if word in ("true", "all"):
            flags |= every
        elif word.startswith("no-"):
            removed |= 1 << names.index(word[3:])
        else:
            flags |= 1 << names.index(word)
    return create(flags) & ~removed if removed else flags


def open_model(x: int, f: int) -> Tuple[str, int, Dict[str, Any]]:
    """Creates the model of an open checkpoint f in the context x, with its parameters.
    Returns its family, the model and the trainer's options."""
    form = lib.stx_file_meta(f, b"format")
    text = lib.stx_file_meta(f, b"config")
    vocab = lib.stx_file_find(f, b"vocab")
    parts = form.decode().split(".") if form else []
    if len(parts) != 3 or parts[0] != "seqtx" or parts[1] not in FAMILIES or not (text and vocab):
        raise ValueError("expected a checkpoint of a trainer")
    family, config = parts[1], parse(text)
    stem, struct, describe, _ = FAMILIES[family]
    keep: List[Any] = []
    data = ctypes.cast(vocab, ctypes.POINTER(lib.stx_entry)).contents
    v = lib.stx_vocab_load(x, data.data, data.bytes)
    if not v:
        return family, 0, config        # the context has the error
    desc = fill(getattr(lib, struct)(), "STX", dict(
        describe(config), vocab=lib.stx_vocab_size(v)), keep)
    lib.stx_vocab_free(v)

    create = getattr(lib, f"stx_{stem}_create")

    def literal_in(flags: int) -> int:
        dry = lib.stx_create(ctypes.byref(lib.stx_desc(dry=1, threads=1)))
        fill(desc, "STX", {"literal": flags})
        made = create(dry, ctypes.byref(desc))
        got = desc_of(family, made) if made else {}
        lib.stx_destroy(dry)
        return int(got.get("literal", 0))

    if config.get("literal"):
        fill(desc, "STX", {"literal": _literal(family, config["literal"], literal_in)})
    model = create(x, ctypes.byref(desc))
    if model:
        for params in lists_of(family, model):
            lib.stx_params_load(params, f, b"")
    return family, model, config


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
