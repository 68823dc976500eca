#!/usr/bin/env python3
r"""A training step of the SRU++ language model in PyTorch (1.13 or newer), a benchmark
contender and a reference for training curves: eager or compiled, float32, float64 or
bfloat16 autocast.

Written as a careful PyTorch user would: segment and memory are projected separately (no
gradient to the memory); keys and values are views of two matmuls; mask and scale are part
of the score matmul; one matmul computes all three sub-matrices of U with the gate biases;
the loop over time contains only what needs the previous state, with the highway
connection outside; the optimiser is foreach or fused. The transform of each layer, the
loss, and the recurrence in chunks of --chunk steps are compiled, with constant shapes.

    sru_torch.py --nlayers 4 --hid-sz 512 --n-proj 128 --nheads 1 --block-sz 256 \
        --batch-sz 8 --data FILE --steps 10 --warmup 3 --threads 2 [--load FILE] \
        [--dtype bf16] [--compile]

Protocol: the program loads parameters and data, runs --warmup steps, and writes "ready"
to stderr. For every line on stdin it runs one round of --steps training steps and writes
one line of JSON to stdout: tokens_per_s, loss_first and loss_last (nats, of the first and
last step of the round), loss_step1 (of the very first step), steps_done, seconds,
peak_bytes, compiled (graphs compiled within the round; if there are any, its time does
not count), and with --no-update, where a step is only forward and backward, grad_norm (of
the last step). It ends at the end of its input. peak_bytes is the resident peak of the
process on a CPU and the peak of the allocator on a GPU. If this PyTorch cannot do what is
requested, the exit code is 3 and stderr has a line "cannot: why". --compile needs
--warmup 2 or more, because the first segment has no memory.

    sru_torch.py ... --train N --curve FILE     N steps, one line "step loss" for each (from
                                                1; the loss before its update)
    sru_torch.py --probe [--threads 2]          GFLOP/s of a matmul, to compare environments
    sru_torch.py --check [--compile]            all variants against each other in float64

Parameters (--load; without it initialised from --seed): in_emb.weight (V,d),
out_emb.weight (V,d), out_emb.bias (V) and of every layer layers.L.w1 (P,d), w3 (3d,P)
with row i d + j for sub-matrix i of unit j, attn_norm.weight and .bias (P), v (2,d), bias
(2,d), forget gate first; with attention w2 (2P,P), keys first, and alpha (1). --n-proj 0
is SRU: w3 (3d,d), no w1, no norm, no attention.

Data are bytes (vocabulary 256) from --begin to --end: batch row b is the b-th of batch-sz
equal parts; at the end of the parts training restarts at position 0 with zero state and
no memory.

The defaults are the fastest variants: CPU ms of one training step, the minimum of 12, one
thread (AMD with AVX-512, used by MKL; malloc keeps memory), PyTorch 2.15, d 512, P 128, 4
layers with attention, 1 head, batch 8, segment 256:

    recurrence manual 200   loop 240   script 243   (attention matmul, float32)
    attention matmul 200    sdpa 219                (recurrence manual, float32)
    compiled: matmul 206, sdpa 213; bfloat16: eager 169, compiled 164; float64: 424

Matmuls are more than half of that. The hand-written recurrence (autograd.Function) runs
three operations per step forward and one backward, and is faster than autograd through
the loop, in Python or TorchScript. The compiled one, a single pass over memory, is as
fast on one thread.
"""
import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import resource
import struct
import sys
import time
import traceback
import warnings

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SDPA = hasattr(F, "scaled_dot_product_attention")


# ---- the recurrence: u (T,B,3d) including the gate biases, highway input x (T,B,d),
# v (2,d), state c (B,d), mask m (B,d) or None -> h (T,B,d), last state (B,d)

def states_loop(u0, u1, vf, c):
    """The part that needs a loop: (T,B,d) twice, (B,d) twice -> states (T,B,d)"""
    out = []
    for a, z in zip(u0.unbind(0), u1.unbind(0)):
        c = torch.lerp(a, c, torch.sigmoid(torch.addcmul(z, vf, c)))
        out.append(c)
    return torch.stack(out)


