#!/usr/bin/env python3
r"""A training step of the adaptive-span transformer in PyTorch (1.13 or newer), a benchmark
contender: eager or compiled, float32 or bfloat16 autocast.

Written as a careful PyTorch user would: one matmul for queries, keys and values of the
block, another for keys and values of the cache, which needs no input gradient; keys and
values joined by one concatenation; distances aligned by strided views; the division by
the masked sum on the (M, D) result instead of the (M, S) weights; the optimiser with
foreach; hidden states cached and projected again; layers trimmed to their longest head in
units of 64; two host synchronisations per step. Each layer is compiled separately
(torch.compile, constant shapes). The semantics are the literal ones: softmax over the
whole working span, then span mask and renormalisation with 1e-8. Zero rows of an empty
cache are ordinary keys.

    attn_span_torch.py --nlayers 12 --hid-sz 512 --inner-hid-sz 2048 --nheads 8 \
        --attn-span 8192 --block-sz 512 --batch-sz 16 --adapt-span --data FILE --steps 10 \
        --warmup 20 --threads 2 [--dtype bf16] [--compile]

The protocol is that of sru_torch.py, which must be in the same directory; the replies
also have span_max, the longest working span.

    attn_span_torch.py --probe [--threads 2]        GFLOP/s of a matmul of the feed-forward
                                                    block, to compare environments
    attn_span_torch.py --check tests/golden/curve_ref.safetensors
                                                    replays a golden training curve

Data are bytes (vocabulary 256): batch row b is the b-th of batch-sz equal parts; at the
end of the parts training restarts at position 0 with zero caches.
"""
import json
import math
import resource
import sys
import time
import traceback

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from sru_torch import autocast, cannot, load_safetensors, parser, probe


def unskewed(x, S):
    """(B, M, S+M) indexed by key row -> (B, M, S): out[i,l] = x[i,i+l], so that column l is
    distance S-l. A view."""
    B, M, W = x.shape
    x = x.contiguous()
    return x.as_strided((B, M, S), (M * W, W + 1, 1))


def skewed(x):
    """(B, M, S) -> (B, M, S+M), the inverse; zeros elsewhere. One pass over the memory."""
    B, M, S = x.shape
    y = x.new_empty(B, M, S + M + 1)
    y[:, :, :S] = x
    y[:, :, S:] = 0
    return y.view(B, M * (S + M + 1))[:, :M * (S + M)].view(B, M, S + M)


# each is the other's adjoint; autograd's own would fill with zeros first
class Unskew(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, S):
        return unskewed(x, S)

    @staticmethod
    def backward(ctx, g):
        return skewed(g), None


