#!/usr/bin/env python3
r"""Transformer-XL and the supernet of PAR in PyTorch (1.13 or newer), a benchmark contender:
training steps, eager or compiled, float32, float64 or bfloat16 autocast, and generation.

Blocks in any order: s attention, f feed-forward, g a mixture of both and the identity.
Post-norm, sines, memory of the inputs of attention. Two forms: that of Transformer-XL (one
u and v for all blocks, one adaptive softmax whose tables are also the embedding), and with
--reference that of PAR (rows of positions counted from the far end, scores divided by the
width of a head, ReLU after the output projection, biases, u and v per block, layer norms
with 1e-3, gates clamped at 0, a softmax whose tails have projections, no loss for id 0).

Written as a careful PyTorch user would: all tensors are (time, batch, width), so that heads
are views and the memory grows along its first dimension; one matmul for keys and values of
all heads; the memory is projected separately (no gradient for its rows); the position term
is one matmul and a view without a copy, to which baddbmm adds the content term; layer_norm
and cross_entropy are fused; the columns of the clusters are in one matrix with the words
of the head; a tail sees only its tokens; the gradient of the embedding is added row by row
to that of the table, without a second table; the optimiser is fused or foreach. The blocks
and the losses of the head and of the larger tails are compiled separately, with constant
shapes except for the tokens of tails. The step with an empty memory runs eagerly, so that
nothing is compiled only for it.

    par_torch.py --pattern sfsfsf --hid-sz 128 --nheads 4 --inner-hid-sz 512 --block-sz 64 \
        --mem 64 --batch-sz 8 --vocab 205 --data FILE [--token-bytes 4] --steps 10 \
        --warmup 3 --threads 2 [--load FILE] [--dtype bf16] [--compile]

Protocol, options of data and optimiser, --train, --curve, --probe and --load are those of
sru_torch.py, which must be in the same directory. --token-bytes 4: the file of --data
contains 32-bit integers. The noise of a mixture is that of the uniform values
((37 (3 (L n + l) + k) + 11) mod 101 + 1/2) / 102 in step n, block l of L, branch k; its
temperature is 1.

    par_torch.py ... --generate N [--cached]    N tokens of one stream per line on stdin
    par_torch.py --check [--compile]            compares this model with par_oracle.py in
                                                float64

Generation: one stream after --prompt segments of the text, whose next tokens are fed one
at a time, with log p of all words for each. The first one is not timed. Without --cached a
token is a call of the model with its memory, as in the published implementation; with it
projected keys, values and positions are kept. Matrices are bfloat16 with --dtype bf16. The
reply has the keys of training; loss_step1 is the nll of the first timed token, loss_last
the mean over all.

Parameters (--load) have the names of the library's files.
"""
import contextlib
import json
import math
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from sru_torch import (Trainer, autocast, golden_oracle, load_bytes, parser, prepare,
                       relative_difference, serve, shared_options)


def sines(rows, D):
    """(rows,D): distances rows-1 .. 0"""
    dist = torch.arange(rows - 1, -1, -1, dtype=torch.float64)[:, None]
    angle = dist * 10000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    return torch.cat((torch.sin(angle), torch.cos(angle)), 1)


