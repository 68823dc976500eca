#!/usr/bin/env python3
"""ctypes_demo.py - seqtx from Python: trains a small adaptive-span model and generates text

    make shared && python3 examples/ctypes_demo.py [FILE [STEPS [BYTES]]]

Needs Python 3.6 or later, no packages, and the shared library. Without a C compiler,
docs/cookbook.md shows how to build it with pip.

The headers are simple enough for the class `Library` to parse: structs become ctypes
structures, and functions get their argument types. SEQTX_LIBRARY and SEQTX_INCLUDE select
another library and another directory of headers.
"""
import ctypes
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PLAIN = {"int": ctypes.c_int, "size_t": ctypes.c_size_t, "double": ctypes.c_double,
         "float": ctypes.c_float, "stx_real": ctypes.c_float, "int32_t": ctypes.c_int32,
         "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
         "uint8_t": ctypes.c_uint8, "uint16_t": ctypes.c_uint16, "ptrdiff_t": ctypes.c_ssize_t,
         "unsigned": ctypes.c_uint}


class Library:
    """The functions and structs of the headers as attributes: lib.stx_create(None),
    lib.stx_span_desc(vocab=256)."""

    def __init__(self, path, include, headers):
        self._dll = ctypes.CDLL(path)
        text = "".join(open(os.path.join(include, h), encoding="utf-8").read() for h in headers)
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
        self._numbers = {n: int(v) for n, v in re.findall(r"#define (STX_[A-Z_]+) +(\d+)\s", text)}
        for body in re.findall(r"\benum \{(.*?)\}", text, flags=re.S):
            value = -1
            for item in body.split(","):
                name, _, given = (s.strip() for s in item.partition("="))
                number = re.fullmatch(r"-?(0x[0-9a-fA-F]+|[0-9]+)", given)
                value = int(given, 0) if number else value + 1
                if re.fullmatch(r"STX_\w+", name):
                    setattr(self, name, value)
                    self._numbers[name] = value
        callbacks = re.findall(r"typedef [\w ]+\*?\(\*(stx_\w+)\)", text)
        self._plain = dict(PLAIN, **{n: ctypes.c_void_p for n in callbacks})
        for name, body in re.findall(r"typedef struct (stx_\w+) \{(.*?)\} \1;", text, flags=re.S):
            try:
                fields = list(self._fields(body))
                # __slots__: a misspelt field is an error
                setattr(self, name, type(name, (ctypes.Structure,),
                                         {"_fields_": fields, "__slots__": [f for f, _ in fields]}))
            except KeyError:
                # it contains an opaque struct: Python uses pointers to it
                pass
        declaration = r"STX_DEF ([\w ]+?[\s*]+)(stx_\w+)\(([^;{]*?)\);"
        for result, name, arguments in re.findall(declaration, text):
            f = getattr(self._dll, name, None)
            if f is None or "(" in arguments or "..." in arguments:
                continue
            try:
                f.restype = self._type(result)
                f.argtypes = [self._type(a) for a in arguments.split(",") if a.strip() != "void"]
                setattr(self, name, f)
            except KeyError:
                pass                        # it takes a struct by value
        expected = re.search(r'#define STX_VERSION +"(.*?)"', text).group(1)
        if not hasattr(self, "stx_version"):
            raise OSError(f"{path} is not a library of seqtx")
        got = self.stx_version().decode()
        if got != expected:
            raise OSError(f"{path} is seqtx {got}, the headers in {include} are {expected}: "
                          "structs may differ")

    def _type(self, words):
        words = re.sub(r"\b(const|struct)\b", " ", words)
        base = words.replace("*", " ").split()[0]
        if "*" not in words and "[" not in words:
            return None if base == "void" else self._plain[base]
        return ctypes.c_char_p if base == "char" and words.count("*") == 1 else ctypes.c_void_p

    def _fields(self, body):
        for statement in body.split(";"):
            if not statement.strip():
                continue
            callback = re.search(r"\(\*(\w+)\)", statement)
            if callback:
                yield callback.group(1), ctypes.c_void_p
                continue
            base = statement.replace("const ", " ").split()[0]
            for item in statement.strip()[statement.strip().index(base) + len(base):].split(","):
                kind = self._plain.get(base) or getattr(self, base, None)
                if "*" in item:
                    kind = ctypes.c_void_p
                if kind is None:
                    raise KeyError(base)
                for size in re.findall(r"\[(.*?)\]", item)[::-1]:
                    kind = kind * eval(size, {}, self._numbers)         # STX_MAX_CLUSTERS - 1
                yield re.search(r"\w+", item).group(0), kind


def main():
    ending = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    library = os.environ.get("SEQTX_LIBRARY") or os.path.join(HERE, "../build/libseqtx." + ending)
    include = os.environ.get("SEQTX_INCLUDE") or os.path.join(HERE, "..")
    lib = Library(library, include, ["seqtx.h", "seqtx_attn_span.h"])
    path = sys.argv[1] if len(sys.argv) > 1 else __file__
    text = open(path, "rb").read()
    steps, count = (int(a) for a in (sys.argv[2:] + ["300", "200"][len(sys.argv[2:]):])[:2])
    B, T = 4, 64

    x = lib.stx_create(None)
    d = lib.stx_span_desc(vocab=256, layers=2, dim=64, heads=4, span=128, adapt_span=1,
                          span_init=0.2)
    model = lib.stx_span_create(x, ctypes.byref(d))
    optim = lib.stx_optim_create(lib.stx_span_params(model), None)         # Adam
    memory = lib.stx_span_state_create(model, B)
    lane = len(text) // B       # B streams, each with its memory
    if lane <= T:
        sys.exit(f"{path}: {len(text)} bytes, at least {B * (T + 1)} are required")
    for step in range(steps):
        at = step * T % (lane - T)
        if at < T:
            lib.stx_span_state_reset(memory)
        rows = [text[b * lane + at:b * lane + at + T + 1] for b in range(B)]
        tokens = (ctypes.c_int32 * (B * T))(*[c for r in rows for c in r[:-1]])
        targets = (ctypes.c_int32 * (B * T))(*[c for r in rows for c in r[1:]])
        lib.stx_begin(x, lib.STX_TRAIN)
        nll = lib.stx_span_loss(model, lib.stx_tokens(x, tokens, B, T),
                                lib.stx_tokens(x, targets, B, T), memory, memory)
        lib.stx_backward(x, lib.stx_span_total(model, nll))
        loss = lib.stx_item(x, nll)
        if lib.stx_optim_step(optim, 0.003):
            lib.stx_span_clamp(model)
        if not lib.stx_ok(x):
            sys.exit("ctypes_demo: " + lib.stx_error(x).decode())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1}: {loss / 0.69314718:.3f} bits per byte")

    gen = lib.stx_span_gen_create(model, 1)
    how = lib.stx_sampling(temperature=0.5)
    work = (ctypes.c_float * 256)()
    token, out = ctypes.c_int32(10), bytearray()
    for i in range(count):
        logits = lib.stx_span_gen_feed(gen, ctypes.byref(token), 1)
        if not logits:
            sys.exit("ctypes_demo: " + lib.stx_error(x).decode())
        token.value = lib.stx_sample(ctypes.byref(how), i, logits, 256, work)
        out.append(token.value)
    sys.stdout.flush()
    sys.stdout.buffer.write(bytes(out) + b"\n")  # raw bytes, whatever the terminal's encoding
    lib.stx_destroy(x)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as e:
        sys.exit(f"ctypes_demo: {e}"
                 + ("\n`make shared` makes the library" if "libseqtx." in str(e) else ""))
