#!/usr/bin/env python3
"""Float64 PyTorch oracle of the Sequential Transformer.

Adaptive attention span (Sukhbaatar et al. 2019, arXiv:1905.07799), all-attention
(1907.01470) and adaptive input (Baevski and Auli 2018, 1809.10853). It is written from
the specification only: attention is dense, every (query, distance) pair is an explicit
index, and all gradients come from autograd. It is not meant to be fast.

    python3 attn_span_oracle.py --check    compares with the published test numbers

Notation: B batch rows, M block length, V vocabulary, nl layers, d hidden size, H heads, D
= d/H, f inner size, L largest span, R ramp, N persistent vectors per head, t distance (t
= 1 is the previous token), c rows in a layer's cache, C rows it should have after the
step, S working span of a layer.

Two switches decide what a cache row that was never written means, and where the span mask
acts:

    eps           1e-8   literal: mask after a softmax over all S distances, then
                         renormalise with eps
                  0      fix: the mask multiplies exp() before the normalisation; an empty
                         row gives 0
    mask_missing  False  literal: zero rows are ordinary keys, logit q.E_t/sqrt(D), value 0
                  True   fix: rows that never existed take no part in the softmax

Tensor names and layouts are those of the C library (README.md). Random parameters are
drawn in the layout of the reference model where it differs (key_pe, pers_key), and
transposed.
"""
import math
import sys
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np
import torch

sys.dont_write_bytecode = True
from common import (F64, Checker, f32, global_norm, grads_of, layer_norm, leaves, randn, seeded,
                    slope)

LITERAL_EPS = 1e-8


# -------------------------------------------------- configuration

@dataclass
class Config:
    vocab: int = 13
    layers: int = 2
    dim: int = 8
    heads: int = 2
    inner: int = 12
    span: int = 16              # L
    block: int = 8              # M
    batch: int = 2              # B
    blocks: int = 3
    adapt_span: bool = False
    ramp: int = 32              # R
    pers: int = 0               # N
    adapt_io: bool = False
    tied: bool = True
    divval: int = 4
    cutoffs: list = field(default_factory=list)
    span_loss: float = 0.0      # lambda
    forward_columns: bool = False
    eps: float = LITERAL_EPS
    mask_missing: bool = False

    @property
    def head_dim(self):
        return self.dim // self.heads

    @property
    def literal(self):
        return self.eps > 0 and not self.mask_missing

    def set_mode(self, literal):
        self.eps = LITERAL_EPS if literal else 0.0
        self.mask_missing = not literal
        return self

    def ends(self):
        return [0] + list(self.cutoffs) + [self.vocab]

    def metadata(self):
        return OrderedDict([
            ("vocab", self.vocab), ("layers", self.layers), ("dim", self.dim),
            ("heads", self.heads), ("inner", self.inner), ("span", self.span),
            ("block", self.block), ("batch", self.batch), ("blocks", self.blocks),
            ("adapt_span", int(self.adapt_span)), ("ramp", self.ramp), ("pers", self.pers),
            ("adapt_io", int(self.adapt_io)), ("tied", int(self.tied)), ("divval", self.divval),
            ("cutoffs", ",".join(str(x) for x in self.cutoffs)),
            ("span_loss", repr(float(self.span_loss))), ("literal", int(self.literal)),
            ("forward_columns", int(self.forward_columns))])


# -------------------------------------------------- parameters

