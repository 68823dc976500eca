#!/usr/bin/env python3
"""Float64 NumPy oracle of the Muon optimiser.

Muon (K. Jordan et al. 2024, kellerjordan.github.io/posts/muon) with the update scale of J.
Liu et al. 2025 (arXiv:2502.16982, equation 4); AdamW (1711.05101) for all parameters that
are not hidden matrices. Written from the formulas only.

    python3 muon_oracle.py --check    singular values, closed forms, torch.optim.AdamW
"""
import math
import sys

import numpy as np
import torch

sys.dont_write_bytecode = True
from common import Checker

A, B, C = 3.4445, -4.7750, 2.0315       # Newton-Schulz polynomial A s + B s^3 + C s^5
NORM_EPS = 1e-7
# Limits of the singular values of orthogonalise(u), if those of u are at least 0.0014 |u|_F.
LOW, HIGH = 0.6, 1.3


def orthogonalise(u):
    """(rows,cols) -> (rows,cols), u = P S Q^T -> about P Q^T: five Newton-Schulz steps."""
    x = u / (np.linalg.norm(u) + NORM_EPS)
    if u.shape[0] > u.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = A * x + (B * a + C * a @ a) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def global_norm(grads):
    return math.sqrt(sum(float(np.sum(g * g)) for g in grads.values()))


class Muon:
    """params: {name: array}. matrices: the names that Muon updates; AdamW updates the others.

    clip: limit of the global norm over all gradients, 0 for none. buf: momentum buffers,
    o: orthogonalised matrices of the last update, both {name: (rows,cols)}.
    """

    def __init__(self, params, matrices, momentum=0.95, weight_decay=0.0, clip=0.0, beta1=0.9,
                 beta2=0.999, eps=1e-8):
        self.p = dict(params)
        self.momentum, self.wd, self.clip = momentum, weight_decay, clip
        self.b1, self.b2, self.eps = beta1, beta2, eps
        self.t = 0
        self.buf = {n: np.zeros_like(params[n]) for n in matrices}
        self.o = {}
        self.m = {n: np.zeros_like(v) for n, v in params.items() if n not in matrices}
        self.s = {n: np.zeros_like(v) for n, v in self.m.items()}

    def step(self, grads, lr):
        """Updates p. Changes nothing if the norm of the gradients is not finite."""
        norm = global_norm(grads)
        if not math.isfinite(norm):
            return
        factor = self.clip / (norm + 1e-6) if self.clip else 1.0
        self.t += 1
        for n, g in grads.items():
            g = g * min(factor, 1.0)
            update = self.muon(n, g) if n in self.buf else self.adam(n, g)
            self.p[n] = self.p[n] - lr * self.wd * self.p[n] - lr * update

    def muon(self, n, g):
        self.buf[n] = self.momentum * self.buf[n] + g
        self.o[n] = orthogonalise(g + self.momentum * self.buf[n])
        return 0.2 * math.sqrt(max(g.shape)) * self.o[n]

    def adam(self, n, g):
        self.m[n] = self.b1 * self.m[n] + (1 - self.b1) * g
        self.s[n] = self.b2 * self.s[n] + (1 - self.b2) * g * g
        m = self.m[n] / (1 - self.b1 ** self.t)
        s = self.s[n] / (1 - self.b2 ** self.t)
        return m / (np.sqrt(s) + self.eps)


# -------------------------------------------------- checks

def polynomial(s):
    for _ in range(5):
        s = A * s + B * s ** 3 + C * s ** 5
    return s


def check_orthogonalise(checker):
    """Against the polynomial of each singular value, from an SVD."""
    s = polynomial(np.geomspace(0.0014, 1, 100_000))
    checker.expect(LOW <= s.min() and s.max() <= HIGH,
                   f"0.0014 to 1 becomes {s.min():.3f} to {s.max():.3f}")
    gen = np.random.default_rng(1)
    for shape in ((24, 8), (8, 40), (16, 16), (2, 2), (3, 100)):
        u = gen.standard_normal(shape)
        p, s, q = np.linalg.svd(u, full_matrices=False)
        s = polynomial(s / (math.sqrt(np.sum(s * s)) + NORM_EPS))
        o = orthogonalise(u)
        checker.close(f"orthogonalise {shape} against SVD", o, (p * s) @ q)
        checker.close(f"orthogonalise {shape}, transposed", orthogonalise(u.T), o.T)
        s = np.linalg.svd(o, compute_uv=False)
        checker.expect(LOW <= s.min() and s.max() <= HIGH,
                       f"singular values {shape}: {s.min():.3f} to {s.max():.3f}")
    checker.close("orthogonalise zeros", orthogonalise(np.zeros((3, 2))), np.zeros((3, 2)), 0)


def check_muon(checker):
    """Closed forms for a constant gradient and for zero gradients; a gradient of NaN."""
    gen = np.random.default_rng(2)
    start, g = gen.standard_normal((6, 9)), gen.standard_normal((6, 9))
    lr, n = 0.05, 7
    opt = Muon({"w": start}, ["w"], momentum=0.9)
    for _ in range(n):
        opt.step({"w": g}, lr)
    checker.close("constant gradient: buf", opt.buf["w"], g * (1 - 0.9 ** n) / (1 - 0.9))
    checker.close("constant gradient: p", opt.p["w"],
                  start - n * lr * 0.2 * 3 * orthogonalise(g), 1e-7)   # NORM_EPS acts less
    opt = Muon({"w": start}, ["w"], weight_decay=0.1)
    for _ in range(n):
        opt.step({"w": 0 * g}, lr)
    checker.close("zero gradients: decay", opt.p["w"], start * (1 - lr * 0.1) ** n)
    opt.step({"w": g * math.nan}, lr)
    checker.close("NaN: p", opt.p["w"], start * (1 - lr * 0.1) ** n)
    checker.close("NaN: buf", opt.buf["w"], 0 * g, 0)


def check_adamw(checker):
    """Against torch.optim.AdamW and torch's clip."""
    gen = np.random.default_rng(3)
    start = {"v": gen.standard_normal(7), "e": gen.standard_normal((5, 3))}
    ours = Muon(start, [], weight_decay=0.1, clip=2.0)
    theirs = {n: torch.from_numpy(v.copy()).requires_grad_(True) for n, v in start.items()}
    opt = torch.optim.AdamW(theirs.values(), lr=0.02, weight_decay=0.1)
    for i in range(20):
        grads = {n: gen.standard_normal(v.shape) * (i % 3) / 2 for n, v in start.items()}
        ours.step(grads, 0.02)
        for n, p in theirs.items():
            p.grad = torch.from_numpy(grads[n].copy())
        torch.nn.utils.clip_grad_norm_(theirs.values(), 2.0)
        opt.step()
    for n, p in theirs.items():
        checker.close(f"AdamW against torch.optim, {n}", ours.p[n], p.detach().numpy(), 1e-13)


def main():
    if sys.argv[1:] != ["--check"]:
        print(__doc__)
        return 2
    checker = Checker()
    for check in (check_orthogonalise, check_muon, check_adamw):
        check(checker)
    return checker.finish()


if __name__ == "__main__":
    sys.exit(main())