def states_script(u0, u1, vf, c):       # the same for TorchScript
    out = [c]
    a, z = u0.unbind(0), u1.unbind(0)
    for t in range(len(a)):
        c = torch.lerp(a[t], c, torch.sigmoid(torch.addcmul(z[t], vf, c)))
        out.append(c)
    return torch.stack(out[1:])


def autograd_cell(states):
    def cell(u, x, v, c, m):
        u0, u1, u2 = u.chunk(3, -1)
        # expanded here: v's gradient is summed over the batch once, not T times
        cs = states(u0, u1, v[0].expand_as(c), c)
        r = torch.sigmoid(torch.addcmul(u2, v[1], torch.cat((c[None], cs[:-1]))))
        return torch.lerp(x, cs, r if m is None else r * m), cs[-1]
    return cell


class ManualCell(torch.autograd.Function):
    """Three operations per step forward, one backward: the adjoint of the state is an affine
    recurrence, whose factors are known once the states are. The state gets a gradient only
    from the outputs, because it is carried over detached."""

    @staticmethod
    def forward(ctx, u, x, v, c, m):
        T, (u0, u1, u2) = len(x), u.chunk(3, -1)
        cs, f = x.new_empty(T + 1, *c.shape), torch.empty_like(x)
        vf = v[0].expand_as(c).contiguous()
        cs[0] = c
        c = cs[0]
        for a, z, g, n in zip(u0.unbind(0), u1.unbind(0), f.unbind(0), cs[1:].unbind(0)):
            torch.addcmul(z, vf, c, out=g)
            g.sigmoid_()
            torch.lerp(a, c, g, out=n)
            c = n
        r = torch.addcmul(u2, v[1], cs[:-1]).sigmoid_()
        h = torch.lerp(x, cs[1:], r if m is None else r * m)
        ctx.save_for_backward(u, x, v, cs, f, r, m)
        last = c.clone()
        ctx.mark_non_differentiable(last)
        return h, last

    @staticmethod
    def backward(ctx, g, _):
        u, x, v, cs, f, r, m = ctx.saved_tensors
        d, before = x.shape[-1], cs[:-1]
        du = torch.empty_like(u)
        du0, du1, du2 = du.chunk(3, -1)
        through = g if m is None else g * m
        torch.ops.aten.sigmoid_backward.grad_input((cs[1:] - x).mul_(through), r, grad_input=du2)
        a = through * r
        dx = g - a
        a[:-1].addcmul_(du2[1:], v[1])
        s = torch.ops.aten.sigmoid_backward(before - u[..., :d], f)
        factor = torch.addcmul(f, s, v[0])
        steps = a.unbind(0)
        e = steps[-1]
        for n, j in zip(reversed(steps[:-1]), reversed(factor.unbind(0))):
            e = n.addcmul_(e, j)
        torch.mul(a, s, out=du1)
        torch.addcmul(a, a, f, value=-1, out=du0)
        dv = torch.stack([torch.mul(z, before, out=s).sum((0, 1)) for z in (du1, du2)])
        return du, dx, dv, None, None


def chunk_forward(u, x, v, cs, m, h):
    """Some steps of the recurrence with the highway, which the compiler turns into one loop
    over the units of the batch. Writes states to cs[1:], outputs to h."""
    c, states, outputs = cs[0], [], []
    for t in range(len(x)):
        u0, u1, u2 = u[t].chunk(3, -1)
        r = torch.sigmoid(u2 + v[1] * c)
        c = u0 + (c - u0) * torch.sigmoid(u1 + v[0] * c)
        outputs.append(x[t] + (c - x[t]) * (r if m is None else r * m))
        states.append(c)
    cs[1:].copy_(torch.stack(states))
    h.copy_(torch.stack(outputs))