def reference_shapes(cfg):
    """List of (name, shape in the reference layout, kind), in the order of appendix T."""
    d, H, D, N, f = cfg.dim, cfg.heads, cfg.head_dim, cfg.pers, cfg.inner
    out = [("key_pe", (1, D, cfg.span), "pe")]
    if cfg.adapt_io:
        ends = cfg.ends()
        size = [ends[i + 1] - ends[i] for i in range(len(ends) - 1)]
        width = [d // cfg.divval ** i for i in range(len(size))]
        K = len(cfg.cutoffs)
        idx = range(len(size))
        out += [(f"in_emb.tables.{i}", (size[i], width[i]), "table") for i in idx]
        out += [(f"in_emb.projs.{i}", (d, width[i]), "linear") for i in idx]
        out += [("out_emb.cluster.weight", (K, d), "linear"),
                ("out_emb.cluster.bias", (K,), "bias:%d" % d)]
        if cfg.tied:
            out += [(f"out_emb.biases.{i}", (size[i],), "bias:%d" % width[i]) for i in idx]
        else:
            for i in idx:
                out += [(f"out_emb.tables.{i}", (size[i], width[i]), "linear"),
                        (f"out_emb.biases.{i}", (size[i],), "bias:%d" % width[i])]
            out += [(f"out_emb.projs.{i}", (d, width[i]), "linear") for i in idx]
    else:
        out += [("in_emb.weight", (cfg.vocab, d), "table"),
                ("out_emb.weight", (cfg.vocab, d), "linear"),
                ("out_emb.bias", (cfg.vocab,), "bias:%d" % d)]
    for l in range(cfg.layers):
        p = f"layers.{l}."
        if N:
            out += [(p + "attn.pers_key", (H, D, N), "pers_key"),
                    (p + "attn.pers_val", (H, N, D), "pers_val")]
        out += [(p + "attn." + w, (d, d), "linear") for w in ("wq", "wo", "wv", "wk")]
        out += [(p + "norm1.weight", (d,), "gain"), (p + "norm1.bias", (d,), "shift")]
        if not N:
            out += [(p + "ff.fc1.weight", (f, d), "linear"),
                    (p + "ff.fc1.bias", (f,), "bias:%d" % d),
                    (p + "ff.fc2.weight", (d, f), "linear"),
                    (p + "ff.fc2.bias", (d,), "bias:%d" % f), (p + "norm2.weight", (d,), "gain"),
                    (p + "norm2.bias", (d,), "shift")]
    return out


def to_library_layout(kind, t):
    if kind == "pe":
        return t[0].t().contiguous()  # (1,D,L) -> (L,D): row L-t is the embedding of distance t
    if kind == "pers_key":
        return t.transpose(1, 2).contiguous()       # (H,D,N) -> (H,N,D)
    return t


def library_order(cfg, params):
    """The same parameters with each layer's span before its other tensors."""
    out = OrderedDict()
    for name, value in params.items():
        for l in range(cfg.layers):
            key = f"layers.{l}.attn.span"
            if name.startswith(f"layers.{l}.") and key in params and key not in out:
                out[key] = params[key]
        if name not in out:
            out[name] = value
    return out


def fill_t(cfg, spans=None):
    """Appendix T: element e of tensor k is 0.3 sin(1 + 0.37 e + 1.91 k), plus 1 in
    LayerNorm gains."""
    params = OrderedDict()
    for k, (name, shape, kind) in enumerate(reference_shapes(cfg)):
        e = torch.arange(int(np.prod(shape)), dtype=F64)
        t = 0.3 * torch.sin(1.0 + 0.37 * e + 1.91 * k)
        if kind == "gain":
            t = t + 1.0
        params[name] = to_library_layout(kind, t.reshape(shape))
    if cfg.adapt_span:
        for l in range(cfg.layers):
            params[f"layers.{l}.attn.span"] = torch.tensor(spans[l], dtype=F64)
    return library_order(cfg, params)


def fill_random(cfg, gen, scale=0.5, spans=None):
    """Normal parameters of deviation `scale`; LayerNorm gains 1 + N(0, 0.2); spans
    uniform in (0, 0.9) unless given."""
    params = OrderedDict()
    for name, shape, kind in reference_shapes(cfg):
        t = randn(gen, *shape)
        t = 1.0 + 0.2 * t if kind == "gain" else scale * t
        params[name] = f32(to_library_layout(kind, t))
    if cfg.adapt_span:
        for l in range(cfg.layers):
            z = 0.9 * torch.rand(cfg.heads, generator=gen, dtype=F64) if spans is None else \
                torch.tensor(spans[l], dtype=F64)
            params[f"layers.{l}.attn.span"] = f32(z)
    return library_order(cfg, params)


def fill_init(cfg, gen, span_init=0.0):
    """The model's initialisers: their distributions, but not the reference's order of
    draws."""
    params = OrderedDict()

    def uniform(shape, a):
        return a * (2.0 * torch.rand(shape, generator=gen, dtype=F64) - 1.0)

    for name, shape, kind in reference_shapes(cfg):
        if kind in ("pe", "table"):
            t = randn(gen, *shape)
        elif kind == "linear":
            t = uniform(shape, 1.0 / math.sqrt(shape[1]))
        elif kind.startswith("bias:"):
            t = uniform(shape, 1.0 / math.sqrt(int(kind[5:])))
        elif kind == "pers_key":
            t = randn(gen, *shape) / math.sqrt(cfg.head_dim)
        elif kind == "pers_val":
            t = randn(gen, *shape) / math.sqrt(cfg.pers)
        elif kind == "gain":
            t = torch.ones(shape, dtype=F64)
        else:
            t = torch.zeros(shape, dtype=F64)
        params[name] = f32(to_library_layout(kind, t))
    if cfg.adapt_span:
        for l in range(cfg.layers):
            params[f"layers.{l}.attn.span"] = f32(torch.full((cfg.heads,), span_init, dtype=F64))
    return library_order(cfg, params)


# -------------------------------------------------- span arithmetic

def span_mask(z, t, L, R):
    """m(t) = clip((1 - t + z L)/R + 1, 0, 1): z (H), t (S) -> (H,S) (1905.07799, section
    2.2). The gradient of clamp passes at both end points."""
    return torch.clamp((1.0 - t[None, :] + z[:, None] * L) / R + 1.0, 0.0, 1.0)


def working_span(cfg, z):
    """(S, C) of a layer with span parameter z, which is None without adaptive span."""
    L = cfg.span
    if not cfg.adapt_span:
        return L, L
    largest = float(z.detach().max().to(torch.float32))
    cur = min(max(math.ceil(largest * L) + cfg.ramp, 0), L)
    trim = min(L - 1, L - cur) // 64 * 64
    S = L - trim
    return S, min(L, S + 64)


# -------------------------------------------------- model

class State:
    """Caches of a set of streams: rows[l] is (B,c,d), real[l] counts the rows that were
    written."""

    def __init__(self, rows, real):
        self.rows, self.real = rows, real

    @staticmethod
    def initial(cfg, params, batch=None):
        batch = cfg.batch if batch is None else batch
        rows = []
        for l in range(cfg.layers):
            _, C = working_span(cfg, params.get(f"layers.{l}.attn.span"))
            rows.append(torch.zeros(batch, C, cfg.dim, dtype=F64))
        return State(rows, [0] * cfg.layers)

    def select(self, a, b):
        return State([r[a:b] for r in self.rows], list(self.real))


def attention(cfg, params, l, h, cache, real):
    """Self-attention of layer l: queries h (B,M,d), cache (B,c,d) whose last `real` rows
    exist -> (B,M,d)."""
    B, M, d = h.shape
    H, D, L, N = cfg.heads, cfg.head_dim, cfg.span, cfg.pers
    p = f"layers.{l}.attn."
    z = params.get(p + "span")
    S, _ = working_span(cfg, z)
    c = cache.shape[1]
    memory = torch.cat([cache, h], 1)
    q = (h @ params[p + "wq"].t()).reshape(B, M, H, D)
    k = (memory @ params[p + "wk"].t()).reshape(B, c + M, H, D)
    v = (memory @ params[p + "wv"].t()).reshape(B, c + M, H, D)

    i = torch.arange(M)[:, None]
    t = torch.arange(1, S + 1)[None, :]
    # (M,S) memory row at distance t from query i
    row = c + i - t
    inside = (row >= 0).to(F64)[None, :, :, None, None]
    kt = k[:, row.clamp(min=0)] * inside  # (B,M,S,H,D), zero where the cache is too short
    vt = v[:, row.clamp(min=0)] * inside
    e = params["key_pe"][L - t[0]]                               # (S,D), row s is distance s + 1
    logit = (torch.einsum("bihd,bithd->bhit", q, kt)
             + torch.einsum("bihd,td->bhit", q, e)) / math.sqrt(D)

    exists = torch.ones(M, S, dtype=F64)
    if cfg.mask_missing:
        exists = (row >= c - real).to(F64)
    if N:
        pk, pv = params[p + "pers_key"], params[p + "pers_val"]
        plogit = torch.einsum("bihd,hnd->bhin", q, math.sqrt(D) * pk) / math.sqrt(D)
        logit = torch.cat([logit, plogit], -1)
        exists = torch.cat([exists, torch.ones(M, N, dtype=F64)], -1)
    mask = torch.ones(H, S + N, dtype=F64)
    if cfg.adapt_span:
        mask = torch.cat([span_mask(z, t[0].to(F64), L, cfg.ramp), torch.ones(H, N, dtype=F64)], -1)
    mask = mask[None, :, None, :]

    # softmax first, then mask and renormalise
    if cfg.eps > 0:
        prob = softmax_of_existing(logit, exists)
        if cfg.adapt_span:
            w = prob * mask
            weight = w / (w.sum(-1, keepdim=True) + cfg.eps)
        else:
            weight = prob
    else:                                                        # mask inside the sum
        visible = exists * (mask > 0)
        top = torch.where(visible > 0, logit,
                          torch.full_like(logit, -math.inf)).max(-1, keepdim=True)[0]
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top)).detach()
        # At the closed ends of the ramp a distance with m = 0 still has a gradient with
        # respect to z. Its exponential therefore stays in the graph; only rows that do
        # not exist are removed.
        expo = torch.exp(torch.where(exists > 0, logit - top, torch.full_like(logit, -math.inf)))
        w = expo * mask
        total = w.sum(-1, keepdim=True)
        weight = torch.where(total > 0, w / torch.where(total > 0, total, torch.ones_like(total)),
                             torch.zeros_like(w))
    y = torch.einsum("bhit,bithd->bihd", weight[..., :S], vt)
    if N:
        y = y + torch.einsum("bhin,hnd->bihd", weight[..., S:], math.sqrt(N) * pv)
    return y.reshape(B, M, d) @ params[p + "wo"].t()


