"""The C library through ctypes: structs, constants and functions as the headers declare
them.

read_api() parses the headers, so no declaration is repeated here, and no struct layout can
drift. A wheel contains the result as api.json. This file uses only the standard library
and no other file of the package: the build and examples/ctypes_demo.py import it alone.
"""
import ctypes
import json
import os
import re
import sys
from typing import Any, Dict, List, Optional, Tuple

PLAIN: Dict[str, Any] = {
    "int": ctypes.c_int, "unsigned": ctypes.c_uint, "size_t": ctypes.c_size_t,
    "ptrdiff_t": ctypes.c_ssize_t, "float": ctypes.c_float, "double": ctypes.c_double,
    "stx_real": ctypes.c_float, "uint8_t": ctypes.c_uint8, "uint16_t": ctypes.c_uint16,
    "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64, "void": None, "*": ctypes.c_void_p, "char*": ctypes.c_char_p}

# the library in a wheel or a source tree, and the installed one
LIBRARY_NAME, SYSTEM_NAME = {
    "darwin": ("libseqtx.dylib", "libseqtx.0.dylib"),
    "win32": ("libseqtx.dll", "libseqtx.dll")}.get(sys.platform, ("libseqtx.so", "libseqtx.so.0"))

# A type in api.json: a key of PLAIN, the name of a struct, ["array", n, type], or
# ["function", result, [arguments]] for a pointer to a function.
Type = Any


class _Parser:
    """Parses the headers' API parts to a dict that JSON can store: "version", "constants"
    {name: int}, "structs" {name: [[field, type], ..]} and "functions"
    {name: [result, [argument, ..]]}."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
        self.constants: Dict[str, int] = {"SIZE_MAX": ctypes.c_size_t(-1).value}
        self.structs: Dict[str, List[List[Type]]] = {}
        self.functions: Dict[str, List[Type]] = {}
        version = re.search(r'#define STX_VERSION +"(.*?)"', text)
        if not version:
            raise ValueError("the headers do not define STX_VERSION")
        self.version = version.group(1)
        for name, value in re.findall(r"#define (STX_[A-Z_]+) +(\w+)[ ]*\n", text):
            if value == "SIZE_MAX" or value.isdigit():
                self.constants[name] = self._number(value)
        for body in re.findall(r"\benum \{(.*?)\}", text, flags=re.S):
            self._enum(body)
        # pointers to functions that have a name are plain pointers
        self.callbacks = set(re.findall(r"typedef [\w ]+\*?\(\*(stx_\w+)\)", text))
        struct = r"typedef struct (stx_[a-z]\w*) \{(.*?)\} \1;"
        for name, body in re.findall(struct, text, flags=re.S):
            try:
                self.structs[name] = [f for s in body.split(";") for f in self._fields(s)]
            except KeyError:
                pass            # it contains an opaque struct: only pointers to it exist
        declaration = r"STX_DEF ([\w ]+?[\s*]+)(stx_[a-z]\w*)\(([^;{]*?)\)[^;{(]*;"
        for result, name, arguments in re.findall(declaration, text):
            if "(" not in arguments and "..." not in arguments:
                self.functions[name] = [self._type(result), self._arguments(arguments)]

    def _number(self, expression: str) -> int:
        return int(eval(expression, {"__builtins__": {}}, self.constants))

    def _enum(self, body: str) -> None:
        value = -1
        for item in body.split(","):
            name, _, given = (s.strip() for s in item.partition("="))
            if not name:
                continue
            value = self._number(given) if given else value + 1
            self.constants[name] = value

    def _type(self, words: str) -> Type:
        words = re.sub(r"\b(const|struct)\b", " ", words)
        base = words.replace("*", " ").split()[0]
        if "[" in words or "*" in words:
            return "char*" if base == "char" and words.count("*") == 1 else "*"
        if base in self.callbacks:
            return "*"
        if base not in PLAIN and base not in self.structs:
            raise KeyError(base)
        return base

    def _arguments(self, text: str) -> List[Type]:
        return [self._type(a) for a in text.split(",") if a.strip() != "void"]

    def _fields(self, statement: str) -> List[List[Type]]:
        if not statement.strip():
            return []
        function = re.fullmatch(r"\s*(.*?)\(\*(\w+)\)\s*\((.*)\)\s*", statement, flags=re.S)
        if function:
            result, name, arguments = function.groups()
            return [[name, ["function", self._type(result), self._arguments(arguments)]]]
        base, rest = re.fullmatch(  # type: ignore[union-attr]
            r"\s*((?:const |struct |unsigned (?=char))*\w+)(.*)", statement, flags=re.S).groups()
        fields = []
        for item in rest.split(","):
            kind = self._type(base + item.split("[")[0])
            for size in reversed(re.findall(r"\[(.*?)\]", item)):
                kind = ["array", self._number(size), kind]
            fields.append([re.findall(r"\w+", item.replace("const", ""))[0], kind])
        return fields


def read_api(include: str) -> Dict[str, Any]:
    """The API of seqtx.h and all seqtx_*.h in a directory, as api.json stores it."""
    others = sorted(f for f in os.listdir(include) if re.fullmatch(r"seqtx_\w+\.h", f))
    text = ""
    for header in ["seqtx.h"] + others:
        with open(os.path.join(include, header), encoding="utf-8") as f:
            text += re.split("#define SEQTX_(?:[A-Z_]+_)?IMPLEMENTATION_DONE", f.read())[0]
    p = _Parser(text)
    constants = {n: v for n, v in p.constants.items() if re.match("STX_[A-Z]", n)}
    return {"version": p.version, "constants": constants, "structs": p.structs,
            "functions": p.functions}


class Library:
    """The library's functions, structs and constants as attributes, made when they are
    first used: lib.stx_create(None), lib.stx_span_desc(vocab=256), lib.STX_TRAIN."""

    def __init__(self, path: str, api: Dict[str, Any]) -> None:
        self._dll = ctypes.CDLL(path)
        self._api = api
        try:
            got = self.stx_version().decode()
            self._dll.stx_create
        except AttributeError:
            raise OSError(f"{path} is not a library of seqtx in float") from None
        if got != api["version"]:
            raise OSError(f"{path} is seqtx {got}, the declarations are those of "
                          f"{api['version']}: structs may differ")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._api["constants"]:
            made: Any = self._api["constants"][name]
        elif name in self._api["structs"]:
            fields = [(f, self.ctype(t)) for f, t in self._api["structs"][name]]
            # __slots__: a misspelt field is an error
            made = type(name, (ctypes.Structure,),
                        {"_fields_": fields, "__slots__": [f for f, _ in fields]})
        elif name in self._api["functions"]:
            result, arguments = self._api["functions"][name]
            made = getattr(self._dll, name)
            made.restype = self.ctype(result)
            made.argtypes = [self.ctype(a) for a in arguments]
        else:
            raise AttributeError(f"seqtx has no {name}")
        setattr(self, name, made)
        return made

    def ctype(self, t: Type) -> Any:
        """The type of ctypes for a type of api.json."""
        if isinstance(t, list):
            if t[0] == "array":
                return self.ctype(t[2]) * t[1]
            return ctypes.CFUNCTYPE(self.ctype(t[1]), *(self.ctype(a) for a in t[2]))
        return PLAIN[t] if t in PLAIN else getattr(self, t)


def find() -> Tuple[str, Dict[str, Any]]:
    """The path of the library and its API: those of the wheel, of a source tree after
    `make shared`, or of the system. SEQTX_LIBRARY and SEQTX_INCLUDE name another library and
    another directory of headers."""
    here = os.path.dirname(os.path.abspath(__file__))
    tree = os.path.dirname(os.path.dirname(here))
    api: Optional[Dict[str, Any]] = None
    include = os.environ.get("SEQTX_INCLUDE")
    if not include and os.path.exists(os.path.join(here, "api.json")):
        with open(os.path.join(here, "api.json"), encoding="utf-8") as f:
            api = json.load(f)
    path = os.environ.get("SEQTX_LIBRARY")
    for candidate in ([] if path else [os.path.join(here, LIBRARY_NAME),
                                       os.path.join(tree, "build", LIBRARY_NAME)]):
        if os.path.exists(candidate):
            path = candidate
            break
    return path or SYSTEM_NAME, api or read_api(include or tree)
