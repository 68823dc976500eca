#!/usr/bin/env python3
"""Writes types.safetensors: a tensor of every type of the safetensors format, with the
values that the library must read from it.

    python3 make_golden_types.py              into this directory
    python3 make_golden_types.py --out DIR    into another directory

It needs nothing but Python: values are computed as fractions, from the definition of each
type, and packed with struct. No library that reads or writes these types is involved.
"""
import json
import os
import struct
import sys
from collections import OrderedDict
from fractions import Fraction

HERE = os.path.dirname(os.path.abspath(__file__))


def rounded(value, bits):
    """The fraction nearest to an integer that has at most `bits` bits; ties go to even."""
    size = abs(value)
    drop = max(size.bit_length() - bits, 0)
    keep, rest = size >> drop, size & ((1 << drop) - 1)
    if 2 * rest > 1 << drop or (2 * rest == 1 << drop and keep & 1):
        keep += 1
    return (-1 if value < 0 else 1) * (keep << drop)


def real(code, exponent_bits, fraction_bits, bias, special):
    """The value of a sign, an exponent and a fraction. special: "ieee", "nan" (only the
    largest magnitude is special, as in F8_E4M3)."""
    negative = code >> (exponent_bits + fraction_bits)
    exponent = code >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << fraction_bits) - 1)
    top = exponent == (1 << exponent_bits) - 1
    sign = -1.0 if negative else 1.0
    if special == "ieee" and top:
        return sign * float("inf") if not fraction else float("nan")
    if special == "nan" and top and fraction == (1 << fraction_bits) - 1:
        return float("nan")
    if exponent:
        fraction += 1 << fraction_bits
    size = Fraction(fraction) * Fraction(2) ** (max(exponent, 1) - bias - fraction_bits)
    return sign * float(size)


def integers(bits, signed):
    """The limits of a type, zero, and values around those that f32 and f64 can represent."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    wanted = [low, low + 1, high, high - 1, 0, 1, 2, 100, -1, -100]
    for edge in 24, 31, 53, 62, 63:
        wanted += [s * (1 << edge) + d for s in (1, -1) for d in (-3, -1, 0, 1, 2, 3)]
    tie = (1 << 40) + (1 << 16)     # half-way between two neighbours in f32
    wanted += [(1 << 24) * 3 + 2, (1 << 53) * 3 + 2, tie, tie + 1]
    wanted.append((1 << 54) + (1 << 30) + 1)    # f32 by way of f64 would differ
    return list(OrderedDict.fromkeys(v for v in wanted if low <= v <= high))


def add_real(out, name, width, codes, values):
    """A floating-point type: its codes, and their values, which are exact in f32 and f64."""
    out[name] = name, [len(codes)], b"".join(c.to_bytes(width, "little") for c in codes)
    out[name + ".f64"] = "F64", [len(values)], struct.pack(f"<{len(values)}d", *values)


def add_integer(out, name, form, values):
    """An integer type, and its values as f64 and f32, rounded to 53 and 24 bits."""
    n = len(values)
    out[name] = name, [n], struct.pack(f"<{n}{form}", *values)
    for suffix, bits in (".f64", 53), (".f32", 24):
        out[name + suffix] = "F64", [n], struct.pack(f"<{n}d", *(rounded(v, bits) for v in values))


def tensors():
    out = OrderedDict()
    half = [high << 8 | low for high in range(256) for low in (0, 1, 0x55, 0xFF)]
    add_real(out, "F16", 2, half, [real(c, 5, 10, 15, "ieee") for c in half])
    add_real(out, "BF16", 2, half, [real(c, 8, 7, 127, "ieee") for c in half])
    byte = list(range(256))
    add_real(out, "F8_E4M3", 1, byte, [real(c, 4, 3, 7, "nan") for c in byte])
    add_real(out, "F8_E5M2", 1, byte, [real(c, 5, 2, 15, "ieee") for c in byte])
    single = [high << 24 | low for high in range(256) for low in (0, 1, 0x00800000, 0x007FFFFF)]
    add_real(out, "F32", 4, single, [real(c, 8, 23, 127, "ieee") for c in single])
    for name, form in zip(("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"), "bhiqBHIQ"):
        add_integer(out, name, form, integers(8 * struct.calcsize("<" + form), name[0] == "I"))
    add_integer(out, "BOOL", "B", [0, 1, 1, 0, 1])

    # Shapes: up to 8 dimensions can be read, more only listed.
    twelve = struct.pack("<12f", *range(12))
    out["d8"] = "F32", [1, 2, 1, 3, 1, 1, 2, 1], twelve
    out["d9"] = "F32", [1, 2, 1, 3, 1, 1, 2, 1, 1], twelve

    # Types that can only be listed. F4 and F6 fill whole bytes.
    out["C64"] = "C64", [2], struct.pack("<4f", 1, 2, 3, 4)
    for name, shape, size in (("F8_E8M0", [3], 3), ("F8_E4M3FNUZ", [2], 2), ("F8_E5M2FNUZ", [2], 2),
                              ("F6_E2M3", [2, 4], 6), ("F6_E3M2", [4], 3), ("F4", [3, 2], 3)):
        out[name] = name, shape, bytes(size)
    return out


def main():
    directory = HERE
    if len(sys.argv) == 3 and sys.argv[1] == "--out":
        directory = sys.argv[2]
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    header, data = OrderedDict(), b""
    for name, (dtype, shape, raw) in tensors().items():
        end = len(data) + len(raw)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), end]}
        data += raw
    text = json.dumps(header).encode()
    with open(os.path.join(directory, "types.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


main()