def softmax_of_existing(logit, exists):
    """Softmax over the entries with exists = 1; a row without any gives zeros."""
    if bool((exists > 0).all()):
        return torch.softmax(logit, -1)
    some = (exists.sum(-1, keepdim=True) > 0).to(F64)
    filled = torch.where(exists + (1 - some) > 0, logit, torch.full_like(logit, -math.inf))
    return torch.softmax(filled, -1) * some


def embed(cfg, params, x):
    if not cfg.adapt_io:
        return params["in_emb.weight"][x]
    ends = cfg.ends()
    out = torch.zeros(*x.shape, cfg.dim, dtype=F64)
    for i in range(len(ends) - 1):
        here = ((x >= ends[i]) & (x < ends[i + 1])).to(F64)[..., None]
        rows = params[f"in_emb.tables.{i}"][(x - ends[i]).clamp(0, ends[i + 1] - ends[i] - 1)]
        out = out + here * (rows @ params[f"in_emb.projs.{i}"].t())
    return math.sqrt(cfg.dim) * out


def log_probs(cfg, params, h):
    """h (..,d) -> (..,V) log-probabilities in vocabulary order."""
    if not cfg.adapt_io:
        return torch.log_softmax(h @ params["out_emb.weight"].t() + params["out_emb.bias"], -1)
    side = "in_emb" if cfg.tied else "out_emb"
    ends, K = cfg.ends(), len(cfg.cutoffs)
    first = ends[1]
    x0 = h @ params[f"{side}.projs.0"]
    head = torch.cat([x0 @ params[f"{side}.tables.0"].t() + params["out_emb.biases.0"], x0
                      @ params["out_emb.cluster.weight"].t() + params["out_emb.cluster.bias"]], -1)
    head = torch.log_softmax(head, -1)
    parts = [head[..., :first]]
    for i in range(1, K + 1):
        xi = h @ params[f"{side}.projs.{i}"]
        tail = torch.log_softmax(xi @ params[f"{side}.tables.{i}"].t()
                                 + params[f"out_emb.biases.{i}"], -1)
        column = first + (i - 1 if cfg.forward_columns else K - i)
        parts.append(head[..., column:column + 1] + tail)
    return torch.cat(parts, -1)


