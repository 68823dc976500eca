"""Shared by the oracles and the makers of golden vectors: files, random inputs,
comparisons.

The models are in the oracles, each written independently from its specification.
"""
import json
import math
import os
import struct
from collections import OrderedDict

import numpy as np
import torch

F64 = torch.float64
HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)        # a fixed order of summation


# -------------------------------------------------- safetensors

def save_safetensors(path, tensors, metadata=None):
    """Writes {name: tensor} with reals as F64 and integers as I32.

    Reals come first, so that every value in the file is aligned to its own size.
    """
    header, blobs, offset = OrderedDict(), [], 0
    if metadata:
        header["__metadata__"] = {str(k): str(v) for k, v in metadata.items()}
    arrays = [(name, t.detach().numpy()) for name, t in tensors.items()]
    for name, a in sorted(arrays, key=lambda item: item[1].dtype.kind in "iub"):
        dtype, kind = ("<i4", "I32") if a.dtype.kind in "iub" else ("<f8", "F64")
        raw = np.ascontiguousarray(a.astype(dtype)).tobytes()
        end = offset + len(raw)
        header[name] = {"dtype": kind, "shape": list(a.shape), "data_offsets": [offset, end]}
        blobs.append(raw)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for raw in blobs:
            out.write(raw)


def load_safetensors(path):
    """Returns ({name: tensor}, metadata) of a file of F64, F32 and I32 tensors."""
    with open(path, "rb") as f:
        data = f.read()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    metadata = header.pop("__metadata__", {})
    kinds = {"F64": "<f8", "F32": "<f4", "I32": "<i4"}
    tensors = OrderedDict()
    for name, h in header.items():
        a, b = h["data_offsets"]
        array = np.frombuffer(data[8 + n + a:8 + n + b], dtype=kinds[h["dtype"]])
        tensors[name] = torch.from_numpy(array.reshape(h["shape"]).copy())
    return tensors, metadata


class GoldenFiles:
    """The files of one maker, in this directory or in that of --out DIR."""

    def __init__(self, prefix="", limit=140_000):
        self.directory, self.prefix, self.limit = HERE, prefix, limit
        self.count = self.bytes = 0
        self.worst = 0.0            # largest float32 difference so far

    def write(self, name, tensors, metadata, note=""):
        """Writes one file and returns its size. Every real must be finite."""
        for key, value in tensors.items():
            if value.is_floating_point():
                assert bool(torch.isfinite(value).all()), (name, key)
        path = os.path.join(self.directory, self.prefix + name + ".safetensors")
        save_safetensors(path, tensors, metadata)
        size = os.path.getsize(path)
        assert size < self.limit, (name, size)
        self.count += 1
        self.bytes += size
        print(f"{name:16s} {size:7d} bytes, {len(tensors):3d} tensors{note}", flush=True)
        return size

    def write_results(self, name, inputs, results, metadata, worst, where, note=""):
        """Writes inputs and results. worst: their float32 difference, in the tensor
        `where`."""
        clash = set(inputs) & set(results)
        assert not clash, clash
        tensors = OrderedDict(list(inputs.items()) + list(results.items()))
        note = f", float32 differs by {worst:.1e} ({where}){note}"
        return self.write(name, tensors, metadata, note)

    def make(self, work, arguments):
        """Runs parts of work, {name: function}. arguments: [--out DIR] [NAME..]; without
        names, all."""
        if arguments[:1] == ["--out"]:
            self.directory, arguments = arguments[1], arguments[2:]
        for name in arguments or list(work):
            work[name]()
        print(f"{self.count} files, {self.bytes} bytes", end="")
        print(f"; worst float32 difference {self.worst:.1e}" if self.worst else "")


# -------------------------------------------------- tensors

def integers(text):
    """'1,2,3' -> [1, 2, 3]; '' -> []."""
    return [int(v) for v in text.split(",")] if text else []


def f32(t):
    """Rounds to values that float32 can represent, so that a float32 library gets the
    same inputs."""
    return t.to(torch.float32).to(F64)


def seeded(n):
    return torch.Generator().manual_seed(n)


def randn(gen, *shape):
    return torch.randn(*shape, generator=gen, dtype=F64)


def normal(gen, *shape, scale=1.0):
    return f32(scale * randn(gen, *shape))


def uniform(gen, *shape, low=-1.0, high=1.0):
    return f32(low + (high - low) * torch.rand(*shape, generator=gen, dtype=F64))


def token_mask(kind, B, T, s, gen):
    """(B,T), 1 = real: the mask of segment s, which keeps at least one real token."""
    m = torch.ones(B, T, dtype=torch.int32)
    if "right" in kind:
        m[s % B, T - 1 - s % 2:] = 0
    if "left" in kind:
        m[(s + 1) % B, :1 + s % 2] = 0
    if "scatter" in kind:
        m &= (torch.rand(B, T, generator=gen) > 0.3).to(torch.int32)
    if "row" in kind and s % 3 == 1:
        m[s % B, :] = 0
    if "twice" in kind and s in (1, 2, 3):
        m[0, :] = 0
    if not bool(m.any()):
        m[-1, -1] = 1
    return m


