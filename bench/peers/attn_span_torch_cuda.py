#!/usr/bin/env python3
r"""Training steps of the adaptive-span transformer in PyTorch on a GPU, a benchmark
contender: eager or compiled, float32, TF32 or bfloat16 autocast, and with FlexAttention.
Also single operations. The model is that of attn_span_torch.py; this file contains what
differs on a GPU.

Written as a careful PyTorch user would: the learned spans are read every hundred steps
instead of every step (windows are multiples of 64 and have that margin); parameters and
gradients are flat buffers, so that the optimiser is one kernel when compiled, and a few
otherwise; norms, clipping and the learning rate stay on the device, so that no step waits
for them; layers are compiled one by one with constant shapes. --flex: one matmul writes
q PE^T and log m to a matrix (B,H,M,S) that FlexAttention's score_mod reads; the block
mask follows the span of each head and is rebuilt every hundred steps; keys without weight
are not computed, and the normaliser has no 1e-8. --pers N: all-attention, N learned keys
and values per head instead of the feed-forward block.

    attn_span_torch_cuda.py --device cuda --nlayers 12 .. (as attn_span_torch.py) \
        [--tf32] [--compile | --flex] [--pers N]

Protocol: the program makes one step and replies with a line of JSON. For a line "warm" on
stdin it makes steps up to --warmup (fewer if they take longer than --warm-seconds, but at
least --check-step), for a line "round" one step and then --steps timed ones; each time it
replies with a line of JSON: tokens_per_s (by the clock of the host over the round), ms (of
each step, by events), loss_step1, loss_check (of step --check-step), steps_done, peak_bytes
(max_memory_allocated), driver_bytes (by how much more the device holds than before),
compiled (graphs compiled within the round). Unused memory is returned after each. The
program ends at the end of its input; if it cannot do what is requested, with exit code 3
and a line "cannot: why" on stderr.

    attn_span_torch_cuda.py --ops --device cuda     for every line of JSON, one round of an
                                                    operation:
        {"op": "gemm", "M": 64, "N": 64, "K": 64, "ta": 0, "tb": 1, "dtype": "bf16"}
        {"op": "attention", "kind": "flex" | "sdpa", "B": 64, "T": 512, "H": 8, "D": 64,
         "E": 1024, "L": 8192, "dtype": "bf16"}
"""
import json
import math
import sys
import time
import traceback

import torch
import torch.nn as nn
import torch.nn.functional as F

import attn_span_torch as base
from attn_span_torch import Skew, Unskew
from sru_torch import autocast, cannot

try:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError:
    create_block_mask = flex_attention = None


def flex_window(q, k, v, bias, S, N, block_mask):
    """Attention over the N persistent keys and the window. bias (B,H,M,S): column l of row i
    belongs to key row N + i + l."""
    def score(s, b, h, i, j):
        at = j - N - i
        inside = (at >= 0) & (at < S)
        # no position: a zero, read at different places, so that its gradients do not collide
        if N:
            inside = inside & (j >= N)
            at = torch.where(j < N, j % S, at)
        return s + torch.where(inside, bias[b, h, i, at.clamp(0, S - 1)], 0.0).to(s.dtype)
    return flex_attention(q, k, v, score_mod=score, block_mask=block_mask, scale=1.0)