def forward(cfg, params, x, state):
    """Tokens x (B,M) -> hidden states (B,M,d) before the output layer, and the new
    State."""
    M = x.shape[1]
    h = embed(cfg, params, x)
    rows, real = [], []
    for l in range(cfg.layers):
        old, p = state.rows[l], f"layers.{l}."
        _, C = working_span(cfg, params.get(p + "attn.span"))
        if C > M:
            keep = min(old.shape[1], C - M)
            rows.append(torch.cat([old[:, old.shape[1] - keep:], h], 1).detach())
            real.append(min(keep, state.real[l]) + M)
        else:
            rows.append(h[:, M - C:].detach())
            real.append(C)
        h = layer_norm(h + attention(cfg, params, l, h, old, state.real[l]),
                       params[p + "norm1.weight"], params[p + "norm1.bias"])
        if not cfg.pers:
            inner = torch.relu(h @ params[p + "ff.fc1.weight"].t() + params[p + "ff.fc1.bias"])
            h = layer_norm(h + inner @ params[p + "ff.fc2.weight"].t() + params[p + "ff.fc2.bias"],
                           params[p + "norm2.weight"], params[p + "norm2.bias"])
    return h, State(rows, real)


def nll_of(logp, y):
    return -logp.gather(-1, y[..., None]).mean()


def span_penalty(cfg, params):
    total = torch.zeros((), dtype=F64)
    if cfg.adapt_span:
        for l in range(cfg.layers):
            total = total + cfg.span_loss * cfg.span * params[f"layers.{l}.attn.span"].mean()
    return total


def block_gradients(cfg, params, x, y, state, batch_split=1):
    """Forward and backward pass of one block: nll, total, logp, new state, {name:
    gradient}."""
    p = leaves(params)
    B = x.shape[0]
    group = B // batch_split
    nll, total, logps, states = 0.0, 0.0, [], []
    for s in range(batch_split):
        a, b = s * group, (s + 1) * group
        h, new = forward(cfg, p, x[a:b], state.select(a, b))
        logp = log_probs(cfg, p, h)
        loss = nll_of(logp, y[a:b])
        whole = loss + span_penalty(cfg, p)
        (whole / batch_split).backward()
        nll += loss.item() / batch_split
        total += whole.item() / batch_split
        logps.append(logp.detach())
        states.append(new)
    joined = State([torch.cat([s.rows[l] for s in states], 0) for l in range(cfg.layers)],
                   states[0].real)
    return nll, total, torch.cat(logps, 0), joined, grads_of(p)


def run_blocks(cfg, params, tokens, z_schedule=None, batch_split=1):
    """All blocks in sequence with fixed parameters; gradients of the last block."""
    M = cfg.block
    if z_schedule is not None:
        params = with_spans(cfg, params, z_schedule[0])
    state = State.initial(cfg, params)
    nlls, totals, trace = [], [], []
    for b in range(cfg.blocks):
        if z_schedule is not None:
            params = with_spans(cfg, params, z_schedule[b])
        rows_in = [r.shape[1] for r in state.rows]
        x, y = tokens[:, b * M:(b + 1) * M], tokens[:, b * M + 1:(b + 1) * M + 1]
        nll, total, logp, state, grads = block_gradients(cfg, params, x, y, state, batch_split)
        nlls.append(nll)
        totals.append(total)
        trace.append((rows_in, [working_span(cfg, params.get(f"layers.{l}.attn.span"))
                                for l in range(cfg.layers)], [r.shape[1] for r in state.rows]))
    return {"nll": torch.tensor(nlls, dtype=F64), "total": torch.tensor(totals, dtype=F64),
            "logits": logp, "state": state, "grads": grads, "trace": trace}


def with_spans(cfg, params, z):
    out = OrderedDict(params)
    for l in range(cfg.layers):
        out[f"layers.{l}.attn.span"] = z[l].clone()
    return out


