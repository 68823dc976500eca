#!/usr/bin/env python3
"""ctypes_demo.py - seqtx from Python: trains a small adaptive-span model and generates text

    make shared && python3 examples/ctypes_demo.py [FILE [STEPS [BYTES]]]

Needs Python 3.6 or later, no packages, and the shared library. Without a C compiler,
docs/cookbook.md shows how to build it with pip.

This is the C API itself: python/seqtx/_library.py makes structs, functions and constants
from the headers. The module seqtx (docs/python.md) is built on it, and is what most programs
want. SEQTX_LIBRARY and SEQTX_INCLUDE select another library and another directory of
headers.
"""
import ctypes
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../python/seqtx"))
from _library import Library, find      # noqa: E402


def main():
    lib = Library(*find())
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