class Attention(base.Attention):
    def __init__(self, a):
        super().__init__(a)
        self.N, self.flex, self.block_mask = a.pers, a.flex, None
        if a.pers:
            self.pers_key = nn.Parameter(torch.zeros(self.H, a.pers, self.D))
            self.pers_val = nn.Parameter(torch.zeros(self.H, a.pers, self.D))
        self.register_buffer("reach", torch.zeros(a.nheads, dtype=torch.int32), persistent=False)

    def persistent(self, dtype):
        """Keys sqrt(D) pk for queries scaled by 1/sqrt(D), and values sqrt(N) pv"""
        pk, pv = self.pers_key * math.sqrt(self.D), self.pers_val * math.sqrt(self.N)
        return pk.to(dtype), pv.to(dtype)

    def attend(self, q, k, v, key_pe, S):
        BH, M, D = q.shape
        H, N = self.H, self.N
        B = BH // H
        if self.flex:
            q, k, v = (t.view(B, H, -1, D) for t in (q, k, v))
            log_m = self.mask(S).clamp_min(1e-30).log().to(q.dtype)[None, :, None]
            bias = torch.matmul(q, key_pe[-S:].t().to(q.dtype)) + log_m
            if N:
                pk, pv = self.persistent(k.dtype)
                k = torch.cat((pk.expand(B, H, N, D), k), 2)
                v = torch.cat((pv.expand(B, H, N, D), v), 2)
            return flex_window(q, k, v, bias, S, N, self.block_mask)
        if not N:
            return super().attend(q, k, v, key_pe, S)
        pk, pv = self.persistent(q.dtype)
        score = torch.matmul(q, key_pe[-S:].t())
        score = score.add_(Unskew.apply(torch.bmm(q, k.transpose(1, 2)), S))
        extra = torch.matmul(q.view(B, H, M, D), pk.transpose(1, 2)).view(BH, M, N)
        p = torch.softmax(torch.cat((score, extra), -1), -1, dtype=torch.float32)
        near = p[..., :S] * self.mask(S).expand(B, H, S).reshape(-1, 1, S)
        far = p[..., S:]
        y = torch.bmm(Skew.apply(near.to(v.dtype)), v)
        y = y + torch.matmul(far.to(v.dtype).view(B, H, M, N), pv).view(BH, M, D)
        return y / (near.sum(-1, keepdim=True) + far.sum(-1, keepdim=True) + 1e-8)

    def plan_mask(self, S, M, spans, device):
        """The block mask of the current spans, with a margin of 8 keys per head, because the
        spans change until it is rebuilt"""
        N = self.N
        reach = [min(S, math.floor(z * self.L) + self.R + 9) for z in spans]
        self.reach.copy_(torch.tensor(reach, dtype=torch.int32))
        reach = self.reach

        def inside(b, h, i, j):
            near = (j - N - i >= S - reach[h]) & (j - N - i < S)
            return near | (j < N) if N else near
        self.block_mask = create_block_mask(inside, None, self.H, M, N + S + M, device=device)


class Layer(base.Layer):
    def __init__(self, a):
        super().__init__(a, Attention)
        if a.pers:
            self.ff = self.norm2 = None

    def forward(self, h, cache, key_pe, S):
        if self.ff is not None:
            return super().forward(h, cache, key_pe, S)
        return self.norm1(h + self.attn(h, cache, key_pe, S))


class Model(base.Model):
    def __init__(self, a):
        super().__init__(a, Layer)
        self.windows, self.age = None, 0

    def plan(self):
        """(S, C) of every layer, from spans that are at most a hundred steps old"""
        if self.windows is None or self.age >= 100:
            a = self.a
            spans = torch.stack([l.attn.span.detach() for l in self.layers]).tolist()
            self.windows = [base.working_span(max(z), a.attn_span, a.ramp, True) for z in spans]
            self.age = 0
            if a.flex:
                for layer, (S, _), z in zip(self.layers, self.windows, spans):
                    layer.attn.plan_mask(S, a.block_sz, z, self.key_pe.device)
        self.age += 1
        return self.windows


def update(p, g, sums, scale, tensor):
    """Adagrad of all parameters at once. scale[tensor]: learning rate times clipping of the
    tensor that an element belongs to"""
    sums.addcmul_(g, g)
    p.sub_(scale[tensor] * g / (sums.sqrt() + 1e-10))
    g.zero_()


class FlatAdagrad:
    """base.AdagradClip with parameters and gradients in one buffer each, and no wait for the
    device"""

    def __init__(self, params, lr, clip, warmup, compiled):
        params = [q for q in params]
        self.lr, self.clip, self.warmup, self.n = lr, clip, warmup, 0
        sizes = [q.numel() for q in params]
        self.flat = torch.cat([q.detach().reshape(-1) for q in params])
        self.grad, self.sums = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        index = torch.arange(len(params), dtype=torch.int32)
        self.tensor = torch.repeat_interleave(index, torch.tensor(sizes)).to(self.flat.device)
        self.grads, at = [], 0
        for q, n in zip(params, sizes):
            q.data = self.flat[at:at + n].view(q.shape)
            q.grad = self.grad[at:at + n].view(q.shape)
            self.grads.append(q.grad)
            at += n
        self.update = torch.compile(update, dynamic=False) if compiled else update

    @torch.no_grad()
    def step(self):
        self.n += 1
        lr = self.lr * (min(1.0, self.n / self.warmup) if self.warmup > 0 else 1.0)
        norms = torch.stack(torch._foreach_norm(self.grads))
        scale = torch.full_like(norms, lr)
        if self.clip > 0:
            scale = (self.clip / (norms + 1e-10)).clamp_max(1.0) * lr
        self.update(self.flat, self.grad, self.sums, scale, self.tensor)