def tokens_t(cfg):
    n = cfg.blocks * cfg.block + 1
    return torch.tensor([[(5 * b + 3 * i + (i * i) % 7 + (i ** 3) % 5) % cfg.vocab
                          for i in range(n)] for b in range(cfg.batch)])


def random_tokens(cfg, gen):
    return torch.randint(0, cfg.vocab, (cfg.batch, cfg.blocks * cfg.block + 1), generator=gen)


# -------------------------------------------------- attention op alone

def attention_op(q, k, v, heads, pe=None, u=None, vb=None, z=None, pk=None, pv=None, delta_min=1,
                 span=None, ramp=32, max_span=None, eps=0.0, not_causal=False, first_key=0,
                 scale=None):
    """Attention alone: q (B,T,HD), k and v (B,S,HD) -> y (B,T,HD).

    Key j is delta = S - T + i - j before query i, and is in the window when delta_min <=
    delta <= span and j >= first_key. Keys with first_key <= j < 0 are zero keys with zero
    values. pe is (P,D) or (P,HD); distance delta uses row P - 1 + delta_min - delta.

        a = m e / (sum m e + eps sum e),  0 where the denominator is 0
    """
    B, T, width = q.shape
    S, H = k.shape[1], heads
    D = width // H
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    pad = max(0, -first_key) if not not_causal else 0
    zeros = torch.zeros(B, pad, width, dtype=F64)
    k4 = torch.cat([zeros, k], 1).reshape(B, pad + S, H, D)
    v4 = torch.cat([zeros, v], 1).reshape(B, pad + S, H, D)
    q4 = q.reshape(B, T, H, D)
    j = torch.arange(-pad, S)
    delta = (S - T) + torch.arange(T)[:, None] - j[None, :]
    window = (j[None, :] >= first_key) & torch.ones_like(delta, dtype=torch.bool)
    if not not_causal:
        window = window & (delta >= delta_min) & (delta <= span)
    score = torch.einsum("bihd,bjhd->bhij", q4 if u is None else q4 + u, k4)
    if pe is not None:
        P = pe.shape[0]
        prow = P - 1 + delta_min - delta
        assert bool(((prow >= 0) & (prow < P))[window].all())
        table = (pe.reshape(P, 1, D).expand(P, H, D)
                 if pe.shape[1] == D and H > 1 else pe.reshape(P, H, D))
        rows = table[prow.clamp(0, P - 1)]                                         # (T,J,H,D)
        score = score + torch.einsum("bihd,ijhd->bhij", q4 if vb is None else q4 + vb, rows)
    score = scale * score
    m = torch.ones(H, T, pad + S, dtype=F64)
    if z is not None:
        x = (z[:, None, None] * max_span + ramp - delta.to(F64)[None] + 1.0) / ramp
        m = torch.clamp(x, 0.0, 1.0)
    window = window[None].expand(H, T, pad + S)
    N = 0
    if pk is not None:
        N = pk.shape[1]
        ps = scale * torch.einsum("bihd,hnd->bhin", q4, math.sqrt(D) * pk)
        score = torch.cat([score, ps], -1)
        m = torch.cat([m, torch.ones(H, T, N, dtype=F64)], -1)
        window = torch.cat([window, torch.ones(H, T, N, dtype=torch.bool)], -1)
    hidden = torch.full_like(score, -math.inf)
    top = torch.where(window, score, hidden).max(-1, keepdim=True)[0]
    if eps == 0:
        top = torch.where(window & (m > 0), score, hidden).max(-1, keepdim=True)[0]
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top)).detach()
    e = torch.exp(torch.where(window, score - top, hidden))
    me = m * e
    total = me.sum(-1, keepdim=True) + (eps * e.sum(-1, keepdim=True) if eps > 0 else 0.0)
    a = torch.where(total > 0, me / torch.where(total > 0, total, torch.ones_like(total)),
                    torch.zeros_like(me))
    y = torch.einsum("bhij,bjhd->bihd", a[..., :pad + S], v4)
    if N:
        y = y + torch.einsum("bhin,hnd->bihd", a[..., pad + S:], math.sqrt(N) * pv)
    return y.reshape(B, T, width)


# -------------------------------------------------- optimisers