def sines_reference(rows, D):
    """(rows,D): rows 0, 1, ..; sine and cosine alternate, the slowest first"""
    channel = torch.arange(D // 2, dtype=torch.float64)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * 10000.0 ** (-2 * channel / D)
    return torch.stack((torch.sin(angle), torch.cos(angle)), 2).flip(1).flatten(1)


def parameter(*shape):
    return nn.Parameter(torch.empty(*shape).normal_(0, 0.02))


def uniforms(n, L):
    """(L,3): 102 times the uniform values of step n"""
    return ((37 * (torch.arange(3 * L) + 3 * L * n) + 11) % 101 + 0.5).view(L, 3)


class Block(nn.Module):
    def __init__(self, a, kind):
        super().__init__()
        D = a.hid_sz
        self.kind, self.H, self.M = kind, a.nheads, a.mem
        self.bf16, self.ref = a.dtype == "bf16", a.reference
        self.eps, self.scale = 1e-5, (D // a.nheads) ** -0.5
        if a.reference:
            self.eps, self.scale = 1e-3, a.nheads / D
        self.wq = self.bq = self.bkv = self.br = self.bo = self.w1 = self.gate = None
        self.u = self.v = None
        if kind in "sg":
            self.norm_a = nn.LayerNorm(D, self.eps)
            # wkv: rows (head, key or value, channel)
            self.wq, self.wkv, self.wr, self.wo = (parameter(n, D) for n in (D, 2 * D, D, D))
            if self.ref:
                self.bq, self.bkv, self.br, self.bo = (nn.Parameter(torch.zeros(n))
                                                       for n in (D, 2 * D, D, D))
                self.u = parameter(a.nheads, D // a.nheads)
                self.v = parameter(a.nheads, D // a.nheads)
        if kind in "fg":
            self.norm_f = nn.LayerNorm(D, self.eps)
            self.w1 = parameter(a.inner_hid_sz, D)
            self.b1 = nn.Parameter(torch.zeros(a.inner_hid_sz))
            self.w2, self.b2 = parameter(D, a.inner_hid_sz), nn.Parameter(torch.zeros(D))
        if kind == "g":
            self.gate = nn.Parameter(torch.tensor([0.33, 0.33, 0.34]))

    def heads(self, y):
        """(K,B,..) -> (B H,K,..), a view"""
        return y.view(y.shape[0], y.shape[1] * self.H, -1).transpose(0, 1)

    def positions(self, table, K):
        """(K,D) projected: the largest distance first"""
        return F.linear(table[:K] if self.ref else table[table.shape[0] - K:], self.wr, self.br)

    def attention(self, h, m, table, mask, u, v):
        T, B, D = h.shape
        q = F.linear(h, self.wq, self.bq).view(T, B, self.H, -1)
        kv = F.linear(h, self.wkv, self.bkv)
        if m is not None:
            kv = torch.cat((F.linear(m, self.wkv, self.bkv), kv))
        K = kv.shape[0]
        k, value = self.heads(kv).split(D // self.H, -1)
        qk, qp = (self.heads((q + w.to(q.dtype)).view(T, B, D)) for w in (u, v))
        # One more column than keys: read with a stride shorter by one, row t of the following
        # begins one column later for each t
        rows = F.pad(self.positions(table, K), (0, 0, 0, 1))
        rows = self.heads(rows[:, None].expand(K + 1, B, D).contiguous())
        s = torch.bmm(qp, rows.transpose(1, 2)).flatten(1)
        s = s.narrow(1, T - 1, T * K).view(B * self.H, T, K)
        s = torch.baddbmm(s, qk, k.transpose(1, 2), beta=self.scale, alpha=self.scale).add_(mask)
        p = torch.softmax(s, -1).to(value.dtype)
        return self.project(torch.bmm(p, value).transpose(0, 1).reshape(T, B, D))

    def project(self, y):
        y = F.linear(y, self.wo, self.bo)
        return F.relu(y) if self.ref else y

    def feed_forward(self, h):
        return F.linear(F.relu(F.linear(h, self.w1, self.b1)), self.w2, self.b2)

    def forward(self, h, m, table, mask, u, v, noise):
        """h (T,B,D), memory m (n,B,D) or None -> h, m. noise (3): of the gate"""
        x = h.to(torch.bfloat16) if self.bf16 else h
        if self.kind in "sg":
            if self.u is not None:
                u, v = self.u, self.v
            y = self.norm_a(h + self.attention(x, m, table, mask, u, v))
            m = (x if m is None else torch.cat((m, x)))[-self.M:].detach() if self.M else None
        if self.kind == "s":
            return y, m
        z = self.norm_f(h + self.feed_forward(x))
        if self.kind == "f":
            return z, m
        w = torch.softmax(torch.log(self.gate.clamp(min=0) + 1e-5) + noise, 0)
        return torch.addcmul(torch.addcmul(h * w[2], z, w[1]), y, w[0]), m


class Words(nn.Module):
    """Embedding and adaptive softmax. The head's matrix has the columns for the J other
    clusters after its words."""

    def __init__(self, a):
        super().__init__()
        D, V = a.hid_sz, a.vocab
        self.ref, self.scale, self.bf16 = a.reference, math.sqrt(D), a.dtype == "bf16"
        self.ends = [0] + [int(c) for c in a.cutoffs.split(",") if c] + [V]
        self.sizes = [b - a for a, b in zip(self.ends, self.ends[1:])]
        J = self.J = len(self.sizes) - 1
        rows = [self.sizes[0] + J] + self.sizes[1:]
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in rows)
        if self.ref:
            width = [D] + [max(D // 4 ** k, 1) for k in range(1, J + 1)]
            self.table = parameter(V, D)
            self.tables = nn.ParameterList(parameter(n, e) for n, e in zip(rows, width))
            self.projs = nn.ParameterList(parameter(D, e) for e in width[1:])
            self.proj_biases = nn.ParameterList(nn.Parameter(torch.zeros(e)) for e in width[1:])
            self.memory, self.inputs = self.table.detach(), [(0, self.table)]
        else:       # the tables are parts of one array, the embedding
            self.memory = torch.empty(V + J, D).normal_(0, 0.02)
            starts = [0] + [e + J for e in self.ends[1:]]
            self.tables = nn.ParameterList(nn.Parameter(self.memory[s:s + n])
                                           for s, n in zip(starts, rows))
            self.inputs = list(zip(starts, self.tables))
        cluster, row, column = (torch.empty(V, dtype=torch.long) for _ in range(3))
        for i, (start, end) in enumerate(zip(self.ends, self.ends[1:])):
            here = torch.arange(start, end)
            cluster[start:end], row[start:end] = i, here + (J if i and not self.ref else 0)
            column[start:end] = here if i == 0 else self.ends[1] + (i - 1 if self.ref else J - i)
        if self.ref:
            column[0] = -100        # padding: ignored
        self.cluster, self.row, self.column = cluster, row, column
        self.run_head, self.run_tail = self.head_loss, self.tail_loss

    def embed(self, x):
        at = self.row[x]
        h = F.embedding(at, self.memory)
        if torch.is_grad_enabled():
            h.requires_grad_().register_hook(lambda g: self.add_rows(at.flatten(), g.flatten(0, 1)))
        return h * self.scale

    @torch.no_grad()
    def add_rows(self, at, g):
        for start, table in self.inputs:
            if table.grad is None:
                table.grad = torch.zeros_like(table)
            if len(self.inputs) == 1:
                table.grad.index_add_(0, at, g)
                continue
            mine = ((at >= start) & (at < start + len(table))).nonzero().squeeze(1)
            if len(mine):
                table.grad.index_add_(0, at[mine] - start, g[mine])

    def logits(self, i, h):
        if i and self.ref:
            h = torch.addmm(self.proj_biases[i - 1], h, self.projs[i - 1])
        return F.linear(h, self.tables[i], self.biases[i]).to(self.memory.dtype)

    def head_loss(self, h, target):
        return F.cross_entropy(self.logits(0, h), target, reduction="sum")

    def tail_loss(self, i, h, target):
        return F.cross_entropy(self.logits(i, h), target, reduction="sum")

    def loss(self, h, y):
        """h (T,B,D), y (T,B) -> the mean nll"""
        h, y = h.flatten(0, 1), y.flatten()
        if self.bf16:
            h = h.to(torch.bfloat16)
        total = self.run_head(h, self.column[y])
        cluster = self.cluster[y] if self.J else None
        for i in range(1, self.J + 1):
            mine = (cluster == i).nonzero().squeeze(1)
            if not len(mine):
                continue
            # a graph for every small number of tokens is not worth it
            tail = self.run_tail if len(mine) >= 64 else self.tail_loss
            total = total + tail(i, h[mine], y[mine] - self.ends[i])
        return total / len(y)

    def log_probs(self, h):
        """(N,D) -> (N,V)"""
        head = torch.log_softmax(self.logits(0, h), -1)
        parts = [head[:, :self.sizes[0]]]
        for i in range(1, self.J + 1):
            at = int(self.column[self.ends[i]])
            parts.append(torch.log_softmax(self.logits(i, h), -1).add_(head[:, at:at + 1]))
        return torch.cat(parts, -1) if self.J else head


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a, D = a, a.hid_sz
        self.words, self.blocks = Words(a), nn.ModuleList(Block(a, kind) for kind in a.pattern)
        self.u = self.v = None
        if not a.reference:
            self.u, self.v = parameter(a.nheads, D // a.nheads), parameter(a.nheads, D // a.nheads)
        table = (sines_reference if a.reference else sines)(a.mem + max(a.block_sz, 1), D)
        kind = torch.bfloat16 if a.dtype == "bf16" else torch.get_default_dtype()
        self.register_buffer("table", table.to(kind), persistent=False)
        self.masks, self.run = {}, [block.forward for block in self.blocks]

    def initial(self):
        return [None] * len(self.blocks)

    def mask(self, T, K):
        if (T, K) not in self.masks:
            self.masks[T, K] = self.table.new_full((T, K), -math.inf).triu_(K - T + 1)
        return self.masks[T, K]

    def noise(self, n):
        """(L,3) of step n"""
        u = uniforms(n, len(self.blocks)).to(torch.get_default_dtype()) / 102
        return -torch.log(-torch.log(u))

    def hidden(self, x, memories, n=0):
        """x (T,B) -> last hidden states, memories; n: number of the step"""
        h, new, noise = self.words.embed(x), [], [None] * len(self.blocks)
        if "g" in self.a.pattern:
            noise = self.noise(n)
        rows = max([len(m) for m in memories if m is not None], default=0)
        mask = self.mask(len(x), rows + len(x))
        for i, (block, m) in enumerate(zip(self.blocks, memories)):
            f = self.run[i] if rows == self.a.mem else block.forward
            h, m = f(h, m, self.table, mask, self.u, self.v, noise[i])
            new.append(m)
        return h, new

    def forward(self, x, y, memories, n):
        h, memories = self.hidden(x, memories, n)
        return self.words.loss(h, y), memories


NAMES = {"wq": "attn.query.weight", "wkv": "attn.kv.weight", "wr": "attn.pos.weight",
         "wo": "attn.out.weight", "bq": "attn.query.bias", "bkv": "attn.kv.bias",
         "br": "attn.pos.bias", "bo": "attn.out.bias", "u": "attn.u", "v": "attn.v",
         "w1": "ff.fc1.weight", "b1": "ff.fc1.bias", "w2": "ff.fc2.weight", "b2": "ff.fc2.bias",
         "norm_a.weight": "attn.norm.weight", "norm_a.bias": "attn.norm.bias",
         "norm_f.weight": "ff.norm.weight", "norm_f.bias": "ff.norm.bias"}


class ParTrainer(Trainer):
    def create(self):
        torch.set_default_dtype(torch.float64 if self.a.dtype == "f64" else torch.float32)
        return Model(self.a)

    def compile(self):
        for name in ("cache_size_limit", "recompile_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 64)
        model, words = self.model, self.model.words
        model.run = [torch.compile(block.forward, dynamic=False) for block in model.blocks]
        words.run_head = torch.compile(words.head_loss, dynamic=False)
        words.run_tail = torch.compile(words.tail_loss, dynamic=True)

    def restart(self):
        self.position, self.memories = 0, self.model.initial()

    def forward(self, x, y):
        loss, self.memories = self.model(x, y, self.memories, self.done)
        return loss, loss

    def by_head(self, t):       # (2D,..), keys first -> rows (head, key or value, channel)
        a = self.a
        return t.view(2, a.nheads, a.hid_sz // a.nheads, -1).transpose(0, 1).reshape(t.shape)

    def of_file(self, name, tensors):
        """Parameter `name` of the model, from those of the library"""
        part, words = name.split("."), self.model.words
        if part[0] in "uv":
            return tensors["attn." + name]
        if part[0] == "blocks":
            if part[2] == "gate":
                return tensors.get(f"arch.{part[1]}")
            t = tensors[f"layers.{part[1]}.{NAMES['.'.join(part[2:])]}"]
            return self.by_head(t) if part[2] in ("wkv", "bkv") else t
        if part[1] == "table":
            return tensors["in_emb.weight"]
        i, tied = int(part[2]), not self.a.reference
        if part[1] == "biases" and not words.J and tied:
            return tensors["out_emb.bias"]
        if part[1] == "tables" and tied:
            t = tensors[f"in_emb.tables.{i}"] if words.J else tensors["in_emb.weight"]
        else:
            t = tensors[f"out_emb.{part[1]}.{i + (part[1] in ('projs', 'proj_biases'))}"]
        if i == 0 and words.J and part[1] in ("tables", "biases"):
            kind = "weight" if part[1] == "tables" else "bias"
            t = torch.cat((t, tensors[f"out_emb.cluster.{kind}"]))
        return t

    def load(self, tensors):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                t = self.of_file(name, tensors)
                if t is not None:       # gates keep their initial values
                    p.copy_(t.reshape(p.shape))


class Generator:
    """One stream: with its memory, or with keys and values"""

    def __init__(self, a, data):
        self.trainer = ParTrainer(a, data)
        self.a, self.model, T = a, self.trainer.model, a.block_sz
        text = data.flatten()[:a.prompt * T + a.generate + 2].long()
        if len(text) < a.prompt * T + a.generate + 2:
            raise SystemExit("too few tokens for this prompt")
        self.text, memories = text[a.prompt * T:], self.model.initial()
        for p in self.model.parameters():
            p.requires_grad_(False)
        if a.dtype == "bf16":
            for name, p in self.model.named_parameters():
                if p.dim() == 2 and name.split(".")[-1] not in ("table", "u", "v"):
                    p.data = p.data.to(torch.bfloat16)
        with self.quietly():
            for k in range(a.prompt):
                memories = self.model.hidden(text[k * T:(k + 1) * T, None], memories)[1]
        self.start = [m.clone() if m is not None else None for m in memories]

    @contextlib.contextmanager
    def quietly(self):
        with torch.no_grad(), autocast(torch.device("cpu"), self.a.dtype):
            yield

    def cache(self):
        """Of each attention: its keys and values, with space for the next tokens, its positions,
        its matrices and biases joined, u and v"""
        model, a, caches = self.model, self.a, []
        M, H, D = a.mem, a.nheads, a.hid_sz
        for block, m in zip(model.blocks, self.start):
            if block.kind != "s":
                caches.append(None)
                continue
            kv = F.linear(m, block.wkv, block.bkv)
            kept = kv.new_zeros(H, M + a.generate + 1, 2 * D // H)
            kept[:, :M] = block.heads(kv)
            rows = block.heads(block.positions(model.table, M + 1)[:, None])
            rows = rows.transpose(1, 2).contiguous()
            bias = None if block.bq is None else torch.cat((block.bq, block.bkv))
            u, v = (model.u, model.v) if block.u is None else (block.u, block.v)
            caches.append((kept, rows, torch.cat((block.wq, block.wkv)), bias, u, v))
        return caches

    def token(self, t, caches):
        model, D = self.model, self.a.hid_sz
        H, M = self.a.nheads, self.a.mem
        h = model.words.embed(self.text[t:t + 1, None])
        for block, cache in zip(model.blocks, caches):
            if cache is None:
                h = block.norm_f(h + block.feed_forward(h))
                continue
            kept, rows, w, b, u, v = cache
            y = F.linear(h, w, b).flatten()
            q = y[:D].view(H, 1, D // H)
            kept[:, t + M] = y[D:].view(H, -1)
            k, value = kept[:, t:t + M + 1].split(D // H, -1)
            s = torch.bmm(q + v[:, None].to(q.dtype), rows)
            s = torch.baddbmm(s, q + u[:, None].to(q.dtype), k.transpose(1, 2), beta=block.scale,
                              alpha=block.scale)
            p = torch.softmax(s, -1).to(value.dtype)
            h = block.norm_a(h + block.project(torch.bmm(p, value).view(1, 1, D)))
        return h

    def step(self):
        pass

    def synchronise(self):
        pass

    def round(self, n):
        losses, seconds = [], 0.0
        with self.quietly():
            kept = self.cache() if self.a.cached else list(self.start)
            for t in range(n + 1):
                start = time.monotonic()
                if self.a.cached:
                    h = self.token(t, kept)
                else:
                    h, kept = self.model.hidden(self.text[t:t + 1, None], kept)
                logp = self.model.words.log_probs(h.flatten(0, 1))
                if t:
                    seconds += time.monotonic() - start
                    losses.append(-float(logp[0, self.text[t + 1]]))
        return dict(self.trainer.reply(seconds), tokens_per_s=n / seconds, loss_step1=losses[0],
                    loss_first=losses[0], loss_last=sum(losses) / n)


def load_data(a):
    if a.token_bytes == 1:
        return load_bytes(a)
    data = np.fromfile(a.data, dtype="<i4")
    n = len(data) // a.batch_sz
    return torch.from_numpy(data[:n * a.batch_sz].reshape(a.batch_sz, n).copy())


def worse(a, b):
    """The larger of two errors; NaN is the largest"""
    return a if a != a or b <= a else b


VARIANTS = (("sfsf", False, ""), ("sffs", False, "5,12,30"), ("ggg", True, "5,12"),
            ("sfsf", True, "7"))         # pattern, reference, cutoffs


def oracle_config(oracle, a):
    if a.reference:
        form = dict(sines_form="ref", pos_mode="ref", scale="full", attn_relu=1, biases=1,
                    share_uv=0, norm_eps=1e-3, arch="pi", words_out="ref", pad_id=0,
                    pad_divisor="all")
    else:
        form = dict(words_in="adaptive" if a.cutoffs else "plain",
                    words_out="adaptive" if a.cutoffs else "tied",
                    tie_words=int(bool(a.cutoffs)))
    return oracle.Config(vocab=40, dim=8, heads=2, inner=12, segment=a.block_sz, mem=a.mem,
                         cutoffs=a.cutoffs, blocks=len(a.pattern),
                         pattern="" if "g" in a.pattern else a.pattern, **form).checked()


def check_training(a, oracle, cfg, p, tokens):
    """The largest difference, and the last loss"""
    worst, total, expected = 0.0, 0.0, 0.0
    T, L, off = a.block_sz, len(a.pattern), relative_difference
    trainer, model = ParTrainer(a, tokens), oracle.Model(cfg, p, 3)
    trainer.load({k: v.detach() for k, v in p.items()})
    for n, at in enumerate(range(0, 4 * T, T)):
        x, y = tokens[:, at:at + T], tokens[:, at + 1:at + T + 1]
        u = uniforms(n, L).double() / 102
        w = oracle.gates(cfg, p, "noise", u, 1.0) if "g" in a.pattern else None
        nll = oracle.losses(cfg, p, model.segment(x, w), y)[0]
        trainer.done, expected = n, expected + nll
        loss = trainer.forward(x.t().long(), y.t().long())[0]
        total = total + loss
        worst = worse(worst, off(loss.detach(), nll.detach()))
    expected.backward()
    total.backward()
    for l, kind in enumerate(a.pattern):
        if kind in "sg" and a.mem:
            memory = trainer.memories[l].transpose(0, 1)
            worst = worse(worst, off(memory, model.memory(l)[0]))
    grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in p.items()}
    for name, q in trainer.model.named_parameters():
        mine = torch.zeros_like(q) if q.grad is None else q.grad
        worst = worse(worst, off(mine, trainer.of_file(name, grads).reshape(q.shape)))
    return worst, float(loss.detach())


def check_generation(a, oracle, cfg, p, tokens):
    """The largest difference between both methods and the oracle"""
    T, worst, means = a.block_sz, 0.0, []
    a.generate, a.prompt, a.compile = T, 2, False
    for a.cached in (False, True):
        generator = Generator(a, tokens)
        generator.trainer.load({k: v.detach() for k, v in p.items()})
        with generator.quietly():       # again, with these parameters
            memories = generator.model.initial()
            for k in range(2):
                x = tokens[:, k * T:(k + 1) * T].t().long()
                memories = generator.model.hidden(x, memories)[1]
            generator.start = memories
        means.append(generator.round(T)["loss_last"])
    nlls = []
    with torch.no_grad():
        model = oracle.Model(cfg, p, 1)
        for k in range(2):
            model.segment(tokens[:, k * T:(k + 1) * T])
        for t in range(2 * T, 3 * T + 1):
            x, y = tokens[:, t:t + 1], tokens[:, t + 1:t + 2]
            nlls.append(float(oracle.losses(cfg, p, model.segment(x), y)[1]))
    padded = a.reference and bool((tokens[0, 2 * T + 2:3 * T + 2] == 0).any())
    for mean in means:
        if not padded:      # the oracle ignores the padding
            worst = worse(worst, abs(mean - sum(nlls[1:]) / T))
        worst = worse(worst, abs(mean - means[0]))
    return worst


def check(a):
    """Four segments of tiny models in float64, compared with the oracle: losses, memories, and
    the gradient of every parameter of the sum of all losses; then generation both ways.
    Fails if one differs by more than 1e-10 of the largest element of its tensor, or of 1."""
    oracle, gen = golden_oracle("par_oracle"), torch.Generator().manual_seed(3)
    vars(a).update(hid_sz=8, nheads=2, inner_hid_sz=12, batch_sz=3, vocab=40, dtype="f64",
                   load=None)
    worst, runs, compiled = 0.0, 0, a.compile
    for a.pattern, a.reference, a.cutoffs in VARIANTS:
        for T, M in ((5, 5), (6, 4), (4, 0), (3, 6)):
            a.block_sz, a.mem, a.compile = T, M, compiled and T == 5
            cfg = oracle_config(oracle, a)
            p = {k: torch.randn(shape, generator=gen, dtype=torch.float64) * 0.4
                 for k, shape in oracle.parameter_shapes(cfg).items()}
            for k in p:
                p[k] = (p[k].abs() + 0.1 if k.startswith("arch") else p[k]).requires_grad_()
            tokens = torch.randint(0, 40, (3, 4 * T + 1), generator=gen, dtype=torch.int32)
            difference, loss = check_training(a, oracle, cfg, p, tokens)
            worst, runs = worse(worst, difference), runs + 1
            if "g" not in a.pattern and 0 < M <= T:
                worst = worse(worst, check_generation(a, oracle, cfg, p, tokens[:1]))
    print(json.dumps({"runs": runs, "largest_difference": worst, "loss_last": loss}))
    return 0 if worst < 1e-10 else 1


def options():
    p = parser(__doc__)
    p.add_argument("--pattern", default="sfsfsfsf",
                   help="one letter per block: s, f, or g (with --reference)")
    p.add_argument("--hid-sz", type=int, default=256)
    p.add_argument("--nheads", type=int, default=4)
    p.add_argument("--inner-hid-sz", type=int, default=1024)
    p.add_argument("--block-sz", type=int, default=128, help="T: segment")
    p.add_argument("--batch-sz", type=int, default=8)
    p.add_argument("--mem", type=int, default=128, help="M: rows of memory")
    p.add_argument("--vocab", type=int, default=256)
    p.add_argument("--cutoffs", default="", help="ends of clusters, as 20000,40000,200000")
    p.add_argument("--reference", action="store_true", help="PAR's form")
    p.add_argument("--token-bytes", type=int, choices=(1, 4), default=1)
    shared_options(p, "adamw")
    p.add_argument("--generate", type=int, metavar="N",
                   help="generation in place of training, N tokens per round")
    p.add_argument("--cached", action="store_true")
    p.add_argument("--prompt", type=int, default=2, help="generation: segments of the prompt")
    return p


def main():
    p = options()
    a = p.parse_args()
    a.attention = "matmul"
    if prepare(a):
        return 0
    if a.check:
        return check(a)
    if not a.data:
        p.error("--data is required")
    if set(a.pattern) - set("sfg") or "g" in a.pattern and (not a.reference or a.generate):
        p.error("--pattern: letters s, f, and in training with --reference g")
    if a.generate:
        a.steps, a.batch_sz = a.generate, 1
        if not 0 < a.mem <= a.block_sz * a.prompt:
            p.error("generation requires a memory that the prompt fills")
        return serve(Generator(a, load_data(a)), a)
    return serve(ParTrainer(a, load_data(a)), a)


if __name__ == "__main__":
    sys.exit(main())