class Trainer(base.Trainer):
    def __init__(self, a, data, before):
        compiled, a.compile = a.compile, False      # the flat buffers first
        super().__init__(a, data, Model)
        a.compile = compiled
        self.cuda, self.before, self.at_check = self.device.type == "cuda", before, None
        self.optimiser = FlatAdagrad(self.model.parameters(), a.lr, a.grad_clip, a.lr_warmup,
                                     compiled)
        if compiled:
            for layer in self.model.layers:
                layer.compile(dynamic=False, **({"backend": a.backend} if a.backend else {}))
        self.data = self.data.long()

    def step(self):
        a, M, at = self.a, self.a.block_sz, self.position
        x, y = self.data[:, at:at + M], self.data[:, at + 1:at + M + 1]
        with autocast(self.device, a.dtype):
            nll, self.caches = self.model(x, y, self.caches, self.model.plan())
        spans = [l.attn.span for l in self.model.layers]
        (nll + a.adapt_span_loss * a.attn_span * torch.stack(spans).mean(1).sum()).backward()
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_clamp_min_(spans, 0.0)
            torch._foreach_clamp_max_(spans, 1.0)
        self.position += M
        if self.position >= self.data.shape[1] - M:
            self.position, self.caches = 0, [torch.zeros_like(c) for c in self.caches]
        self.done += 1
        nll = nll.detach()
        if self.first_loss is None:
            self.first_loss = nll
        if self.done == a.check_step:
            self.at_check = nll
        return nll

    def mark(self):
        if not self.cuda:
            return time.monotonic()
        e = torch.cuda.Event(enable_timing=True)
        e.record()
        return e

    def driver_bytes(self):
        return used_bytes() - self.before if self.cuda else 0

    def answer(self, seconds=0.0, ms=(), graphs=0):
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        driver = self.driver_bytes()
        if self.cuda:
            torch.cuda.empty_cache()        # for the other contenders
        tokens = len(ms) * self.a.batch_sz * self.a.block_sz
        return {"tokens_per_s": tokens / seconds if ms else 0.0,
                "loss_step1": float(self.first_loss),
                "loss_check": -1.0 if self.at_check is None else float(self.at_check),
                "steps_done": self.done, "peak_bytes": int(peak), "driver_bytes": int(driver),
                "compiled": graphs, "ms": [round(t, 4) for t in ms]}

    def warm(self):
        until = time.monotonic() + self.a.warm_seconds
        while self.done < max(self.a.warmup, self.a.check_step):
            if self.done >= self.a.check_step and time.monotonic() >= until:
                break
            self.step()
            self.synchronise()
        return self.answer()

    def round(self, steps):
        self.step()
        self.synchronise()
        graphs, start = self.graphs(), time.monotonic()
        marks = [self.mark()]
        for _ in range(steps):
            self.step()
            marks.append(self.mark())
        self.synchronise()
        seconds = time.monotonic() - start
        ms = [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in zip(marks, marks[1:])]
        return self.answer(seconds, ms, self.graphs() - graphs)


def used_bytes():
    free, total = torch.cuda.mem_get_info()
    return total - free


# >>operations

class Timed:
    """A function that is timed: calls for 5 ms between two events"""

    def __init__(self, fn, cuda):
        self.fn, self.cuda, self.calls = fn, cuda, 1
        for _ in range(2 if cuda else 1):
            self.ms()
        if cuda:
            self.calls = max(1, min(1000, int(5.0 / max(self.ms(), 1e-3)) + 1))
            self.ms()

    def ms(self):
        if not self.cuda:
            start = time.monotonic()
            self.fn()
            return 1e3 * (time.monotonic() - start)
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(self.calls):
            self.fn()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) / self.calls


def op_gemm(c, device):
    dtype = torch.bfloat16 if c["dtype"] == "bf16" else torch.float32
    M, N, K = c["M"], c["N"], c["K"]
    shapes = (K, M) if c["ta"] else (M, K), (N, K) if c["tb"] else (K, N)
    x, y = (torch.rand(s, device=device).mul_(2).sub_(1).to(dtype) for s in shapes)
    x, y = x.t() if c["ta"] else x, y.t() if c["tb"] else y
    out = torch.empty(M, N, device=device, dtype=dtype)

    def run():
        torch.backends.cuda.matmul.allow_tf32 = c["dtype"] == "tf32"
        torch.mm(x, y, out=out)
    return run, None