class Optimiser:
    """adagrad (clip per tensor, scales the step only), sgd (momentum), adam, adamw
    (global clip).

    step(params, grads) changes params in place. Update n uses the rate lr min(1,
    n/warmup).
    """

    def __init__(self, kind, lr, clip=0.0, warmup=0, momentum=0.0, betas=(0.9, 0.999), eps=1e-8,
                 weight_decay=0.0):
        self.kind, self.lr, self.clip, self.warmup, self.momentum = kind, lr, clip, warmup, momentum
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.n, self.state = 0, {}

    def step(self, params, grads):
        self.n += 1
        lr = self.lr * (min(1.0, self.n / self.warmup) if self.warmup > 0 else 1.0)
        coef = 1.0
        if self.kind != "adagrad" and self.clip > 0:
            norm = float(global_norm(grads))
            coef = min(1.0, self.clip / (norm + 1e-6))
        for name, theta in params.items():
            g = coef * grads[name]
            s = self.state.setdefault(name, {})
            if self.kind == "adagrad":
                norm = float(g.norm())
                eta = lr * self.clip / (norm + 1e-10) if self.clip > 0 and norm > self.clip else lr
                s["G"] = s.get("G", torch.zeros_like(g)) + g * g
                theta -= eta * g / (torch.sqrt(s["G"]) + 1e-10)
            elif self.kind == "sgd":
                s["buf"] = self.momentum * s["buf"] + g if "buf" in s else g.clone()
                theta -= lr * s["buf"]
            else:
                b1, b2 = self.betas
                if self.kind == "adamw":
                    theta *= 1.0 - lr * self.weight_decay
                s["m"] = b1 * s.get("m", torch.zeros_like(g)) + (1 - b1) * g
                s["v"] = b2 * s.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
                mhat = s["m"] / (1 - b1 ** self.n)
                vhat = s["v"] / (1 - b2 ** self.n)
                theta -= lr * mhat / (torch.sqrt(vhat) + self.eps)


def train(cfg, params, tokens, steps, optimiser):
    """Trains with carried caches; clamps z after every step. Returns parameters, the nll
    before each update, and spans."""
    params = OrderedDict((k, v.clone()) for k, v in params.items())
    state = State.initial(cfg, params)
    losses, spans, M = [], [], cfg.block
    for b in range(steps):
        x, y = tokens[:, b * M:(b + 1) * M], tokens[:, b * M + 1:(b + 1) * M + 1]
        nll, _, _, state, grads = block_gradients(cfg, params, x, y, state)
        losses.append(nll)
        optimiser.step(params, grads)
        if cfg.adapt_span:
            for l in range(cfg.layers):
                params[f"layers.{l}.attn.span"].clamp_(0.0, 1.0)
            spans.append(
                torch.stack([params[f"layers.{l}.attn.span"].clone() for l in range(cfg.layers)]))
    return params, torch.tensor(losses, dtype=F64), torch.stack(spans) if spans else None


# -------------------------------------------------- appendix T

T_SPANS = [(0.05, 0.3), (0.0, 0.61)]


def t_case(name):
    """Configuration, parameters and tokens of the cases A1 to A6 (literal mode)."""
    cfg = Config(vocab=13, span=16)
    if name in ("a1", "a3"):
        cfg = Config(vocab=13, span=256, adapt_span=True, span_loss=1e-3)
    if name in ("a3", "a4"):
        cfg.pers = 5
    if name in ("a5", "a6"):
        cfg.vocab = 60
        cfg.adapt_io = True
        cfg.divval = 2
        cfg.cutoffs = [20, 40]
        cfg.tied = name == "a5"
    return cfg, fill_t(cfg, T_SPANS), tokens_t(cfg)


T_EXPECT = {
    "a1": {"nll": "2.9577913095 2.7378000831 3.2199600914",
           "total": "3.0806713095 2.8606800831 3.3428400914", "sums": "1.47747860 -38.72361683",
           "dz": "0.132445775947 0.129421854935 0.115375797990 0.127476084167",
           "key_pe": "5.319373939e-07", "in_emb.weight": "4.613863966e-01",
           "layers.1.attn.wk": "7.909987794e-06", "layers.0.attn.wv": "7.371296363e-05",
           "layers.0.ff.fc1.weight": "6.585303953e-02"},
    "a2": {"nll": "2.9537261886 2.7373756731 3.2220751349", "sums": "2.89918317 -24.04248685",
           "key_pe": "1.205443073e-06", "in_emb.weight": "4.504893664e-01",
           "layers.1.attn.wk": "7.292926866e-06", "layers.0.attn.wv": "5.370065933e-04"},
    "a3": {"nll": "2.9821409473 2.7194417334 3.2158503404", "sums": "1.47747860 -76.81116883",
           "dz": "0.182697358449 0.130409530091 0.128179212407 0.125691162564",
           "key_pe": "8.839276334e-07", "layers.0.attn.pers_key": "7.026942068e-07",
           "layers.0.attn.pers_val": "1.443776351e-03", "layers.1.attn.wk": "5.940051932e-05"},
    "a4": {"nll": "2.9745716581 2.7173954718 3.2077381613", "sums": "2.89918317 -47.91412197",
           "key_pe": "3.205962696e-07", "layers.0.attn.pers_key": "2.583895111e-05",
           "layers.0.attn.pers_val": "9.279345048e-03", "layers.1.attn.wk": "6.490988555e-06"},
    "a5": {"nll": "5.0248681188 6.2509456746 4.2227593566", "sums": "-1.22267061 28.10758855",
           "in_emb.tables.0": "2.961967087e-01", "in_emb.tables.2": "4.486109564e-02",
           "in_emb.projs.1": "1.708510404e-02", "out_emb.cluster.weight": "1.842592862e-02",
           "out_emb.biases.2": "7.884289988e-03", "key_pe": "3.198267674e-05"},
    "a6": {"nll": "5.3510580150 6.5988286957 4.4506361356", "sums": "-1.22267061 35.40843839",
           "in_emb.tables.0": "1.539076964e-01", "out_emb.tables.2": "1.272328219e-02",
           "out_emb.projs.1": "3.869743368e-03", "in_emb.projs.1": "8.258547995e-03",
           "out_emb.cluster.weight": "3.942211354e-02"},
}

