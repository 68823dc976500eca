#!/usr/bin/env python3
"""Adaptive-span transformer training step in plain PyTorch (1.13 and newer), a benchmark contender.

What a careful PyTorch user writes: dense batched matmuls, distances aligned by pad + reshape, hidden states cached and
re-projected to keys and values, layers trimmed to their longest head in units of 64, one host synchronisation per step.
Semantics are the literal ones: softmax over the whole working span, then span mask and renormalisation with 1e-8, and
zero rows of a fresh cache are ordinary keys.

    attn_span_torch.py --nlayers 12 --hid-sz 512 --inner-hid-sz 2048 --nheads 8 --attn-span 8192 --block-sz 512 \
        --batch-sz 16 --adapt-span --data FILE --steps 10 --warmup 20 --threads 2

Protocol: parameters and data are loaded and --warmup steps run, then "ready" goes to stderr. Every line on stdin asks for
one round of --steps training steps; the answer is one JSON line on stdout: tokens_per_s, loss_first and loss_last (mean nll
in nats of the round's first and last step), loss_step1 (of the very first step), steps_done, seconds, peak_bytes,
span_max. End of input ends the program. peak_bytes is the resident peak of the process on a CPU and the allocator's peak on
a GPU.

    attn_span_torch.py --check tests/golden/curve_ref.safetensors     replay a golden training curve

Data are bytes (vocabulary 256): batch row b is the b-th of batch-sz equal parts; at the end of the parts training starts again
at position 0 with zero caches.
"""
import argparse
import contextlib
import json
import math
import resource
import struct
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def unskew(x, S):
    """(B, M, S+M) indexed by key row -> (B, M, S): out[i,l] = x[i,i+l], so that column l is distance S-l."""
    B, M, W = x.shape
    return F.pad(x.reshape(B, M * W), (0, M)).view(B, M, W + 1)[:, :, :S]


def skew(x):
    """(B, M, S) -> (B, M, S+M), the inverse; zeros elsewhere."""
    B, M, S = x.shape
    return F.pad(x, (0, M + 1)).view(B, M * (S + M + 1))[:, :M * (S + M)].view(B, M, S + M)


def working_span(largest, L, R, adapt):
    """(S, C): keys attended to and rows to cache, from the largest span fraction of the layer."""
    if not adapt:
        return L, L
    current = min(max(math.ceil(largest * L) + R, 0), L)
    S = L - min(L - 1, L - current) // 64 * 64
    return S, min(L, S + 64)


class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        d = a.hid_sz
        self.H, self.D, self.L, self.R = a.nheads, d // a.nheads, a.attn_span, a.ramp
        self.wq, self.wo, self.wv, self.wk = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.span = nn.Parameter(torch.full((a.nheads,), a.span_init)) if a.adapt_span else None
        self.register_buffer("distance", torch.arange(a.attn_span, 0, -1).float(), persistent=False)

    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.H, self.D).transpose(1, 2).reshape(B * self.H, T, self.D)

    def forward(self, h, cache, key_pe, S):
        B, M, d = h.shape
        memory = torch.cat([cache, h], 1)
        q = self.split(self.wq(h)) * (1.0 / math.sqrt(self.D))
        missing = S + M - memory.shape[1]
        if missing < 0:
            memory = memory[:, -missing:]
        k, v = self.split(self.wk(memory)), self.split(self.wv(memory))
        if missing > 0:
            k, v = F.pad(k, (0, 0, missing, 0)), F.pad(v, (0, 0, missing, 0))
        score = unskew(torch.matmul(q, k.transpose(1, 2)), S) + torch.matmul(q, key_pe[-S:].t())
        p = torch.softmax(score.float(), -1)
        if self.span is not None:
            m = ((1.0 - self.distance[-S:] + self.span[:, None] * self.L) / self.R + 1.0).clamp(0.0, 1.0)
            w = (p.view(B, self.H, M, S) * m[None, :, None, :]).view(B * self.H, M, S)
            p = w / (w.sum(-1, keepdim=True) + 1e-8)
        y = torch.matmul(skew(p.to(v.dtype)), v)
        return self.wo(y.view(B, self.H, M, self.D).transpose(1, 2).reshape(B, M, d))