def reset_rows(rows, B):
    """(B), 1 for each row that starts a new stream."""
    return torch.tensor([int(b in rows) for b in range(B)], dtype=torch.int32)


def steps_of(low, high, B, count, vocab, gen):
    """Tokens (B,count), each low to high - 1 above the previous one, modulo vocab."""
    jump = torch.randint(low, high, (B, count), generator=gen)
    return (jump.cumsum(1) % vocab).to(torch.int32)


def layer_norm(x, gain, shift, eps=1e-5):
    """LayerNorm over the last dimension (Ba et al. 2016, arXiv:1607.06450)."""
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + eps) * gain + shift


# -------------------------------------------------- gradients

def leaf(t):
    return t.detach().clone().requires_grad_(True)


def leaves(tensors):
    return OrderedDict((name, leaf(t)) for name, t in tensors.items())


def prefixed(prefix, tensors):
    return OrderedDict((prefix + name, t) for name, t in tensors.items())


def parameters_in(tensors):
    """The tensors named param.NAME, as {NAME: tensor}."""
    return OrderedDict((n[6:], t) for n, t in tensors.items() if n.startswith("param."))


def gradients(loss, p):
    """{name: gradient}, zero for parameters that the loss does not use."""
    found = torch.autograd.grad(loss, list(p.values()), allow_unused=True)
    return OrderedDict((n, torch.zeros_like(w) if g is None else g)
                       for (n, w), g in zip(p.items(), found))


def grads_of(p):
    """The gradients that backward() left in .grad, zero where it left none."""
    return OrderedDict((n, torch.zeros_like(w) if w.grad is None else w.grad.detach())
                       for n, w in p.items())


def global_norm(grads):
    return torch.sqrt(sum((g * g).sum() for g in grads.values()))


def slope(loss, tensors, name, direction, step):
    """Central difference of loss(tensors) as tensors[name] moves along direction."""
    value = []
    for sign in (1, -1):
        moved = OrderedDict(tensors)
        moved[name] = tensors[name] + sign * step * direction
        value.append(float(loss(moved)))
    return (value[0] - value[1]) / (2 * step)


# -------------------------------------------------- comparisons

def in_float32(tensors):
    return OrderedDict((n, t.float() if t.is_floating_point() else t) for n, t in tensors.items())


def relative_errors(results, single, scale_of=None):
    """{name: largest float32 difference, relative to the largest entry of the tensor}.

    scale_of(name, largest entry) may return another scale.
    """
    errors = OrderedDict()
    for name, value in results.items():
        scale = float(value.abs().max())
        if scale_of:
            scale = scale_of(name, scale)
        errors[name] = float((single[name].to(F64) - value).abs().max()) / (scale or 1.0)
    return errors


def largest(errors):
    """(value, name) of the largest entry; (0, ) if all are zero."""
    worst, where = 0.0, ""
    for name, error in errors.items():
        if error > worst:
            worst, where = error, name
    return worst, where


class Checker:
    """Counts comparisons and prints the failed ones; if verbose, all of them."""

    def __init__(self, verbose=True):
        self.passed = self.failed = 0
        self.verbose = verbose

    def expect(self, ok, *what):
        self.passed += bool(ok)
        self.failed += not ok
        if self.verbose or not ok:
            print("pass " if ok else "FAIL ", *what)

    def equal(self, label, value, expected):
        self.expect(value == expected, f"{label}: expected {expected}, got {value}")

    def close(self, label, value, expected, tolerance=1e-12):
        value, expected = (torch.as_tensor(t, dtype=F64) for t in (value, expected))
        error = math.inf
        if value.shape == expected.shape:
            error = float((value - expected).abs().max()) if value.numel() else 0.0
        self.expect(error <= tolerance, f"{label}: max error {error:.1e} (limit {tolerance:.0e})")

    def digits(self, label, value, text):
        """The value must round to the printed digits."""
        mantissa, _, exponent = text.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        ok = abs(float(value) - float(text)) <= 0.501 * unit
        self.expect(ok, f"{label}: expected {text}, got {float(value):.13g}")

    def printed(self, label, values, words):
        """Compares each value with its printed number: a list of words, or a string of
        them."""
        words = words.split() if isinstance(words, str) else words
        self.expect(len(values) == len(words), f"{label}: {len(words)} values")
        for n, (value, word) in enumerate(zip(values, words)):
            self.digits(f"{label}[{n}]", value, word)

    def finish(self):
        """Prints the totals and returns the exit status."""
        print(f"{self.passed} passed, {self.failed} failed (torch {torch.__version__})")
        return 1 if self.failed else 0