T_ADAGRAD_P = [(.3, -.4, 0.), (.003, .001, -.002), (0., 0., .1), (.02, -.01, .005), (-.2, .1, .3)]
T_ADAGRAD_Q = [.01, -.05, 0., .02, .3]
T_ADAGRAD = ["0.998950000001 -1.998950000000 0.500000000000 0.082500000175",
             "0.998600017499 -1.999037499727 0.534999998250 0.103092194283",
             "0.998600017499 -1.999037499727 0.519253147337 0.103092194283",
             "0.993943918533 -1.997288051810 0.515758211329 0.077531808313",
             "0.997052279810 -1.998648875444 0.510434511408 0.070645637042"]


def check_appendix_t(ck):
    for name, expect in T_EXPECT.items():
        cfg, params, tokens = t_case(name)
        if cfg.adapt_span:
            init = State.initial(cfg, params)
            ck.equal(f"{name} initial cache rows", [r.shape[1] for r in init.rows], [192, 256])
            ck.equal(f"{name} working spans", [working_span(cfg, params[f"layers.{l}.attn.span"])[0]
                                               for l in range(2)], [128, 192])
        r = run_blocks(cfg, params, tokens)
        for key, numbers in expect.items():
            if key in ("nll", "total"):
                ck.printed(f"{name} {key}", r[key], numbers)
            elif key == "sums":
                ck.printed(f"{name} cache sums", [c.sum() for c in r["state"].rows], numbers)
            elif key == "dz":
                ck.printed(f"{name} dz",
                           torch.cat([r["grads"][f"layers.{l}.attn.span"] for l in range(2)]),
                           numbers)
            else:
                ck.printed(f"{name} |g|^2 {key}", [(r["grads"][key] ** 2).sum()], numbers)


def check_spans(ck):
    m = span_mask(torch.tensor([0.05], dtype=F64),
                  torch.tensor([13., 14., 30., 45., 46.], dtype=F64), 256, 32)[0]
    ck.close("mask table", m, torch.tensor([1., 0.99375, 0.49375, 0.025, 0.], dtype=F64), 1e-14)
    for L, R, z, expected in [(8192, 32, 0., (64, 128)), (8192, 32, .01, (128, 192)),
                          (8192, 32, .1, (896, 960)), (8192, 32, .5, (4160, 4224)),
                          (8192, 32, 1., (8192, 8192)), (256, 32, .3, (128, 192)),
                          (256, 32, .61, (192, 256))]:
        got = working_span(Config(span=L, ramp=R, adapt_span=True),
                           torch.tensor([0., z], dtype=F64))
        ck.equal(f"span and cache of L {L}, z {z}", got, expected)
    cfg = Config(span=512, adapt_span=True, blocks=5)
    schedule = torch.tensor([[[0., z], [0., .1]] for z in (0., .3, .9, 1., 0.)], dtype=F64)
    trace = run_blocks(cfg, fill_t(cfg, T_SPANS), tokens_t(cfg), schedule)["trace"]
    ck.equal("growth: rows in", [t[0][0] for t in trace], [128, 128, 136, 144, 152])
    ck.equal("growth: S", [t[1][0][0] for t in trace], [64, 192, 512, 512, 64])
    ck.equal("growth: C", [t[1][0][1] for t in trace], [128, 256, 512, 512, 128])
    ck.equal("growth: rows out", [t[2][0] for t in trace], [128, 136, 144, 152, 128])
    cfg = Config(span=64, block=80, adapt_span=True, blocks=5)
    trace = run_blocks(cfg, fill_t(cfg, T_SPANS), tokens_t(cfg), schedule)["trace"]
    ck.equal("block longer than span: rows, S, C",
             [(t[0][0],) + t[1][0] + (t[2][0],) for t in trace], [(64, 64, 64, 64)] * 5)


def check_optimisers(ck):
    params = OrderedDict(p=torch.tensor([1., -2., .5], dtype=F64), q=torch.tensor([.1], dtype=F64))
    opt = Optimiser("adagrad", 0.07, clip=0.03, warmup=4)
    for n in range(5):
        opt.step(params, {"p": torch.tensor(T_ADAGRAD_P[n], dtype=F64),
                          "q": torch.tensor([T_ADAGRAD_Q[n]], dtype=F64)})
        ck.printed(f"adagrad update {n + 1}", torch.cat([params["p"], params["q"]]), T_ADAGRAD[n])
    gen = seeded(5)
    start = [randn(gen, 3, 4), randn(gen, 5)]
    makers = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
              "adam": lambda p: torch.optim.Adam(p, lr=0.01),
              "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01)}
    mine = {"sgd": dict(lr=0.1, momentum=0.9), "adam": dict(lr=0.01),
            "adamw": dict(lr=0.01, weight_decay=0.01)}
    for kind in makers:
        for clip in (0.0, 0.7):
            theirs = [p.clone().requires_grad_(True) for p in start]
            ours = OrderedDict(a=start[0].clone(), b=start[1].clone())
            opt_t, opt_o = makers[kind](theirs), Optimiser(kind, clip=clip, **mine[kind])
            for _ in range(6):
                g = [randn(gen, *p.shape) for p in start]
                for p, x in zip(theirs, g):
                    p.grad = x.clone()
                if clip:
                    torch.nn.utils.clip_grad_norm_(theirs, clip)
                opt_t.step()
                opt_o.step(ours, {"a": g[0], "b": g[1]})
            ck.close(f"{kind} clip {clip} against torch.optim",
                     torch.cat([p.detach().flatten() for p in theirs]),
                     torch.cat([p.flatten() for p in ours.values()]), 1e-14)