def op_attention(c, device):
    B, T, H, D, E = c["B"], c["T"], c["H"], c["D"], c["E"]
    keys = E + T if c["kind"] == "flex" else E
    q, k, v, dy = (torch.rand(B, H, n, D, device=device).mul_(2).sub_(1).bfloat16()
                   for n in (T, keys, keys, T))
    for t in (q, k, v):
        t.requires_grad_()
    if c["kind"] == "sdpa":
        inputs = (q, k, v)

        def forward():
            return F.scaled_dot_product_attention(q, k, v)
    else:
        if flex_attention is None:
            raise RuntimeError(f"PyTorch {torch.__version__} has no FlexAttention (2.5 and newer)")
        q.data.mul_(1 / math.sqrt(D))
        pe = torch.rand(E, D, device=device).mul_(2).sub_(1).bfloat16().requires_grad_()
        z = torch.full((H,), (E - 32) / c["L"], device=device, requires_grad=True)
        distance = torch.arange(E, 0, -1, device=device).float()
        block_mask = create_block_mask(lambda b, h, i, j: (j - i >= 0) & (j - i < E), None, None,
                                       T, E + T, device=device)
        inputs = (q, k, v, pe, z)

        def window(q, k, v, pe, z):
            m = ((1.0 - distance + z[:, None] * c["L"]) / 32 + 1.0).clamp(0.0, 1.0)
            bias = torch.matmul(q, pe.t()) + m.clamp_min(1e-30).log().to(q.dtype)[None, :, None]
            return flex_window(q, k, v, bias, E, 0, block_mask)
        if torch.device(device).type == "cuda":
            window = torch.compile(window, dynamic=False)

        def forward():
            return window(*inputs)

    def run_forward():
        with torch.no_grad():
            forward()
    y = forward()

    def run_backward():
        torch.autograd.grad(y, inputs, dy, retain_graph=True)
    return run_forward, run_backward


def serve_ops(a):
    cuda = torch.device(a.device).type == "cuda"
    print(json.dumps({"ready": torch.__version__}), flush=True)
    at, timed = None, None
    for line in sys.stdin:
        try:
            if line != at:
                at, timed = line, None
                if cuda:
                    torch.cuda.empty_cache()
                c = json.loads(line)
                made = {"gemm": op_gemm, "attention": op_attention}[c["op"]](c, a.device)
                timed = [Timed(f, cuda) if f else None for f in made]
            out = {"fwd_ms": timed[0].ms()}
            if timed[1]:
                out["bwd_ms"] = timed[1].ms()
        except Exception as e:
            traceback.print_exc()
            at = timed = None
            out = {"cannot": first_line(e)}
        print(json.dumps(out), flush=True)
    return 0


def first_line(e):
    return ((str(e).strip() or type(e).__name__).splitlines()[0]).replace('"', "'")[:160]


def main():
    p = base.options(__doc__)
    p.add_argument("--flex", action="store_true",
                   help="compiled, with FlexAttention (2.6 and newer)")
    p.add_argument("--pers", type=int, default=0,
                   help="persistent vectors per head, in place of the feed-forward")
    p.add_argument("--check-step", type=int, default=10,
                   help="the step whose loss is reported, with the first one's")
    p.add_argument("--warm-seconds", type=float, default=60)
    p.add_argument("--backend", help="of torch.compile, for tests: eager or aot_eager")
    p.add_argument("--ops", action="store_true", help="single operations")
    a = p.parse_args()
    if a.threads > 0:
        torch.set_num_threads(a.threads)
    torch.backends.cuda.matmul.allow_tf32 = a.tf32
    if torch.device(a.device).type == "cuda" and not torch.cuda.is_available():
        cannot(f"PyTorch {torch.__version__} sees no GPU")
    if a.ops:
        return serve_ops(a)
    if not a.data or not a.adapt_span:
        p.error("--data and --adapt-span are required")
    if a.flex and flex_attention is None:
        cannot(f"PyTorch {torch.__version__} has no FlexAttention (2.5 and newer)")
    # FlexAttention is slow without a compiler. On a CPU it cannot train otherwise, and that
    # tests the formulas.
    cuda = torch.device(a.device).type == "cuda"
    a.compile = a.compile or (a.flex and (cuda or a.backend is not None))
    if a.compile:
        if not hasattr(nn.Module, "compile"):
            cannot(f"PyTorch {torch.__version__} has no torch.compile (2.2 and newer)")
        from torch._dynamo import config
        for name in ("cache_size_limit", "recompile_limit"):       # one graph per window
            if hasattr(config, name):
                setattr(config, name, 64)
    before = used_bytes() if cuda else 0
    try:
        trainer = Trainer(a, base.load_bytes(a.data, a.batch_sz, a.device), before)
        trainer.step()
        print(json.dumps(trainer.answer()), flush=True)
        for line in sys.stdin:
            reply = trainer.warm() if line.startswith("warm") else trainer.round(a.steps)
            print(json.dumps(reply), flush=True)
    except Exception as e:
        traceback.print_exc()
        cannot(("torch.compile: " if a.compile and "memory" not in str(e) else "") + first_line(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