class Skew(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.S = x.shape[2]
        return skewed(x)

    @staticmethod
    def backward(ctx, g):
        return unskewed(g, ctx.S)


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

    def forward(self, h, cache, key_pe, S):
        B, M, d = h.shape
        H, D = self.H, self.D
        # Three matmuls of h in one; one of the cache, whose rows need no gradient
        w = torch.cat((self.wk.weight, self.wv.weight, self.wq.weight))
        x = F.linear(h, w)
        old = F.linear(cache[:, max(0, cache.shape[1] - S):], w[:2 * d])
        q = (x[:, :, 2 * d:] * (1.0 / math.sqrt(D))).view(B, M, H, D)
        q = q.transpose(1, 2).reshape(B * H, M, D)
        kv = [t.unflatten(-1, (2, H, D)).permute(2, 0, 3, 1, 4) for t in (old, x[:, :, :2 * d])]
        if old.shape[1] < S:
            kv.insert(0, old.new_zeros(2, B, H, S - old.shape[1], D))
        k, v = torch.cat(kv, 3).view(2, B * H, S + M, D).unbind()
        y = self.attend(q, k, v, key_pe, S)
        return self.wo(y.view(B, H, M, D).transpose(1, 2).reshape(B, M, d))

    def attend(self, q, k, v, key_pe, S):
        """(B H, M, D), (B H, S+M, D) twice -> (B H, M, D)"""
        H = self.H
        score = torch.matmul(q, key_pe[-S:].t())
        score = score.add_(Unskew.apply(torch.bmm(q, k.transpose(1, 2)), S))
        p = torch.softmax(score, -1, dtype=torch.float32)
        if self.span is None:
            return torch.bmm(Skew.apply(p.to(v.dtype)), v)
        m = self.mask(S)
        # its gradient is summed over M first, then over B
        p = p * m.expand(q.shape[0] // H, H, S).reshape(-1, 1, S)
        # rows of D, not of S
        return torch.bmm(Skew.apply(p.to(v.dtype)), v) / (p.sum(-1, keepdim=True) + 1e-8)

    def mask(self, S):
        """(H, S): column l is distance S-l"""
        z = self.span[:, None] * self.L
        return ((1.0 - self.distance[-S:] + z) / self.R + 1.0).clamp(0.0, 1.0)


class Layer(nn.Module):
    def __init__(self, a, attention=Attention):
        super().__init__()
        self.attn = attention(a)
        self.norm1 = nn.LayerNorm(a.hid_sz)
        self.ff = nn.ModuleDict({"fc1": nn.Linear(a.hid_sz, a.inner_hid_sz),
                                 "fc2": nn.Linear(a.inner_hid_sz, a.hid_sz)})
        self.norm2 = nn.LayerNorm(a.hid_sz)

    def forward(self, h, cache, key_pe, S):
        h = self.norm1(h + self.attn(h, cache, key_pe, S))
        return self.norm2(h + self.ff["fc2"](F.relu(self.ff["fc1"](h))))


class Model(nn.Module):
    def __init__(self, a, layer=Layer):
        super().__init__()
        self.a = a
        self.in_emb = nn.Embedding(a.vocab, a.hid_sz)
        self.out_emb = nn.Linear(a.hid_sz, a.vocab)
        self.key_pe = nn.Parameter(torch.randn(a.attn_span, a.hid_sz // a.nheads))
        self.layers = nn.ModuleList(layer(a) for _ in range(a.nlayers))

    def plan(self):
        """(S, C) of every layer: synchronises with the device."""
        a = self.a
        if not a.adapt_span:
            return [(a.attn_span, a.attn_span)] * a.nlayers
        largest = torch.stack([l.attn.span.detach().max() for l in self.layers]).tolist()
        return [working_span(z, a.attn_span, a.ramp, True) for z in largest]

    def initial_cache(self, device):
        a = self.a
        return [torch.zeros(a.batch_sz, C, a.hid_sz, device=device) for _, C in self.plan()]

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
    """Adagrad whose step, not its accumulator, is scaled by a clip on the norm of each
    tensor's gradient."""

    def __init__(self, params, lr, clip, warmup):
        self.params, self.lr, self.clip, self.warmup, self.n = list(params), lr, clip, warmup, 0
        self.sums = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        self.n += 1
        lr = self.lr * (min(1.0, self.n / self.warmup) if self.warmup > 0 else 1.0)
        grads, scale = [p.grad for p in self.params], [-lr] * len(self.params)
        torch._foreach_addcmul_(self.sums, grads, grads)
        if self.clip > 0:
            norms = torch.stack([g.norm() for g in grads]).tolist()
            scale = [-lr * min(1.0, self.clip / (n + 1e-10)) for n in norms]
        root = torch._foreach_sqrt(self.sums)
        torch._foreach_add_(root, 1e-10)
        torch._foreach_addcdiv_(self.params, grads, root, scale)


class Trainer:
    def __init__(self, a, data, model=Model):
        self.a, self.data, self.device = a, data, torch.device(a.device)
        torch.manual_seed(a.seed)
        self.model = model(a)
        if a.params:
            self.load(load_safetensors(a.params)[0])
        self.model.to(self.device)
        self.position, self.caches = 0, self.model.initial_cache(self.device)
        self.optimiser = AdagradClip(self.model.parameters(), a.lr, a.grad_clip, a.lr_warmup)
        # layer by layer: one graph for each window, not one eight times as long; shapes
        # stay constants
        if a.compile:
            for layer in self.model.layers:
                layer.compile(dynamic=False)
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
        with autocast(self.device, a.dtype):
            nll, self.caches = self.model(x, y, self.caches, self.model.plan())
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

    def graphs(self):
        """Graphs compiled so far."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.a.compile else 0

    def synchronise(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def round(self, steps):
        self.synchronise()
        graphs = self.graphs()
        start = time.monotonic()
        losses = [self.step() for _ in range(steps)]
        self.synchronise()
        seconds = time.monotonic() - start
        peak = (torch.cuda.max_memory_allocated() if self.device.type == "cuda"
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return {"tokens_per_s": steps * self.a.batch_sz * self.a.block_sz / seconds,
                "loss_first": float(losses[0]), "loss_last": float(losses[-1]),
                "loss_step1": float(self.first_loss), "steps_done": self.done,
                "seconds": seconds, "peak_bytes": int(peak),
                "span_max": max(S for S, _ in self.model.plan()),
                "compiled": self.graphs() - graphs}


def load_bytes(path, batch, device):
    with open(path, "rb") as f:
        data = np.frombuffer(f.read(), dtype=np.uint8)
    n = len(data) // batch
    return torch.from_numpy(data[:n * batch].reshape(batch, n).copy()).to(device)


def check(a):
    """Replays a golden literal training curve. Fails if a loss differs by more than 1e-4."""
    t, m = load_safetensors(a.check)
    names = {"vocab": "vocab", "nlayers": "layers", "hid_sz": "dim", "inner_hid_sz": "inner",
             "nheads": "heads", "attn_span": "span", "block_sz": "block", "batch_sz": "batch",
             "ramp": "ramp", "lr_warmup": "warmup"}
    for ours, theirs in names.items():
        setattr(a, ours, int(m[theirs]))
    a.adapt_span, a.adapt_span_loss = m["adapt_span"] == "1", float(m["span_loss"])
    a.lr, a.grad_clip, a.params = float(m["lr"]), float(m["clip"]), a.check
    if m["literal"] != "1" or m["optim"] != "adagrad":
        raise SystemExit("needs a literal adagrad curve")
    trainer = Trainer(a, t["tokens"].to(a.device))
    losses = torch.stack([trainer.step() for _ in range(int(m["steps"]))]).double().cpu()
    spans = torch.stack([l.attn.span.detach().double().cpu() for l in trainer.model.layers])
    worst = float((losses - t["losses"]).abs().max())
    spans_off = float((spans - t["spans"][-1]).abs().max())
    print(json.dumps({"largest_loss_difference": worst, "largest_span_difference": spans_off,
                      "loss_last": float(losses[-1])}))
    return 0 if worst < 1e-4 else 1


def options(doc):
    p = parser(doc)
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
    p.add_argument("--steps", type=int, default=10, help="training steps per round")
    p.add_argument("--warmup", type=int, default=0, help="training steps before the first round")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--dtype", choices=("f32", "bf16"), default="f32",
                   help="bf16: autocast, float32 parameters")
    p.add_argument("--lr", type=float, default=0.07)
    p.add_argument("--grad-clip", type=float, default=0.03)
    p.add_argument("--lr-warmup", type=int, default=32000,
                   help="updates over which the learning rate rises; 0: constant")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--tf32", action="store_true")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile, needs PyTorch 2 and a C++ compiler")
    return p


def main():
    p = options(__doc__)
    p.add_argument("--probe", action="store_true", help="print the GFLOP/s of a matmul, and end")
    p.add_argument("--check", metavar="GOLDEN", help="replay a golden curve and compare the losses")
    a = p.parse_args()
    if a.threads > 0:
        torch.set_num_threads(a.threads)
    torch.backends.cuda.matmul.allow_tf32 = a.tf32
    if a.probe:
        probe()
        return 0
    if a.compile and not hasattr(nn.Module, "compile"):
        cannot(f"PyTorch {torch.__version__} has no torch.compile (2.2 and newer)")
    if a.check:
        return check(a)
    if not a.data:
        p.error("--data is required")
    trainer = Trainer(a, load_bytes(a.data, a.batch_sz, a.device))
    try:
        for _ in range(a.warmup):
            trainer.step()
        trainer.synchronise()
    except Exception as e:
        if not a.compile:
            raise
        traceback.print_exc()
        cannot("torch.compile: " + (str(e).strip() or type(e).__name__).splitlines()[0])
    print("ready", file=sys.stderr, flush=True)
    for _ in sys.stdin:
        print(json.dumps(trainer.round(a.steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
