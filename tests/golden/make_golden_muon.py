#!/usr/bin/env python3
"""Writes the golden vectors of Muon, which README_muon.md describes.

    python3 make_golden_muon.py              muon.safetensors, into this directory
    python3 make_golden_muon.py --out DIR    into another directory
"""
import sys
from collections import OrderedDict
from itertools import product

import numpy as np
import torch

sys.dont_write_bytecode = True
from common import GoldenFiles, largest, relative_errors
from muon_oracle import HIGH, LOW, Muon, global_norm

FILES = GoldenFiles(limit=400_000)
TOLERANCE = 4e-6        # limit of the float32 difference, relative to the largest entry of a tensor

SHAPES = OrderedDict(p0=(24, 8), p1=(8, 40), p2=(16, 16), p3=(7,), p4=(11, 6))
MATRICES = ["p0", "p1", "p2"]
# Scale of the gradients of each update. 1e-6: the epsilons have a visible effect. With clip
# 1, the second and the last update are clipped.
SCALES = [1e-6, 1.0, 0.0, 0.02, 2.0]


def variants():
    """{name: (momentum, weight_decay, clip)}, names such as m95_decay_clip."""
    return OrderedDict((f"m{momentum * 100:.0f}{'_decay' * (decay > 0)}{'_clip' * (clip > 0)}",
                        (momentum, decay, clip))
                       for momentum, decay, clip in product((0.95, 0.9), (0.0, 0.1), (0.0, 1.0)))


def inputs():
    """Values that float32 can represent. With some other seeds, p2 is too nearly singular."""
    gen = np.random.default_rng(602)
    t = OrderedDict()

    def normal(shape):
        return gen.standard_normal(shape).astype(np.float32)

    for n, shape in SHAPES.items():
        t[n + ".init"] = normal(shape).astype(np.float64)
    for n, shape in SHAPES.items():
        grads = np.stack([normal(shape) * np.float32(scale) for scale in SCALES])
        t[n + ".grad"] = grads.astype(np.float64)
    t["p2.grad"][0] = 0         # nothing to orthogonalise: buf is zero as well
    return t


def run(t, meta):
    """The results, and the smallest and the largest singular value of all nonzero o."""
    r = OrderedDict(norm=np.array([global_norm({p: t[p + ".grad"][n] for p in SHAPES})
                                   for n in range(len(SCALES))]))
    low, high = np.inf, 0.0
    for v in variants():
        opt = Muon({p: t[p + ".init"] for p in SHAPES}, MATRICES, float(meta[v + ".momentum"]),
                   float(meta[v + ".weight_decay"]), float(meta[v + ".clip"]),
                   float(meta["beta1"]), float(meta["beta2"]), float(meta["eps"]))
        trace = {p: [] for p in SHAPES}
        for n in range(len(SCALES)):
            opt.step({p: t[p + ".grad"][n] for p in SHAPES}, float(meta["lr"]))
            for p in SHAPES:
                trace[p].append(opt.p[p])
            for o in opt.o.values():
                if o.any():
                    s = np.linalg.svd(o, compute_uv=False)
                    low, high = min(low, s.min()), max(high, s.max())
        r.update((f"{v}.{p}", np.stack(values)) for p, values in trace.items())
        r.update((f"{v}.{p}.buf", buf) for p, buf in opt.buf.items())
    return r, low, high


def make_muon():
    t = inputs()
    meta = OrderedDict(steps=len(SCALES), lr="0.05", beta1="0.9", beta2="0.999", eps="1e-08")
    for v, values in variants().items():
        for key, value in zip(("momentum", "weight_decay", "clip"), values):
            meta[f"{v}.{key}"] = repr(value)
    results, low, high = run(t, meta)
    assert LOW <= low and high <= HIGH, (low, high)
    single, _, _ = run({n: a.astype(np.float32) for n, a in t.items()}, meta)
    t, results, single = ({n: torch.from_numpy(a) for n, a in x.items()}
                          for x in (t, results, single))
    worst, where = largest(relative_errors(results, single))
    assert worst < TOLERANCE, (worst, where)
    FILES.worst = worst
    FILES.write_results("muon", t, results, meta, worst, where,
                        f", singular values {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    FILES.make(OrderedDict(muon=make_muon), sys.argv[1:])