class Layer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.attn = Attention(a)
        self.norm1 = nn.LayerNorm(a.hid_sz)
        self.ff = nn.ModuleDict({"fc1": nn.Linear(a.hid_sz, a.inner_hid_sz), "fc2": nn.Linear(a.inner_hid_sz, a.hid_sz)})
        self.norm2 = nn.LayerNorm(a.hid_sz)

    def forward(self, h, cache, key_pe, S):
        h = self.norm1(h + self.attn(h, cache, key_pe, S))
        return self.norm2(h + self.ff["fc2"](F.relu(self.ff["fc1"](h))))


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        self.in_emb = nn.Embedding(a.vocab, a.hid_sz)
        self.out_emb = nn.Linear(a.hid_sz, a.vocab)
        self.key_pe = nn.Parameter(torch.randn(a.attn_span, a.hid_sz // a.nheads))
        self.layers = nn.ModuleList(Layer(a) for _ in range(a.nlayers))

    def plan(self):
        """(S, C) of every layer; the only host synchronisation of a step."""
        a = self.a
        if not a.adapt_span:
            return [(a.attn_span, a.attn_span)] * a.nlayers
        largest = torch.stack([l.attn.span.detach().max() for l in self.layers]).tolist()
        return [working_span(z, a.attn_span, a.ramp, True) for z in largest]

    def initial_cache(self, device):
        return [torch.zeros(self.a.batch_sz, C, self.a.hid_sz, device=device) for _, C in self.plan()]

    def forward(self, x, y, caches, plan):
        M, new = x.shape[1], []
        h = self.in_emb(x)
        for layer, cache, (S, C) in zip(self.layers, caches, plan):
            if C > M:
                keep = min(cache.shape[1], C - M)
                new.append(torch.cat([cache[:, cache.shape[1] - keep:], h.detach()], 1))
            else:
                new.append(h[:, M - C:].detach().clone())
            h = layer(h, cache, self.key_pe, S)
        return F.cross_entropy(self.out_emb(h).float().flatten(0, 1), y.flatten()), new


class AdagradClip:
    """Adagrad whose step, not its accumulator, is scaled by a clip on the norm of each tensor's gradient."""

    def __init__(self, params, lr, clip, warmup):
        self.params, self.lr, self.clip, self.warmup, self.n = list(params), lr, clip, warmup, 0
        self.sums = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        self.n += 1
        lr = self.lr * (min(1.0, self.n / self.warmup) if self.warmup > 0 else 1.0)
        for p, s in zip(self.params, self.sums):
            g = p.grad
            s.addcmul_(g, g)
            step = g / s.sqrt().add_(1e-10)
            if self.clip > 0:
                step *= (self.clip / (g.norm() + 1e-10)).clamp(max=1.0)
            p.add_(step, alpha=-lr)


class Trainer:
    def __init__(self, a, data):
        self.a, self.data, self.device = a, data, torch.device(a.device)
        torch.manual_seed(a.seed)
        self.model = Model(a)
        if a.params:
            self.load(load_safetensors(a.params)[0])
        self.model.to(self.device)
        self.position, self.caches = 0, self.model.initial_cache(self.device)
        self.optimiser = AdagradClip(self.model.parameters(), a.lr, a.grad_clip, a.lr_warmup)
        self.run = torch.compile(self.model, dynamic=True) if a.compile else self.model
        self.first_loss, self.done = None, 0

    def load(self, tensors):
        tensors = {k[6:] if k.startswith("param.") else k: v for k, v in tensors.items()
                   if "." not in k or k.startswith(("param.", "in_emb.", "out_emb.", "layers."))}
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                for w in ("wq", "wk", "wv", "wo"):
                    name = name.replace(f"attn.{w}.weight", f"attn.{w}")
                p.copy_(tensors[name].reshape(p.shape))

    def step(self):
        a, M, p = self.a, self.a.block_sz, self.position
        x, y = self.data[:, p:p + M].long(), self.data[:, p + 1:p + M + 1].long()
        for q in self.model.parameters():
            q.grad = None
        auto = torch.autocast(self.device.type, dtype=torch.bfloat16) if a.dtype == "bf16" else contextlib.nullcontext()
        with auto:
            nll, self.caches = self.run(x, y, self.caches, self.model.plan())
        loss = nll
        if a.adapt_span:
            for l in self.model.layers:
                loss = loss + a.adapt_span_loss * a.attn_span * l.attn.span.mean()
        loss.backward()
        self.optimiser.step()
        if a.adapt_span:
            with torch.no_grad():
                for l in self.model.layers:
                    l.attn.span.clamp_(0.0, 1.0)
        self.position += M
        if self.position >= self.data.shape[1] - M:
            self.position, self.caches = 0, [torch.zeros_like(c) for c in self.caches]
        self.done += 1
        nll = nll.detach()
        if self.first_loss is None:
            self.first_loss = nll
        return nll

    def synchronise(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def round(self, steps):
        self.synchronise()
        start = time.monotonic()
        losses = [self.step() for _ in range(steps)]
        self.synchronise()
        seconds = time.monotonic() - start
        peak = (torch.cuda.max_memory_allocated() if self.device.type == "cuda"
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return {"tokens_per_s": steps * self.a.batch_sz * self.a.block_sz / seconds, "loss_first": float(losses[0]),
                "loss_last": float(losses[-1]), "loss_step1": float(self.first_loss), "steps_done": self.done,
                "seconds": seconds, "peak_bytes": int(peak), "span_max": max(S for S, _ in self.model.plan())}


def load_safetensors(path):
    with open(path, "rb") as f:
        raw = f.read()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + n])
    metadata = header.pop("__metadata__", {})
    kinds = {"F64": "<f8", "F32": "<f4", "I32": "<i4", "I64": "<i8"}
    out = {}
    for name, h in header.items():
        a, b = h["data_offsets"]
        out[name] = torch.from_numpy(np.frombuffer(raw[8 + n + a:8 + n + b], kinds[h["dtype"]]).reshape(h["shape"]).copy())
    return out, metadata


def load_bytes(path, batch, device):
    with open(path, "rb") as f:
        data = np.frombuffer(f.read(), dtype=np.uint8)
    n = len(data) // batch
    return torch.from_numpy(data[:n * batch].reshape(batch, n).copy()).to(device)


def check(a):
    """Replays a golden literal training curve; fails when a loss differs by more than 1e-4."""
    t, m = load_safetensors(a.check)
    for ours, theirs in (("vocab", "vocab"), ("nlayers", "layers"), ("hid_sz", "dim"), ("inner_hid_sz", "inner"),
                         ("nheads", "heads"), ("attn_span", "span"), ("block_sz", "block"), ("batch_sz", "batch"),
                         ("ramp", "ramp"), ("lr_warmup", "warmup")):
        setattr(a, ours, int(m[theirs]))
    a.adapt_span, a.adapt_span_loss = m["adapt_span"] == "1", float(m["span_loss"])
    a.lr, a.grad_clip, a.params = float(m["lr"]), float(m["clip"]), a.check
    if m["literal"] != "1" or m["optim"] != "adagrad":
        raise SystemExit("needs a literal adagrad curve")
    trainer = Trainer(a, t["tokens"].to(a.device))
    losses = torch.stack([trainer.step() for _ in range(int(m["steps"]))]).double().cpu()
    spans = torch.stack([l.attn.span.detach().double().cpu() for l in trainer.model.layers])
    worst = float((losses - t["losses"]).abs().max())
    print(json.dumps({"largest_loss_difference": worst, "largest_span_difference":
                      float((spans - t["spans"][-1]).abs().max()), "loss_last": float(losses[-1])}))
    return 0 if worst < 1e-4 else 1


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nlayers", type=int, default=2)
    p.add_argument("--hid-sz", type=int, default=64)
    p.add_argument("--inner-hid-sz", type=int, default=256)
    p.add_argument("--nheads", type=int, default=4)
    p.add_argument("--attn-span", type=int, default=256)
    p.add_argument("--block-sz", type=int, default=64)
    p.add_argument("--batch-sz", type=int, default=8)
    p.add_argument("--adapt-span", action="store_true")
    p.add_argument("--adapt-span-loss", type=float, default=0.0)
    p.add_argument("--ramp", type=int, default=32)
    p.add_argument("--span-init", type=float, default=0.0)
    p.add_argument("--vocab", type=int, default=256)
    p.add_argument("--data", help="file of bytes")
    p.add_argument("--params", help="safetensors file of initial parameters")
    p.add_argument("--steps", type=int, default=10, help="training steps in a round")
    p.add_argument("--warmup", type=int, default=0, help="training steps before the first round")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="bf16: autocast, float32 parameters")
    p.add_argument("--lr", type=float, default=0.07)
    p.add_argument("--grad-clip", type=float, default=0.03)
    p.add_argument("--lr-warmup", type=int, default=32000, help="updates over which the learning rate rises; 0: constant")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--tf32", action="store_true")
    p.add_argument("--compile", action="store_true", help="torch.compile, needs PyTorch 2")
    p.add_argument("--check", metavar="GOLDEN", help="replay a golden curve and compare the losses")
    a = p.parse_args()
    if a.threads > 0:
        torch.set_num_threads(a.threads)
    torch.backends.cuda.matmul.allow_tf32 = a.tf32
    if a.check:
        return check(a)
    if not a.data:
        p.error("--data is required")
    trainer = Trainer(a, load_bytes(a.data, a.batch_sz, a.device))
    for _ in range(a.warmup):
        trainer.step()
    trainer.synchronise()
    print("ready", file=sys.stderr, flush=True)
    for _ in sys.stdin:
        print(json.dumps(trainer.round(a.steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