def check_consistency(ck):
    """Identities between the parts, in both modes."""
    gen = seeded(11)
    # Without missing rows and with enough capacity the block length does not matter.
    base = dict(vocab=13, span=40, heads=2, dim=8, adapt_span=True, ramp=5, pers=2, span_loss=1e-3)
    short = Config(blocks=3, block=8, **base).set_mode(False)
    whole = Config(blocks=1, block=24, **base).set_mode(False)
    params = fill_random(short, gen)
    tok = tokens_t(short)
    a, b = run_blocks(short, params, tok), run_blocks(whole, params, tok)
    ck.close("fix mode: three blocks of 8 = one of 24", a["nll"].mean()[None], b["nll"], 1e-13)
    ck.close("fix mode: last block's log-probabilities", a["logits"], b["logits"][:, 16:], 1e-12)

    for literal in (True, False):
        mode = "literal" if literal else "fix"
        cfg = Config(vocab=13, span=37, dim=15, heads=3, layers=2, batch=4, block=5,
                     adapt_span=True, ramp=7, span_loss=1e-3).set_mode(literal)
        params = fill_random(cfg, gen)
        tok = tokens_t(cfg)
        one, two = run_blocks(cfg, params, tok), run_blocks(cfg, params, tok, batch_split=2)
        worst = max(float((one["grads"][k] - two["grads"][k]).abs().max()) for k in params)
        ck.expect(worst < 1e-13, f"{mode}: batch_split 2 changes gradients by {worst:.1e}")
        # finite differences of the last block's total, caches fixed
        state = run_blocks(replace(cfg, blocks=2), params, tok)["state"]
        x, y = tok[:, 10:15], tok[:, 11:16]

        def total(ps):
            h, _ = forward(cfg, ps, x, state)
            return float(nll_of(log_probs(cfg, ps, h), y) + span_penalty(cfg, ps))
        for name in ("key_pe", "layers.0.attn.span", "layers.1.attn.wk", "layers.0.ff.fc2.weight",
                     "in_emb.weight"):
            direction = randn(gen, *params[name].shape)
            numeric = slope(total, params, name, direction, 1e-6)
            exact = float((one["grads"][name] * direction).sum())
            ck.expect(abs(numeric - exact) < 1e-8 * max(1.0, abs(exact)) + 2e-9, f"{mode}: "
                      f"finite difference along {name}: {numeric:.10f} against {exact:.10f}")

    # the attention inside the model and the op alone
    for literal in (True, False):
        for pers in (0, 3):
            cfg = Config(vocab=13, span=37, dim=12, heads=2, layers=1, block=5, adapt_span=True,
                         ramp=7, pers=pers).set_mode(literal)
            params = fill_random(cfg, gen)
            h = randn(gen, 2, 5, 12)
            cache = randn(gen, 2, 9, 12)
            cache[:, :4] = 0
            p = "layers.0.attn."
            inside = attention(cfg, params, 0, h, cache, 5)
            mem = torch.cat([cache, h], 1)
            S, _ = working_span(cfg, params[p + "span"])
            y = attention_op(h @ params[p + "wq"].t(), mem @ params[p + "wk"].t(),
                             mem @ params[p + "wv"].t(), 2, pe=params["key_pe"],
                             z=params[p + "span"], pk=params.get(p + "pers_key"),
                             pv=params.get(p + "pers_val"), delta_min=1, span=S, ramp=7,
                             max_span=37, eps=cfg.eps, first_key=-S if literal else 4)
            ck.close(f"{'literal' if literal else 'fix'}, N {pers}: model attention = op",
                     inside, y @ params[p + "wo"].t(), 1e-13)
    cfg, params, tok = t_case("a5")
    r = run_blocks(cfg, params, tok)
    ck.close("adaptive output is normalised", r["logits"].exp().sum(-1),
             torch.ones(2, 8, dtype=F64), 1e-13)


def main():
    if "--check" not in sys.argv[1:]:
        print(__doc__)
        return 2
    ck = Checker()
    check_appendix_t(ck)
    check_spans(ck)
    check_optimisers(ck)
    check_consistency(ck)
    return ck.finish()


if __name__ == "__main__":
    sys.exit(main())