def chunk_backward(g, u, x, v, cs, m, e, dvf, dvr, du, dx):
    """e: the adjoint of the last state; dvf, dvr (B,d): sums so far. Gates are recomputed.
    Writes du, dx."""
    dus, dxs = [], []
    for t in reversed(range(len(x))):
        u0, u1, u2 = u[t].chunk(3, -1)
        before = cs[t]
        f, r = torch.sigmoid(u1 + v[0] * before), torch.sigmoid(u2 + v[1] * before)
        through = g[t] if m is None else g[t] * m
        a, zr = through * r, through * (cs[t + 1] - x[t]) * r * (1 - r)
        dxs.append(g[t] - a)
        a = a + e
        zf = a * (before - u0) * f * (1 - f)
        dus += [zr, zf, a * (1 - f)]
        e, dvf, dvr = a * f + zf * v[0] + zr * v[1], dvf + zf * before, dvr + zr * before
    T, (B, d) = len(x), e.shape
    du.view(T, B, 3, d).copy_(torch.stack(dus[::-1]).view(T, 3, B, d).transpose(1, 2))
    dx.copy_(torch.stack(dxs[::-1]))
    return e, dvf, dvr


class CompiledCell(torch.autograd.Function):
    chunk = 8
    forward_part = backward_part = None

    @staticmethod
    def forward(ctx, u, x, v, c, m):
        T, K = len(x), CompiledCell.chunk
        h, cs = torch.empty_like(x), x.new_empty(T + 1, *c.shape)
        cs[0] = c
        for t in range(0, T, K):
            CompiledCell.forward_part(u[t:t + K], x[t:t + K], v, cs[t:t + K + 1], m, h[t:t + K])
        ctx.save_for_backward(u, x, v, cs, m)
        last = cs[-1].clone()
        ctx.mark_non_differentiable(last)
        return h, last

    @staticmethod
    def backward(ctx, g, _):
        u, x, v, cs, m = ctx.saved_tensors
        K, du, dx = CompiledCell.chunk, torch.empty_like(u), torch.empty_like(x)
        sums = [torch.zeros_like(cs[0]) for _ in range(3)]
        for t in reversed(range(0, len(x), K)):
            part = slice(t, t + K)
            sums = CompiledCell.backward_part(g[part], u[part], x[part], v, cs[t:t + K + 1], m,
                                              *sums, du[part], dx[part])
        return du, dx, torch.stack((sums[1].sum(0), sums[2].sum(0))), None, None


def cell_of(a):
    if a.compile:
        return CompiledCell.apply
    if a.recurrence == "manual":
        return ManualCell.apply
    if a.recurrence == "script":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return autograd_cell(torch.jit.script(states_script))
    return autograd_cell(states_loop)


class Layer(nn.Module):
    def __init__(self, a, index, cell):
        super().__init__()
        d, P = a.hid_sz, a.n_proj
        self.heads, self.attention, self.cell = a.nheads, a.attention, cell
        self.autocast = a.dtype == "bf16"
        self.dropout, self.attn_dropout = a.dropout, a.attn_dropout
        self.mask_dropout = a.dropout if index < a.nlayers - 1 else 0.0
        self.attends = a.attn_every > 0 and P > 0 and (index + 1) % a.attn_every == 0
        self.w1 = nn.Parameter(torch.empty(P, d)) if P else None
        self.w3 = nn.Parameter(torch.empty(3 * d, P or d))
        if self.attends:
            self.w2, self.alpha = nn.Parameter(torch.empty(2 * P, P)), nn.Parameter(torch.zeros(1))
        self.attn_norm = nn.LayerNorm(P) if P else None
        self.v, self.bias = nn.Parameter(torch.empty(2, d)), nn.Parameter(torch.zeros(2, d))
        with torch.no_grad():
            for w in ([self.w1] if P else []) + ([self.w2] if self.attends else []) + [self.w3]:
                nn.init.xavier_uniform_(w)
            self.w3.mul_(math.sqrt(1 - a.dropout))
            self.v.uniform_(-1, 1)
            self.bias[1] = a.highway_bias

    def attend(self, z, T, mask):
        """(Tk,B,P), of which the last T rows are queries -> (T,B,P)"""
        P, n, (Tk, B) = z.shape[2], self.heads, z.shape[:2]
        # apart: heads stay views
        q, k, v = z[Tk - T:], F.linear(z, self.w2[:P]), F.linear(z, self.w2[P:])
        p = self.attn_dropout if self.training else 0.0
        if self.attention == "sdpa":
            q, k, v = (t.view(-1, B, n, P // n).permute(1, 2, 0, 3) for t in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), dropout_p=p)
            return o.permute(2, 0, 1, 3).reshape(T, B, P)
        q, k, v = (t.reshape(-1, B * n, P // n).transpose(0, 1) for t in (q, k, v))
        s = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=1 / math.sqrt(P // n))
        w = torch.softmax(s, -1).to(v.dtype)
        return torch.bmm(F.dropout(w, p) if p else w, v).transpose(0, 1).reshape(T, B, P)

    def transform(self, x, memory, mask):
        y = x
        if self.w1 is not None:
            z = res = F.linear(x, self.w1)
            if self.attends:
                if memory is not None:
                    # no gradient to the memory: a separate matmul
                    z = torch.cat((F.linear(memory, self.w1), z))
                o = self.attend(z, len(x), mask)
                res = torch.addcmul(self.full(res), self.alpha, self.full(o))
            y = F.dropout(self.attn_norm(self.full(res)), self.dropout, self.training)
        bias = F.pad(self.bias.flatten(), (self.bias.shape[1], 0))  # of u1 and u2
        if self.autocast:
            return self.full(F.linear(y, self.w3)) + bias
        return F.linear(y, self.w3, bias)

    def full(self, x):
        # sums, norm and recurrence in the parameters' type
        return x.float() if self.autocast else x

    def forward(self, x, memory, c, mask):
        m = None
        if self.training and self.mask_dropout > 0:     # shared over time
            m = torch.full_like(c, 1 - self.mask_dropout).bernoulli_().div_(1 - self.mask_dropout)
        return self.cell(self.transform(x, memory, mask), x, self.v, c, m)


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a, self.mask, cell = a, None, cell_of(a)
        self.in_emb = nn.Embedding(a.vocab, a.hid_sz)
        self.layers = nn.ModuleList(Layer(a, l, cell) for l in range(a.nlayers))
        self.out_emb = nn.Linear(a.hid_sz, a.vocab)
        bound = math.sqrt(3 / a.hid_sz)
        nn.init.uniform_(self.in_emb.weight, -bound, bound)
        nn.init.uniform_(self.out_emb.weight, -bound, bound)
        nn.init.zeros_(self.out_emb.bias)

    def initial(self):
        """Initial state and memory"""
        a, n = self.a, len(self.layers)
        states = [self.in_emb.weight.new_zeros(a.batch_sz, a.hid_sz) for _ in range(n)]
        return states, [None] * n

    def training_mask(self, T, Tm, like):
        """Added to the scores: a query sees all of the memory and the segment up to itself."""
        if self.mask is None or self.mask.shape != (T, Tm + T):
            self.mask = like.new_full((T, Tm + T), -math.inf).triu_(Tm + 1)
        return self.mask

    def loss(self, h, y):
        h = F.dropout(h, self.a.dropout, self.training)
        logits = self.out_emb(h).to(self.in_emb.weight.dtype)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def forward(self, x, y, states, memories):
        """x, y (T,B)"""
        h = F.dropout(self.in_emb(x), self.a.dropout, self.training)
        Tm = max([len(m) for m in memories if m is not None], default=0)
        mask, new_states, new_memories = self.training_mask(len(x), Tm, h), [], []
        for layer, c, memory in zip(self.layers, states, memories):
            new_memories.append(h.detach() if layer.attends else None)
            h, c = layer(h, memory, c, mask)
            new_states.append(c.detach())
        return self.loss(h, y), new_states, new_memories


class RAdam:
    """Rectified Adam with decoupled decay; the first five updates are only momentum."""

    def __init__(self, params, decay, betas=(0.9, 0.999), eps=1e-8):
        self.params, self.decay, self.betas, self.eps, self.t = list(params), decay, betas, eps, 0
        self.m, self.s = ([torch.zeros_like(p) for p in self.params] for _ in range(2))

    @torch.no_grad()
    def step(self, lr):
        self.t += 1
        (b1, b2), t, grads = self.betas, self.t, [p.grad for p in self.params]
        torch._foreach_mul_(self.m, b1)
        torch._foreach_add_(self.m, grads, alpha=1 - b1)
        torch._foreach_mul_(self.s, b2)
        torch._foreach_addcmul_(self.s, grads, grads, value=1 - b2)
        if self.decay:
            torch._foreach_mul_(self.params, 1 - lr * self.decay)
        limit = 2 / (1 - b2) - 1
        rho = limit - 2 * t * b2 ** t / (1 - b2 ** t)
        if rho < 5:
            torch._foreach_add_(self.params, self.m, alpha=-lr / (1 - b1 ** t))
            return
        square = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
        rate = math.sqrt((1 - b2 ** t) * square) / (1 - b1 ** t)
        root = torch._foreach_sqrt(self.s)
        torch._foreach_add_(root, self.eps)
        torch._foreach_addcdiv_(self.params, self.m, root, value=-lr * rate)


class AdamW:
    """PyTorch's, fused if available"""

    def __init__(self, params, decay):
        params = list(params)
        for kind in ({"fused": True}, {"foreach": True}):
            try:
                self.inner = torch.optim.AdamW(params, lr=0.0, betas=(0.9, 0.999), eps=1e-8,
                                               weight_decay=decay, **kind)
                break
            except (RuntimeError, TypeError):
                pass

    def step(self, lr):
        self.inner.param_groups[0]["lr"] = lr
        self.inner.step()


def learning_rate(a, n):
    """Of update n, counted from 0: linear rise, then the cosine scaled to pass through the
    end of the rise."""
    if a.schedule == "constant":
        return a.lr
    if n < a.lr_warmup:
        return a.lr * (n + 1) / a.lr_warmup
    end_of_rise = max(a.lr_warmup - 1, 0)
    return (a.lr * (1 + math.cos(math.pi * n / a.max_iter))
            / (1 + math.cos(math.pi * end_of_rise / a.max_iter)))


class Trainer:
    """One model in training. Other peers override how a model is created, started and called."""

    def __init__(self, a, data):
        self.a, self.data, self.device = a, data, torch.device(a.device)
        if data.shape[1] <= a.block_sz:
            raise SystemExit("too few bytes for this batch and block")
        torch.manual_seed(a.seed)
        self.model = self.create()
        self.model.to(self.device, torch.float64 if a.dtype == "f64" else torch.float32)
        if a.load:
            self.load(load_safetensors(a.load)[0])
        if a.compile:
            self.compile()
        self.restart()
        self.params = list(self.model.parameters())
        self.optimiser = (RAdam if a.optim == "radam" else AdamW)(self.params, a.weight_decay)
        self.first_loss, self.done = None, 0

    def create(self):
        return Model(self.a)

    def compile(self):          # constant shapes: without a memory, and with one
        CompiledCell.chunk = self.a.chunk
        CompiledCell.forward_part = torch.compile(chunk_forward, dynamic=False)
        CompiledCell.backward_part = torch.compile(chunk_backward, dynamic=False)
        for layer in self.model.layers:
            layer.transform = torch.compile(layer.transform, dynamic=False)
        self.model.loss = torch.compile(self.model.loss, dynamic=False)

    def restart(self):
        """At the first byte, with an empty state and memory"""
        self.position, (self.states, self.memories) = 0, self.model.initial()

    def forward(self, x, y):
        """The reported loss, and the minimised one"""
        loss, self.states, self.memories = self.model(x, y, self.states, self.memories)
        return loss, loss

    def load(self, tensors):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(tensors[name].reshape(p.shape))

    def grad_norm(self):
        return float(torch.stack([p.grad.norm() for p in self.params]).norm())

    def clip(self):
        factor = self.a.clip / (self.grad_norm() + 1e-6)
        if factor < 1:
            torch._foreach_mul_([p.grad for p in self.params], factor)

    def step(self):
        a, T, p = self.a, self.a.block_sz, self.position
        x, y = (self.data[:, p + i:p + i + T].t().long() for i in (0, 1))
        for q in self.params:
            q.grad = None
        with autocast(self.device, a.dtype):
            loss, total = self.forward(x, y)
        total.backward()
        for q in self.params:
            # what this step did not use: zeros, as for any optimiser that has one state
            # for all
            if q.grad is None:
                q.grad = torch.zeros_like(q)
        if not a.no_update:
            if a.clip > 0:
                self.clip()
            self.optimiser.step(learning_rate(a, self.done))
        self.position += T
        if self.position >= self.data.shape[1] - T:
            self.restart()
        self.done += 1
        loss = loss.detach()
        if self.first_loss is None:
            self.first_loss = loss
        return loss

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
        reply = dict(self.reply(seconds), loss_first=float(losses[0]), loss_last=float(losses[-1]),
                     loss_step1=float(self.first_loss), compiled=self.graphs() - graphs,
                     tokens_per_s=steps * self.a.batch_sz * self.a.block_sz / seconds)
        return dict(reply, grad_norm=self.grad_norm()) if self.a.no_update else reply

    def reply(self, seconds):
        peak = (torch.cuda.max_memory_allocated() if self.device.type == "cuda"
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return {"steps_done": self.done, "seconds": seconds, "peak_bytes": int(peak)}


def autocast(device, dtype):
    if dtype == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def parser(doc):
    return argparse.ArgumentParser(description=doc,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


def golden_oracle(name):
    """The module tests/golden/NAME.py"""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/golden")
    sys.path.insert(0, path)
    return importlib.import_module(name)


def relative_difference(mine, theirs):
    """Of two tensors, relative to the largest element of the second, or to 1"""
    if not theirs.numel():
        return 0.0
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1))


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
        values = np.frombuffer(raw[8 + n + a:8 + n + b], kinds[h["dtype"]])
        out[name] = torch.from_numpy(values.reshape(h["shape"]).copy())
    return out, metadata


def load_bytes(a):
    with open(a.data, "rb") as f:
        data = np.frombuffer(f.read(), dtype=np.uint8)[a.begin:a.end]
    n = len(data) // a.batch_sz
    return torch.from_numpy(data[:n * a.batch_sz].reshape(a.batch_sz, n).copy()).to(a.device)


def cannot(why):
    print(f"cannot: {why}", file=sys.stderr, flush=True)
    raise SystemExit(3)


def probe():
    """GFLOP/s of one matmul, the best of 30, which a busy machine affects little"""
    x, w, best = torch.rand(2048, 256) - 0.5, torch.rand(1024, 256) - 0.5, math.inf
    for _ in range(30):
        start = time.monotonic()
        F.linear(x, w)
        best = min(best, time.monotonic() - start)
    print(round(2 * 2048 * 1024 * 256 / best * 1e-9))


def check(a):
    """Three tiny steps in float64 by every variant, with and without dropout. Fails if a
    loss or a parameter differs by more than 1e-10."""
    vars(a).update(nlayers=3, hid_sz=12, n_proj=8, nheads=2, block_sz=6, batch_sz=3, vocab=256,
                   dtype="f64", optim="adamw", lr=1e-2, clip=0.5, load=None, chunk=4, device="cpu")
    data = torch.from_numpy((np.arange(3 * 60) * 7919 % 251 % 97).astype(np.uint8).reshape(3, 60))
    compiled, worst, n = [True] if a.compile else [], 0.0, 0
    layers = ((1, 8), (2, 8), (0, 8), (0, 0))
    for dropout, (a.attn_every, a.n_proj) in itertools.product((0.0, 0.2), layers):
        reference, a.dropout, a.attn_dropout = None, dropout, dropout
        attentions = ("matmul", "sdpa") if SDPA and not dropout else ("matmul",)
        for a.recurrence, a.attention, a.compile in itertools.product(
                ("loop", "script", "manual"), attentions, [False] + compiled):
            if a.compile and (a.recurrence != "manual" or dropout):     # compiled draws other masks
                continue
            trainer = Trainer(a, data)
            with torch.no_grad():
                for layer in trainer.model.layers:
                    if layer.attends:
                        layer.alpha.fill_(0.7)
            losses = [trainer.step() for _ in range(3)]
            got = torch.cat([torch.stack(losses)] + [p.detach().flatten() for p in trainer.params])
            if reference is None:
                reference = got
            worst, n = max(worst, float((got - reference).abs().max())), n + 1
    print(json.dumps({"runs": n, "largest_difference": worst, "loss_last": float(losses[-1])}))
    return 0 if worst < 1e-10 else 1


def serve(trainer, a):
    """The curve of --train, or a round for every line on stdin (the protocol above)"""
    try:
        if a.train is not None:
            with open(a.curve, "w") if a.curve else contextlib.nullcontext(sys.stdout) as f:
                for n in range(a.train):
                    print(f"{n + 1} {float(trainer.step()):.7f}", file=f, flush=True)
            return 0
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


def prepare(a):
    """Threads, --probe, and what this PyTorch cannot do. True: the program is done."""
    if a.threads > 0:
        torch.set_num_threads(a.threads)
    if a.probe:
        probe()
    elif a.compile and not hasattr(nn.Module, "compile"):
        cannot(f"PyTorch {torch.__version__} has no torch.compile (2.2 and newer)")
    elif a.attention == "sdpa" and not SDPA:
        cannot(f"PyTorch {torch.__version__} has no scaled_dot_product_attention (2.0 and newer)")
    return a.probe


def shared_options(p, *optimisers):
    """Options of data, optimiser and process, shared by the peers that train on bytes"""
    p.add_argument("--data", help="file of bytes")
    p.add_argument("--begin", type=int, default=0, help="first byte of the file that is used")
    p.add_argument("--end", type=int, help="end of the bytes that are used")
    p.add_argument("--load", help="safetensors file of initial parameters")
    p.add_argument("--steps", type=int, default=10, help="training steps per round")
    p.add_argument("--warmup", type=int, default=0, help="training steps before the first round")
    p.add_argument("--train", type=int, metavar="N", help="train N steps, write --curve, and end")
    p.add_argument("--curve", metavar="FILE", help='a line "step loss" for every step, in nats')
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--dtype", choices=("f32", "f64", "bf16"), default="f32",
                   help="bf16: autocast, float32 parameters")
    p.add_argument("--optim", choices=optimisers, default=optimisers[-1])
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--no-update", action="store_true",
                   help="only forward and backward: no clipping, no optimiser")
    p.add_argument("--weight-decay", type=float, default=0.1, help="decoupled, on all parameters")
    p.add_argument("--clip", type=float, default=1.0,
                   help="maximum norm of the whole gradient; 0: none")
    p.add_argument("--schedule", choices=("constant", "cosine"), default="constant")
    p.add_argument("--lr-warmup", type=int, default=0,
                   help="updates over which the learning rate of the cosine rises")
    p.add_argument("--max-iter", type=int, default=400000, help="where the cosine ends")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile, needs PyTorch 2.2 and a C++ compiler")
    p.add_argument("--probe", action="store_true", help="print the GFLOP/s of a matmul, and end")
    p.add_argument("--check", action="store_true",
                   help="compare all variants (with --compile also compiled), and end")


def options():
    p = parser(__doc__)
    p.add_argument("--nlayers", type=int, default=4)
    p.add_argument("--hid-sz", type=int, default=512, help="d: width of embedding and layers")
    p.add_argument("--n-proj", type=int, default=128,
                   help="P: width of projection and attention; 0: SRU, without either")
    p.add_argument("--nheads", type=int, default=1)
    p.add_argument("--attn-every", type=int, default=1,
                   help="layers k, 2k, .. have attention; 0: none")
    p.add_argument("--block-sz", type=int, default=256, help="T: segment, and length of the memory")
    p.add_argument("--batch-sz", type=int, default=8)
    p.add_argument("--highway-bias", type=float, default=-2.0)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--attn-dropout", type=float, default=0.0)
    p.add_argument("--vocab", type=int, default=256)
    shared_options(p, "adamw", "radam")
    p.add_argument("--attention", choices=("matmul", "sdpa"), default="matmul")
    p.add_argument("--recurrence", choices=("loop", "script", "manual"), default="manual",
                   help="without --compile")
    p.add_argument("--chunk", type=int, default=8,
                   help="steps of the recurrence per compiled chunk")
    return p


def main():
    p = options()
    a = p.parse_args()
    if prepare(a):
        return 0
    if a.check:
        return check(a)
    if not a.data:
        p.error("--data is required")
    return serve(Trainer(a, load_bytes(a)), a)


if __name__ == "__main__":
    sys.exit(main())
