#!/usr/bin/env python3
"""Float64 PyTorch oracle of Transformer-XL (Dai et al. 2019, arXiv:1901.02860) and of
PAR.

It covers the PAR supernet (Mandava et al. 2020, arXiv:2009.04534): model, memory, gates,
word embeddings, optimiser, cutoffs. It is written from the specification only. Every
batch row runs by itself as one stream: the memory of a block is a list of rows with a
validity flag each, and a reset starts a new, empty stream. Attention is a loop over
queries that gathers the keys that the query may see, positions are looked up by distance,
and all gradients come from autograd. It is not meant to be fast.

    python3 par_oracle.py --check    compares with the published numbers of par_numbers.txt

Notation: B batch rows, T tokens of a call, M memory length, n rows it holds, K = n + T
keys, D width, H heads, dh head width, F inner width of the feed-forward part, L blocks, V
vocabulary, J tail clusters.

Functions compute in the dtype of the parameters. The golden vectors are float64; the same
code in float32 shows the size of rounding errors.
"""
import itertools
import math
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.nn.functional as F

sys.dont_write_bytecode = True
from common import (F64, HERE, Checker, gradients, integers, layer_norm, leaves, load_safetensors,
                    parameters_in, prefixed, randn, seeded)

GAPS = []       # gaps between the best and the second of all hard choices so far


# -------------------------------------------------- options and parameters

ADDED = ("final_norm", "rel_bias", "one_projection")    # options that a file may lack: the default


@dataclass(frozen=True)
class Config:
    vocab: int = 20
    dim: int = 8
    heads: int = 2
    head_dim: int = 0               # 0: dim / heads
    inner: int = 0                  # 0: 4 dim
    blocks: int = 2
    pattern: str = ""               # letters s f i: a fixed network; "": all blocks are mixtures
    segment: int = 4
    mem: int = 3
    positions: str = "sines"        # sines learned
    rel_bias: int = 0               # with learned: a free bias per distance and head in place of v
    sines_form: str = "block"       # block ref
    pos_mode: str = "dist"          # dist fixed ref
    clamp_len: int = 0
    same_length: int = 0
    scale: str = "sqrt"             # sqrt full
    attn_relu: int = 0
    biases: int = 0
    share_uv: int = 1
    norm: str = "post"              # post pre
    final_norm: int = 1             # with pre: a norm after the last block
    norm_eps: float = 1e-5
    arch: str = "logits"            # logits pi
    gate: str = "soft"              # soft st
    gate_eval: str = "argmax"       # argmax soft noise
    noise: str = "step"             # step sequence tokens
    noise_tokens: int = 0
    words_in: str = "plain"         # plain adaptive
    words_out: str = "plain"        # plain tied adaptive ref
    emb: int = 0                    # width of the adaptive words, 0: dim
    one_projection: int = 0         # with div_val 1: all clusters of the input share one projection
    emb_scale: float = 0.0          # 0: sqrt(dim)
    cutoffs: str = ""
    div_val: int = 1
    proj_factor: int = 4
    proj_dims: str = ""
    tie_words: int = 0
    tie_projs: str = "none"         # none all but_first
    pad_id: int = -1
    pad_divisor: str = "valid"      # valid all
    latency: str = "none"           # none add hinge fbnet
    latency_w: str = "p"            # p w
    latency_lam: float = 0.0
    latency_target: float = 0.0
    latency_alpha: float = 0.0
    latency_beta: float = 0.0

    def checked(self):
        assert set(self.pattern) <= set("sfi")
        assert self.positions == "learned" or self.dim % 2 == 0
        ref_sines = self.positions == "sines" and self.sines_form == "ref"
        assert self.pos_mode == "dist" or (ref_sines and not self.clamp_len)
        assert not self.same_length or self.mem >= 2
        assert self.words_out != "tied" or self.words_in == "plain"
        if self.tie_words or self.tie_projs != "none":
            assert self.words_in == "adaptive" and self.words_out == "adaptive"
        assert all(self.widths()) and self.latency in ("none", "add", "hinge", "fbnet")
        assert self.final_norm or self.norm == "pre"
        assert not self.rel_bias or self.positions == "learned"
        if self.one_projection:
            assert self.words_in == "adaptive" and self.div_val == 1 and self.E != self.dim
        return self

    @property
    def kinds(self):
        """One letter per block: s attention, f feed-forward, i identity, g gated mixture
        of the three."""
        return self.pattern or "g" * self.blocks

    @property
    def dh(self):
        return self.head_dim or self.dim // self.heads

    @property
    def E(self):
        return self.emb or self.dim

    def ends(self):
        """Cluster i holds the words ends[i] <= id < ends[i + 1]."""
        return [0] + integers(self.cutoffs) + [self.vocab]

    def sizes(self):
        e = self.ends()
        return [b - a for a, b in zip(e, e[1:])]

    def widths(self):
        """Embedding width of every cluster of the adaptive words (1809.10853, section
        3)."""
        return [self.E // self.div_val ** i for i in range(len(self.sizes()))]

    def has_projections(self):
        return self.div_val > 1 or self.E != self.dim

    def tail_widths(self):
        """Projection width of every tail of the reference's adaptive softmax
        (1609.04309)."""
        J = len(self.sizes()) - 1
        return integers(self.proj_dims) or [max(self.dim // self.proj_factor ** k, 1)
                                            for k in range(1, J + 1)]

    def input_projection(self, i):
        return f"in_emb.projs.{0 if self.one_projection else i}"

    def output_projection(self, i):
        """The name of cluster i's output projection, which is an input projection if
        tied."""
        return self.input_projection(i) if self.shares_projection(i) else f"out_emb.projs.{i}"

    def shares_projection(self, i):
        return self.tie_projs == "all" or (self.tie_projs == "but_first" and i > 0)

    def has_final_norm(self):
        return self.norm == "pre" and self.final_norm == 1

    def rows(self):
        """Rows of a learned table of distances; row d is distance d."""
        return self.mem + self.segment

    def metadata(self):
        meta = OrderedDict((f.name, getattr(self, f.name)) for f in fields(self))
        meta["blocks"] = len(self.kinds)
        meta["emb_scale"] = repr(self.emb_scale or math.sqrt(self.dim))
        for f in fields(self):      # options that older files lack are written only if set
            if f.name in ADDED and getattr(self, f.name) == f.default:
                del meta[f.name]
        return meta


def config_from(meta):
    values = {}
    for f in fields(Config):
        if f.name in meta:
            values[f.name] = f.type(meta[f.name])
    return Config(**values).checked()


def parameter_shapes(cfg):
    D, HD, Fi, V = cfg.dim, cfg.heads * cfg.dh, cfg.inner or 4 * cfg.dim, cfg.vocab
    sizes, widths, s = cfg.sizes(), cfg.widths(), OrderedDict()
    if cfg.words_in == "plain":
        s["in_emb.weight"] = (V, D)
    else:
        for i, (n, e) in enumerate(zip(sizes, widths)):
            s[f"in_emb.tables.{i}"] = (n, e)
            if cfg.has_projections() and (i == 0 or not cfg.one_projection):
                s[f"in_emb.projs.{i}"] = (D, e)
    biases = ("u",) if cfg.rel_bias else ("u", "v")
    if cfg.share_uv and set(cfg.kinds) & set("sg"):
        for name in biases:
            s["attn." + name] = (cfg.heads, cfg.dh)
    for i, kind in enumerate(cfg.kinds):
        if kind in "sg":
            a = f"layers.{i}.attn."
            shapes = [("query", (HD, D)), ("kv", (2 * HD, D)), ("out", (D, HD))]
            if cfg.positions == "learned":
                s[a + "rel.weight"] = (cfg.rows(), HD)
                if cfg.rel_bias:
                    s[a + "r_bias"] = (cfg.rows(), cfg.heads)
            else:
                shapes.insert(2, ("pos", (HD, D)))
            for name, shape in shapes:
                s[a + name + ".weight"] = shape
                if cfg.biases:
                    s[a + name + ".bias"] = shape[:1]
            if not cfg.share_uv:
                for name in biases:
                    s[a + name] = (cfg.heads, cfg.dh)
            s[a + "norm.weight"] = s[a + "norm.bias"] = (D,)
        if kind in "fg":
            f = f"layers.{i}.ff."
            s[f + "fc1.weight"], s[f + "fc1.bias"] = (Fi, D), (Fi,)
            s[f + "fc2.weight"], s[f + "fc2.bias"] = (D, Fi), (D,)
            s[f + "norm.weight"] = s[f + "norm.bias"] = (D,)
    if cfg.has_final_norm():
        s["final_norm.weight"] = s["final_norm.bias"] = (D,)
    J = len(sizes) - 1
    if cfg.words_out == "plain":
        s["out_emb.weight"] = (V, D)
    if cfg.words_out in ("plain", "tied"):
        s["out_emb.bias"] = (V,)
    if cfg.words_out == "adaptive":
        for i, (n, e) in enumerate(zip(sizes, widths)):
            if not cfg.tie_words:
                s[f"out_emb.tables.{i}"] = (n, e)
            if cfg.has_projections() and not cfg.shares_projection(i):
                s[f"out_emb.projs.{i}"] = (D, e)
            s[f"out_emb.biases.{i}"] = (n,)
        s["out_emb.cluster.weight"], s["out_emb.cluster.bias"] = (J, widths[0]), (J,)
    if cfg.words_out == "ref":
        s["out_emb.tables.0"], s["out_emb.biases.0"] = (sizes[0], D), (sizes[0],)
        s["out_emb.cluster.weight"], s["out_emb.cluster.bias"] = (J, D), (J,)
        for k, h in enumerate(cfg.tail_widths(), 1):
            s[f"out_emb.projs.{k}"], s[f"out_emb.proj_biases.{k}"] = (D, h), (h,)
            s[f"out_emb.tables.{k}"], s[f"out_emb.biases.{k}"] = (sizes[k], h), (sizes[k],)
    for i, kind in enumerate(cfg.kinds):
        if kind == "g":
            s[f"arch.{i}"] = (3,)
    return s


# -------------------------------------------------- positions

def block_sines(p, D):
    """Sinusoids of position p: all sines, then all cosines (1901.02860)."""
    angles = [p * 10000.0 ** (-2 * k / D) for k in range(D // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=F64)


def ref_sines(p, D):
    """Row p of the reference's table, with the features in reversed order. p may be
    negative."""
    row = torch.zeros(D, dtype=F64)
    for c in range(D):
        f = D - 1 - c
        angle = p * 1e-4 ** (2 * (f // 2) / D)
        row[c] = math.cos(angle) if f % 2 == 0 else math.sin(angle)
    return row


# -------------------------------------------------- gates

def first_largest(values):
    """Index of the first largest value; records the gap to the second in GAPS."""
    values = [float(v) for v in values]
    best = 0
    for k in range(1, len(values)):
        if values[k] > values[best]:
            best = k
    GAPS.append(values[best] - max(v for k, v in enumerate(values) if k != best))
    return best


def one_hot(y):
    w = torch.zeros_like(y)
    w[first_largest(y.detach())] = 1
    return w


def probabilities(cfg, a):
    """Noise-free probabilities of one block at temperature 1."""
    if cfg.arch == "pi":
        q = torch.clamp(a, min=0) + 1e-5        # its gradient passes at exactly 0
        return q / q.sum()
    return torch.softmax(a, 0)


def noisy_gate(cfg, a, uniform, tau):
    """Gumbel-softmax of one block (1611.01144, equation 1); straight-through if gate is
    st."""
    score = torch.log(torch.clamp(a, min=0) + 1e-5) if cfg.arch == "pi" else torch.log_softmax(a, 0)
    y = torch.softmax((score - torch.log(-torch.log(uniform))) / tau, 0)
    return (one_hot(y) - y).detach() + y if cfg.gate == "st" else y


def gates(cfg, p, mode, uniforms=None, tau=None):
    """Weights of the three branches: (L,3), (B,L,3) or (B,R,L,3) as the uniforms; (L,3)
    without noise."""
    arch = [p[f"arch.{l}"] for l in range(len(cfg.kinds))]
    if mode == "argmax":
        return torch.stack([one_hot(probabilities(cfg, a)) for a in arch]).detach()
    if mode == "soft":
        return torch.stack([probabilities(cfg, a) for a in arch])
    flat = uniforms.reshape(-1, len(arch), 3)
    w = torch.stack([torch.stack([noisy_gate(cfg, a, u[l], tau) for l, a in enumerate(arch)])
                     for u in flat])
    return w.reshape(uniforms.shape)


def latency(cfg, p, w, table):
    """Expected latency: gate weights times the table of costs (attention, feed-forward,
    identity = 0), summed over the blocks."""
    if cfg.latency_w == "p":
        w = torch.stack([probabilities(cfg, p[f"arch.{l}"]) for l in range(len(cfg.kinds))])
    return (w.reshape(-1, len(cfg.kinds), 3).mean(0) * table).sum()


def with_latency(cfg, ce, lat):
    """The loss with its latency term: added, hinge (2208.14580) or FBNet's product
    (1812.03443)."""
    if cfg.latency == "add":
        return ce + cfg.latency_lam * lat
    if cfg.latency == "hinge":
        return ce + cfg.latency_lam * torch.clamp(lat / cfg.latency_target - 1, min=0)
    if cfg.latency == "fbnet":
        return ce * cfg.latency_alpha * torch.log(lat) ** cfg.latency_beta
    return ce


# -------------------------------------------------- words

def embed(cfg, p, tokens):
    if cfg.words_in == "plain":
        x = p["in_emb.weight"][tokens.long()]
    else:
        ends, rows = cfg.ends(), []
        for t in tokens.tolist():
            i = max(i for i in range(len(ends) - 1) if ends[i] <= t)
            e = p[f"in_emb.tables.{i}"][t - ends[i]]
            rows.append(p[cfg.input_projection(i)] @ e if cfg.has_projections() else e)
        x = torch.stack(rows)
    return x * (cfg.emb_scale or math.sqrt(cfg.dim))


def log_probabilities(cfg, p, h):
    """h (n,D) -> (n,V) log-probabilities, in order of the ids."""
    if cfg.words_out in ("plain", "tied"):
        table = p["out_emb.weight" if cfg.words_out == "plain" else "in_emb.weight"]
        return torch.log_softmax(h @ table.T + p["out_emb.bias"], -1)
    sizes = cfg.sizes()
    J, c0, scores = len(sizes) - 1, sizes[0], []
    for i in range(J + 1):
        if cfg.words_out == "ref":
            y, table = h, p[f"out_emb.tables.{i}"]
            if i:
                y = h @ p[f"out_emb.projs.{i}"] + p[f"out_emb.proj_biases.{i}"]
        else:
            table = p[f"{'in' if cfg.tie_words else 'out'}_emb.tables.{i}"]
            y = h
            if cfg.has_projections():
                y = h @ p[cfg.output_projection(i)]
        logits = y @ table.T + p[f"out_emb.biases.{i}"]
        if i == 0:
            logits = torch.cat([logits,
                                y @ p["out_emb.cluster.weight"].T + p["out_emb.cluster.bias"]], -1)
        scores.append(torch.log_softmax(logits, -1))
    parts = [scores[0][:, :c0]]
    for i in range(1, J + 1):
        column = c0 + i - 1 if cfg.words_out == "ref" else c0 + J - i
        parts.append(scores[0][:, column:column + 1] + scores[i])
    return torch.cat(parts, -1)


# -------------------------------------------------- the network

class Stream:
    """Memory of one batch row: per block a list of (row, valid), oldest first."""

    def __init__(self, blocks):
        self.rows = [[] for _ in range(blocks)]


class Model:
    """A batch of streams. mem, clamp_len and same_length replace the configuration's; the
    learned table and Kt keep its sizes."""

    def __init__(self, cfg, p, B, mem=None, clamp_len=None, same_length=None):
        self.cfg, self.p, self.kinds = cfg, p, cfg.kinds
        self.mem = cfg.mem if mem is None else mem
        self.clamp_len = cfg.clamp_len if clamp_len is None else clamp_len
        self.same_length = cfg.same_length if same_length is None else same_length
        self.streams = [Stream(len(self.kinds)) for _ in range(B)]
        self.held = 0               # rows in memory of a stream that was never reset
        self.dtype = next(iter(p.values())).dtype

    def norm(self, x, name):
        p = self.p
        return layer_norm(x, p[name + ".weight"], p[name + ".bias"], self.cfg.norm_eps)

    def linear(self, x, name):
        y = x @ self.p[name + ".weight"].T
        return y + self.p[name + ".bias"] if name + ".bias" in self.p else y

    def clamped(self, d):
        return min(d, self.clamp_len) if self.clamp_len > 0 else d

    def learned_rows(self, K):
        """Row of a learned table for d = 0..K-1. Distances beyond the table use its last
        row."""
        return [min(self.clamped(d), self.cfg.rows() - 1) for d in range(K)]

    def relative(self, l, K):
        """r_d of the distances d = 0..K-1: (K,H,dh)."""
        c, rows = self.cfg, []
        if c.positions == "learned":
            table = self.p[f"layers.{l}.attn.rel.weight"]
            return table[self.learned_rows(K)].view(K, c.heads, c.dh)
        for d in range(K):
            d = self.clamped(d)
            row = {"dist": d, "fixed": c.mem + c.segment - 1 - d, "ref": K - 1 - d}[c.pos_mode]
            rows.append((block_sines
                         if c.sines_form == "block" else ref_sines)(row, c.dim).to(self.dtype))
        return self.linear(torch.stack(rows), f"layers.{l}.attn.pos").view(K, c.heads, c.dh)

    def position_score(self, l, q, r, distance):
        """Terms (b) and (d) of 1901.02860, section 3.3, for one query q (H,dh):
        (keys,H)."""
        c, a = self.cfg, f"layers.{l}.attn."
        if c.rel_bias:
            rows = self.learned_rows(len(r))
            return (q * r[distance]).sum(-1) + self.p[a + "r_bias"][[rows[d] for d in distance]]
        return ((q + self.p["attn.v" if c.share_uv else a + "v"]) * r[distance]).sum(-1)

    def attention(self, l, x, memory, valid, mask):
        """Attention of x (T,D) over memory (n,D) and x, of one batch row; both normalised
        already if pre-norm."""
        c, a = self.cfg, f"layers.{l}.attn."
        T, n, HD = len(x), len(memory), c.heads * c.dh
        keys = torch.cat([memory, x])
        q = self.linear(x, a + "query").view(T, c.heads, c.dh)
        kv = self.linear(keys, a + "kv")
        k, v = kv[:, :HD].view(n + T, c.heads, c.dh), kv[:, HD:].view(n + T, c.heads, c.dh)
        u = self.p["attn.u" if c.share_uv else a + "u"]
        r = self.relative(l, n + T)
        scale = 1 / math.sqrt(c.dh) if c.scale == "sqrt" else 1 / c.dh
        out = []
        for i in range(T):
            if not mask[i]:
                out.append(torch.zeros(HD, dtype=x.dtype))
                continue
            seen = [j for j in range(n + i + 1)
                    if valid[j] and not (self.same_length and n + i - j >= self.mem)]
            distance = [n + i - j for j in seen]
            score = ((q[i] + u) * k[seen]).sum(-1)      # (keys, H)
            score = score + self.position_score(l, q[i], r, distance)
            weight = torch.softmax(score * scale, 0)
            out.append((weight.unsqueeze(-1) * v[seen]).sum(0).reshape(HD))
        y = self.linear(torch.stack(out), a + "out")
        return torch.relu(y) if c.attn_relu else y

    def feed_forward(self, l, x):
        return self.linear(torch.relu(self.linear(x, f"layers.{l}.ff.fc1")), f"layers.{l}.ff.fc2")

    def attention_part(self, l, x, stream, mask):
        rows = stream.rows[l]
        memory = torch.stack([row for row, _ in rows]) if rows else x[:0].detach()
        valid = [ok for _, ok in rows] + [bool(m) for m in mask]
        name = f"layers.{l}.attn.norm"
        if self.cfg.norm == "pre":
            return x + self.attention(l, self.norm(x, name), self.norm(memory, name), valid, mask)
        return self.norm(x + self.attention(l, x, memory, valid, mask), name)

    def feed_forward_part(self, l, x):
        name = f"layers.{l}.ff.norm"
        if self.cfg.norm == "pre":
            return x + self.feed_forward(l, self.norm(x, name))
        return self.norm(x + self.feed_forward(l, x), name)

    def row_gates(self, w, b, T):
        """Gate weights of every token of row b: (T,L,3)."""
        if w is None:
            return None
        if w.dim() == 2:
            return w.unsqueeze(0).expand(T, -1, -1)
        if w.dim() == 3:
            return w[b].unsqueeze(0).expand(T, -1, -1)
        return torch.stack([w[b, t // self.cfg.noise_tokens] for t in range(T)])

    def segment(self, tokens, w=None, mask=None, reset=None):
        """One call: tokens (B,T) -> hidden states (B,T,D) before the output embedding."""
        B, T = tokens.shape
        hidden = []
        for b in range(B):
            if reset is not None and int(reset[b]):
                self.streams[b] = Stream(len(self.kinds))
            stream, real = self.streams[b], [1] * T if mask is None else mask[b].tolist()
            x, gate = embed(self.cfg, self.p, tokens[b]), self.row_gates(w, b, T)
            for l, kind in enumerate(self.kinds):
                y = x
                if kind == "s":
                    y = self.attention_part(l, x, stream, real)
                elif kind == "f":
                    y = self.feed_forward_part(l, x)
                elif kind == "g":
                    g = gate[:, l].unsqueeze(-1)
                    y = g[:, 0] * self.attention_part(
                        l, x, stream, real) + g[:, 1] * self.feed_forward_part(l, x) + g[:, 2] * x
                if kind in "sg" and self.mem:
                    rows = stream.rows[l] + list(zip(x.detach(), [bool(m) for m in real]))
                    stream.rows[l] = rows[-self.mem:]
                x = y
            hidden.append(self.norm(x, "final_norm") if self.cfg.has_final_norm() else x)
        self.held = min(self.mem, self.held + T)
        return torch.stack(hidden)

    def memory(self, l):
        """(B,held,D) and flags (B,held), 1 = missing. A shorter stream is aligned to the
        newest end; missing rows are zero."""
        B = len(self.streams)
        rows = torch.zeros(B, self.held, self.cfg.dim, dtype=self.dtype)
        missing = torch.ones(B, self.held, dtype=torch.int32)
        for b, stream in enumerate(self.streams):
            at = self.held - len(stream.rows[l])
            for j, (row, ok) in enumerate(stream.rows[l]):
                if ok:
                    rows[b, at + j], missing[b, at + j] = row, 0
        return rows, missing


def losses(cfg, p, hidden, targets):
    """Loss of the batch, nll (B,T) with 0 for ignored targets, log-probabilities
    (B,T,V)."""
    B, T = targets.shape
    logp = log_probabilities(cfg, p, hidden.reshape(B * T, -1)).reshape(B, T, -1)
    counts = (targets >= 0) & ((targets != cfg.pad_id) | torch.tensor(cfg.pad_id < 0))
    nll = -torch.gather(logp, -1, targets.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    nll = torch.where(counts, nll, torch.zeros_like(nll))
    divisor = int(counts.sum()) if cfg.pad_divisor == "valid" else B * T
    return nll.sum() / max(divisor, 1), nll, logp


# -------------------------------------------------- files

def step_gates(cfg, p, inputs, s, mode="noise"):
    if cfg.pattern:
        return None
    return gates(cfg, p, mode, inputs.get(f"uniforms.{s}"), inputs["tau"][s]
                 if "tau" in inputs else None)


def training_step(cfg, p, model, inputs, s):
    """Loss of step s and its parts."""
    w = step_gates(cfg, p, inputs, s)
    hidden = model.segment(inputs[f"tokens.{s}"], w, inputs.get(f"mask.{s}"),
                           inputs.get(f"reset.{s}"))
    ce, nll, logp = losses(cfg, p, hidden, inputs[f"targets.{s}"])
    lat = latency(cfg, p, w, inputs["latency"]) if cfg.latency != "none" else None
    loss = with_latency(cfg, ce, lat)
    return loss, ce, lat, nll, logp, hidden, w


def run_model(inputs, meta):
    """Results of a golden file, as described in README_par.md."""
    cfg = config_from(meta)
    p, B, steps = leaves(parameters_in(inputs)), int(meta["B"]), int(meta["steps"])
    wanted = integers(str(meta["grad_steps"]))
    model, r = Model(cfg, p, B), OrderedDict()
    for s in range(steps):
        loss, ce, lat, nll, logp, hidden, w = training_step(cfg, p, model, inputs, s)
        r[f"loss.{s}"] = loss.detach().reshape(1)
        if lat is not None:
            r[f"ce.{s}"], r[f"lat.{s}"] = ce.detach().reshape(1), lat.detach().reshape(1)
        r[f"nll.{s}"], r[f"hidden.{s}"] = nll.detach(), hidden.detach()
        if w is not None:
            r[f"w.{s}"] = w.detach()
        for l, kind in enumerate(cfg.kinds):
            if kind in "sg" and model.held:
                rows, missing = model.memory(l)
                r[f"mem.{l}.{s}"] = rows
                if bool(missing.any()):
                    r[f"mem_pad.{l}.{s}"] = missing
        if s == steps - 1:
            r[f"logp.{s}"] = logp.detach()
        if s in wanted:
            for n, g in gradients(loss, p).items():
                r[f"grad.{n}.{s}"] = g
    if not cfg.pattern:
        r["p"] = torch.stack([probabilities(cfg, p[f"arch.{l}"])
                              for l in range(len(cfg.kinds))]).detach()
    with torch.no_grad():
        for mode in str(meta["evals"]).split(",") if meta["evals"] else []:
            r.update(evaluate(cfg, p, inputs, meta, mode))
        if int(meta["generate"]):
            count = int(meta["generate"])
            r["greedy"], r["greedy.logp"] = generate(cfg, p, inputs["tokens.0"], count)
    return r


def evaluate(cfg, p, inputs, meta, mode):
    """All steps again from an empty memory, without gradients; with the text eval.* if
    the file has one."""
    def changed(name):
        return int(meta["eval_" + name]) if "eval_" + name in meta else None
    model = Model(cfg, p, int(meta["B"]), changed("mem"), changed("clamp_len"),
                  changed("same_length"))
    r = OrderedDict()
    s = 0
    e = {k[5:]: v for k, v in inputs.items() if k.startswith("eval.")} or inputs
    while f"tokens.{s}" in e:
        w = None if mode == "fixed" else step_gates(cfg, p, inputs, s, mode)
        hidden = model.segment(e[f"tokens.{s}"], w, e.get(f"mask.{s}"), e.get(f"reset.{s}"))
        loss, nll, _ = losses(cfg, p, hidden, e[f"targets.{s}"])
        r[f"eval.{mode}.loss.{s}"], r[f"eval.{mode}.nll.{s}"] = loss.reshape(1), nll
        s += 1
    return r


def generate(cfg, p, prompt, count):
    """Greedy continuation: the prompt is one call on an empty memory, then each word is a
    call of one token."""
    model = Model(cfg, p, len(prompt))
    w = None if cfg.pattern else gates(cfg, p, cfg.gate_eval)
    words, best, feed = [], [], prompt
    for _ in range(count):
        logp = log_probabilities(cfg, p, model.segment(feed, w)[:, -1])
        word = torch.tensor([first_largest(row) for row in logp], dtype=torch.int32)
        best.append(torch.gather(logp, 1, word.long().unsqueeze(1))[:, 0])
        words.append(word)
        feed = word.unsqueeze(1)
    return torch.stack(words, 1), torch.stack(best, 1)


# -------------------------------------------------- training

PI = 3.1415927          # the reference's constant


def learning_rate(n, max_lr, warmup, decay):
    ramp = max_lr * n / warmup if warmup else max_lr
    return min(ramp, 0.5 * max_lr * (1 + math.cos(PI * max(n - warmup, 0) / decay)))


def temperature(n, total, start, end, form):
    return start * (end if form == "factor" else end / start) ** (n / total)


class Adam:
    """Adam whose epsilon is added to the uncorrected root (Kingma and Ba 2014, 1412.6980,
    section 2)."""

    def __init__(self, p, beta1, beta2, eps):
        self.p, self.b1, self.b2, self.eps, self.t = p, beta1, beta2, eps, 0
        self.m = {n: torch.zeros_like(w) for n, w in p.items()}
        self.v = {n: torch.zeros_like(w) for n, w in p.items()}

    def moments(self, grads):
        self.t += 1
        for n in self.p:
            self.m[n] = self.b1 * self.m[n] + (1 - self.b1) * grads[n]
            self.v[n] = self.b2 * self.v[n] + (1 - self.b2) * grads[n] ** 2

    @torch.no_grad()
    def update(self, grads, lr):
        self.moments(grads)
        size = lr * math.sqrt(1 - self.b2 ** self.t) / (1 - self.b1 ** self.t)
        for n, w in self.p.items():
            w -= size * self.m[n] / (torch.sqrt(self.v[n]) + self.eps)


class AdamW(Adam):
    """AdamW (1711.05101): decoupled decay, epsilon is added to the corrected root."""

    def __init__(self, p, beta1, beta2, eps, decay):
        super().__init__(p, beta1, beta2, eps)
        self.decay = decay

    @torch.no_grad()
    def update(self, grads, lr):
        self.moments(grads)
        for n, w in self.p.items():
            root = torch.sqrt(self.v[n] / (1 - self.b2 ** self.t))
            w -= lr * (self.decay * w + self.m[n] / (1 - self.b1 ** self.t) / (root + self.eps))


def run_updates(inputs, meta):
    """One update per step, with memory carried over."""
    cfg = config_from(meta)
    p = leaves(parameters_in(inputs))
    betas = [float(meta[k]) for k in ("beta1", "beta2", "eps")]
    separate = meta["arch_optimizer"] == "adamw"
    weights = OrderedDict((n, w) for n, w in p.items() if not (separate and n.startswith("arch.")))
    optimisers = [(Adam(weights, *betas), inputs["lr"])]
    if separate:
        arch = OrderedDict((n, w) for n, w in p.items() if n.startswith("arch."))
        settings = [float(meta["arch_" + k]) for k in ("beta1", "beta2", "eps", "decay")]
        optimisers.append((AdamW(arch, *settings), inputs["arch_lr"]))
    model, r = Model(cfg, p, int(meta["B"])), OrderedDict()
    loss_list = []
    for s in range(int(meta["steps"])):
        loss = training_step(cfg, p, model, inputs, s)[0]
        loss_list.append(loss.detach())
        grads = gradients(loss, p)
        for optimiser, rate in optimisers:
            optimiser.update(grads, float(rate[s]))
    r["loss"] = torch.stack(loss_list)
    r.update(prefixed("final.", {n: w.detach() for n, w in p.items()}))
    return r


def run_both(inputs, meta):
    """Results with fixed parameters, then those of one update per step."""
    results = run_model(inputs, meta)
    results.update(run_updates(inputs, meta))
    return results


def directional_errors(inputs, meta, gen, step=1e-5):
    """Error of every gradient of a file against a fourth-order difference along a random
    direction."""
    cfg, errors = config_from(meta), OrderedDict()
    p = leaves(parameters_in(inputs))
    model = Model(cfg, p, int(meta["B"]))
    for s in range(int(meta["steps"])):
        before = [[list(rows) for rows in stream.rows] for stream in model.streams], model.held
        loss = training_step(cfg, p, model, inputs, s)[0]
        if s not in integers(str(meta["grad_steps"])):
            continue

        def again():
            other = Model(cfg, p, int(meta["B"]))
            other.held = before[1]
            for stream, rows in zip(other.streams, before[0]):
                stream.rows = [list(r) for r in rows]
            with torch.no_grad():
                return float(training_step(cfg, p, other, inputs, s)[0])

        for name, g in gradients(loss, p).items():
            w, direction = p[name], randn(gen, *g.shape)
            kept, values = w.detach().clone(), []
            for k in (1, -1, 2, -2):
                w.data = kept + k * step * direction
                values.append(again())
            w.data = kept
            slope = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)
            errors[f"{name}.{s}"] = abs(slope - float((g * direction).sum()))
    return errors


# -------------------------------------------------- cuts and patterns

def head_cost(counts):
    """Costs of the first cluster (0, j] and of a later one (i, j], as in the reference:
    words times mass."""
    prefix = [0] + list(itertools.accumulate(counts))
    return head_costs_of(prefix)


def head_costs_of(prefix):
    """The two costs from the prefix sums of the counts, a list or an array."""
    return (lambda j: j * prefix[j]), (lambda k, i, j: (j - i) * (prefix[j] - prefix[i]))


def true_cost(counts, clusters, D, r):
    """Multiply-accumulates per token, times the total count: every token pays for the
    head."""
    prefix = [0] + list(itertools.accumulate(counts))
    J, total = clusters - 1, prefix[-1]

    def first(j):
        return D * (j + J) * total

    def later(k, i, j):
        return max(D // r ** k, 1) * (prefix[j] - prefix[i]) * (D + j - i)
    return first, later


def optimal_cuts(N, clusters, first, later):
    """Exclusive cutoffs of least cost, in integers; of equal ones those with the largest
    last cut, then the largest before it."""
    best, back = [None] + [first(j) for j in range(1, N + 1)], []
    for k in range(1, clusters):
        now, choice = [None] * (N + 1), [None] * (N + 1)
        for j in range(k + 1, N + 1):
            for i in range(k, j):
                cost = best[i] + later(k, i, j)
                if now[j] is None or cost <= now[j]:
                    now[j], choice[j] = cost, i
        best = now
        back.append(choice)
    cuts, j = [], N
    for choice in reversed(back):
        j = choice[j]
        cuts.insert(0, j)
    return cuts, best[N]


def fast_cuts(counts, clusters, costs):
    """optimal_cuts for large N: the best i never decreases with j, so every middle row
    halves the range of its neighbours.

    costs: (prefix, clusters) -> first(array of j), later(k, array of i, j).
    """
    N = len(counts)
    prefix = np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))])
    first, later = costs(prefix, clusters)
    best, back = first(np.arange(N + 1, dtype=np.int64)), []
    for k in range(1, clusters):
        now, choice = np.zeros(N + 1, dtype=np.int64), np.zeros(N + 1, dtype=np.int64)
        work = [(k + 1, N, k, N - 1)]
        while work:
            lo, hi, a, b = work.pop()
            if lo > hi:
                continue
            j = (lo + hi) // 2
            i = np.arange(a, min(b, j - 1) + 1, dtype=np.int64)
            cost = best[i] + later(k, i, j)
            at = len(cost) - 1 - int(np.argmin(cost[::-1]))
            now[j], choice[j] = cost[at], i[at]
            work += [(lo, j - 1, a, int(i[at])), (j + 1, hi, int(i[at]), b)]
        best = now
        back.append(choice)
    cuts, j = [], N
    for choice in reversed(back):
        j = int(choice[j])
        cuts.insert(0, j)
    return cuts, int(best[N])


def fast_head_cost(prefix, clusters):
    return head_costs_of(prefix)


def fast_true_cost(D, r):
    def costs(prefix, clusters):
        return ((lambda j: D * (j + clusters - 1) * prefix[-1]),
                (lambda k, i, j: max(D // r ** k, 1) * (prefix[j] - prefix[i]) * (D + j - i)))
    return costs


def par_pattern(L, p):
    """PAR's rule: attention in the first two thirds, one attention block in p
    (2009.04534, section 4)."""
    n = L // p
    cut = 2 * L // 3
    width = (cut + cut // n) // n
    return (("s" + "f" * (width - 1)) * n)[:L].ljust(L, "f")


# -------------------------------------------------- the published case

REF = dict(sines_form="ref", pos_mode="ref", scale="full", attn_relu=1, biases=1, share_uv=0,
           norm="post", norm_eps=1e-3, arch="pi", gate_eval="noise", words_out="ref", pad_id=0,
           pad_divisor="all")


def published_fill(kind, shape, t):
    k = torch.arange(1, int(np.prod(shape)) + 1, dtype=F64)
    s = torch.sin(0.7 * k + 1.3 * t).reshape(shape)
    return {"gain": 1 + 0.1 * s, "embed": 0.05 * s}.get(kind, 0.3 * s)


def published_parameters(cfg):
    """The reference's parameters, in its order and layout."""
    D, H, dh, Fi, V = cfg.dim, cfg.heads, cfg.dh, cfg.inner, cfg.vocab
    layout = [("embed", (V, D), "embed")]
    for l in range(cfg.blocks):
        layout += [(f"{l}.{n}", s, k) for n, s, k in (
            ("W_emb.k", (D, 3 * D), ""), ("W_emb.b", (3 * D,), ""),
            ("W_pos.k", (D, D), ""), ("W_pos.b", (D,), ""),
            ("u", (H, dh), ""), ("v", (H, dh), ""),
            ("dense.k", (D, D), ""), ("dense.b", (D,), ""),
            ("ln_mha.g", (D,), "gain"), ("ln_mha.b", (D,), ""),
            ("ffn1.k", (D, Fi), ""), ("ffn1.b", (Fi,), ""),
            ("ffn2.k", (Fi, D), ""), ("ffn2.b", (D,), ""),
            ("ln_ffn.g", (D,), "gain"), ("ln_ffn.b", (D,), ""), ("pi", (3,), "pi"))]
    if cfg.words_out == "ref":
        sizes = cfg.sizes()
        layout += [("head.k", (D, sizes[0] + len(sizes) - 1), ""),
                   ("head.b", (sizes[0] + len(sizes) - 1,), "")]
        for k, h in enumerate(cfg.tail_widths()):
            layout += [(f"tail{k}.p.k", (D, h), ""), (f"tail{k}.p.b", (h,), ""),
                       (f"tail{k}.o.k", (h, sizes[k + 1]), ""),
                       (f"tail{k}.o.b", (sizes[k + 1],), "")]
    else:
        layout += [("out.k", (D, V), ""), ("out.b", (V,), "")]
    o = OrderedDict()
    for t, (name, shape, kind) in enumerate(layout):
        o[name] = published_fill(kind, shape, t)
        if kind == "pi":
            o[name] = torch.tensor([0.33, 0.33, 0.34], dtype=F64) + o[name] / 0.3 * 0.05
    return o


def from_published(cfg, o):
    """The reference's parameters under our names and in our layout."""
    p = {"in_emb.weight": o["embed"]}
    for l in range(cfg.blocks):
        q, v, k = o[f"{l}.W_emb.k"].chunk(3, 1)
        qb, vb, kb = o[f"{l}.W_emb.b"].chunk(3)
        a, f = f"layers.{l}.attn.", f"layers.{l}.ff."
        p.update({a + "query.weight": q.T, a + "query.bias": qb,
                  a + "kv.weight": torch.cat([k, v], 1).T, a + "kv.bias": torch.cat([kb, vb]),
                  a + "pos.weight": o[f"{l}.W_pos.k"].T, a + "pos.bias": o[f"{l}.W_pos.b"],
                  a + "out.weight": o[f"{l}.dense.k"].T, a + "out.bias": o[f"{l}.dense.b"],
                  a + "u": o[f"{l}.u"], a + "v": o[f"{l}.v"], a + "norm.weight": o[f"{l}.ln_mha.g"],
                  a + "norm.bias": o[f"{l}.ln_mha.b"], f + "fc1.weight": o[f"{l}.ffn1.k"].T,
                  f + "fc1.bias": o[f"{l}.ffn1.b"], f + "fc2.weight": o[f"{l}.ffn2.k"].T,
                  f + "fc2.bias": o[f"{l}.ffn2.b"], f + "norm.weight": o[f"{l}.ln_ffn.g"],
                  f + "norm.bias": o[f"{l}.ln_ffn.b"], f"arch.{l}": o[f"{l}.pi"]})
    if cfg.words_out == "ref":
        c0 = cfg.sizes()[0]
        p.update({"out_emb.tables.0": o["head.k"][:, :c0].T, "out_emb.biases.0": o["head.b"][:c0],
                  "out_emb.cluster.weight": o["head.k"][:, c0:].T,
                  "out_emb.cluster.bias": o["head.b"][c0:]})
        for k in range(len(cfg.tail_widths())):
            p.update({f"out_emb.projs.{k + 1}": o[f"tail{k}.p.k"],
                      f"out_emb.proj_biases.{k + 1}": o[f"tail{k}.p.b"],
                      f"out_emb.tables.{k + 1}": o[f"tail{k}.o.k"].T,
                      f"out_emb.biases.{k + 1}": o[f"tail{k}.o.b"]})
    else:
        p.update({"out_emb.weight": o["out.k"].T, "out_emb.bias": o["out.b"]})
    return OrderedDict((n, p[n].contiguous()) for n in parameter_shapes(cfg))


def to_published(cfg, p):
    """The inverse of from_published, for parameters and gradients."""
    o = {"embed": p["in_emb.weight"]}
    for l in range(cfg.blocks):
        a, f = f"layers.{l}.attn.", f"layers.{l}.ff."
        k, v = p[a + "kv.weight"].T.chunk(2, 1)
        kb, vb = p[a + "kv.bias"].chunk(2)
        o.update({f"{l}.W_emb.k": torch.cat([p[a + "query.weight"].T, v, k], 1),
                  f"{l}.W_emb.b": torch.cat([p[a + "query.bias"], vb, kb]),
                  f"{l}.W_pos.k": p[a + "pos.weight"].T, f"{l}.W_pos.b": p[a + "pos.bias"],
                  f"{l}.u": p[a + "u"], f"{l}.v": p[a + "v"], f"{l}.dense.k": p[a + "out.weight"].T,
                  f"{l}.dense.b": p[a + "out.bias"], f"{l}.ln_mha.g": p[a + "norm.weight"],
                  f"{l}.ln_mha.b": p[a + "norm.bias"], f"{l}.ffn1.k": p[f + "fc1.weight"].T,
                  f"{l}.ffn1.b": p[f + "fc1.bias"], f"{l}.ffn2.k": p[f + "fc2.weight"].T,
                  f"{l}.ffn2.b": p[f + "fc2.bias"], f"{l}.ln_ffn.g": p[f + "norm.weight"],
                  f"{l}.ln_ffn.b": p[f + "norm.bias"], f"{l}.pi": p[f"arch.{l}"]})
    if cfg.words_out == "ref":
        o["head.k"] = torch.cat([p["out_emb.tables.0"], p["out_emb.cluster.weight"]]).T
        o["head.b"] = torch.cat([p["out_emb.biases.0"], p["out_emb.cluster.bias"]])
        for k in range(len(cfg.tail_widths())):
            o[f"tail{k}.p.k"] = p[f"out_emb.projs.{k + 1}"]
            o[f"tail{k}.p.b"] = p[f"out_emb.proj_biases.{k + 1}"]
            o[f"tail{k}.o.k"] = p[f"out_emb.tables.{k + 1}"].T
            o[f"tail{k}.o.b"] = p[f"out_emb.biases.{k + 1}"]
    return o


def published_case(mode, steps=4):
    """Inputs and metadata of a golden file. mode: soft, st (straight-through), plain
    (softmax), train (ten updates)."""
    options = dict(REF, vocab=20, dim=8, heads=2, inner=12, blocks=3, segment=4, mem=3,
                   cutoffs="5,12", proj_factor=2)
    if mode == "st":
        options["gate"] = "st"
    if mode == "plain":
        options.update(words_out="plain", cutoffs="", pad_id=-1)
    cfg = Config(**options).checked()
    steps = 10 if mode == "train" else steps
    inputs = OrderedDict(("param." + n, w)
                         for n, w in from_published(cfg, published_parameters(cfg)).items())
    for s in range(steps):
        ids = torch.tensor([[(7 * b * b + 3 * s + 5 * j * j + 2 * j + 11 * b * j) % 19 + 1
                             for j in range(5)] for b in range(2)], dtype=torch.int32)
        inputs[f"tokens.{s}"] = ids[:, :4].contiguous()
        inputs[f"targets.{s}"] = ids[:, 1:].contiguous()
        if s == 3 and mode != "train":
            inputs[f"targets.{s}"][0, 1] = inputs[f"targets.{s}"][1, 3] = 0
        uniforms = [((37 * (9 * s + i) + 11) % 101 + 0.5) / 102 for i in range(9)]
        inputs[f"uniforms.{s}"] = torch.tensor(uniforms, dtype=F64).reshape(3, 3)
    tau = [temperature(n, 10, 2.0, 0.2, "factor") if mode == "train" else 0.7 for n in range(steps)]
    inputs["tau"] = torch.tensor(tau, dtype=F64)
    meta = cfg.metadata()
    meta.update(B=2, steps=steps, lengths=",".join(["4"] * steps))
    if mode == "train":
        inputs["lr"] = torch.tensor([learning_rate(n, 0.02, 2, 8) for n in range(10)], dtype=F64)
        meta.update(beta1=0.9, beta2=0.999, eps=1e-7, arch_optimizer="same")
    else:
        meta.update(grad_steps="1", evals="", generate=0)
    return inputs, meta


# -------------------------------------------------- checks

CHECKER = Checker(verbose=False)
expect, printed = CHECKER.expect, CHECKER.printed


def close(a, b, *what, tolerance=1e-12):
    CHECKER.close(" ".join(str(w) for w in what), a, b, tolerance)


def ck(x):
    x = x.reshape(-1)
    return float((x * torch.cos(0.3 * torch.arange(len(x), dtype=F64))).sum())


def check_published():
    with open(os.path.join(HERE, "par_numbers.txt")) as f:
        numbers = OrderedDict((line.split()[0], line.split()[1:]) for line in f
                              if not line.startswith("#"))
    used = set()

    def compare(name, values):
        used.add(name)
        printed(name, torch.as_tensor(values, dtype=F64).reshape(-1), numbers[name])

    for row in (0, 3):
        compare(f"row.{row}", ref_sines(row, 8))
    for mode in ("soft", "st", "plain"):
        inputs, meta = published_case(mode)
        r, cfg = run_model(inputs, meta), config_from(meta)
        compare(f"{mode}.loss", torch.cat([r[f"loss.{s}"] for s in range(4)]))
        for s in range(3):
            if f"{mode}.mem.{s}" in numbers:
                compare(f"{mode}.mem.{s}", [ck(r[f"mem.{l}.{s}"]) for l in range(3)])
        grads = to_published(cfg, {n: r[f"grad.{n}.1"]
                                   for n in parameter_shapes(cfg)}) if mode != "plain" else {}
        for name, g in grads.items():
            if f"{mode}.grad.{name}" in numbers:
                compare(f"{mode}.grad.{name}", [ck(g), float((g ** 2).sum().sqrt())])
            if f"{mode}.grad.{name}.values" in numbers:
                compare(f"{mode}.grad.{name}.values", g)
            if name.endswith("W_pos.b"):
                expect(float(g.abs().max()) < 1e-15, mode, name, "is not dead")
            if name.endswith("W_emb.b"):
                expect(float(g[16:].abs().max()) < 1e-15, mode, name, "keys are not dead")
        if mode == "st":
            expect(not bool(grads["2.dense.k"].any()) and not bool(grads["2.dense.b"].any()),
                   "unselected branch has a gradient")
    inputs, meta = published_case("train")
    r, cfg = run_updates(inputs, meta), config_from(meta)
    compare("train.loss", r["loss"])
    compare("train.lr", inputs["lr"])
    final = to_published(cfg, {n: r["final." + n] for n in parameter_shapes(cfg)})
    for l in range(3):
        compare(f"train.pi.{l}", final[f"{l}.pi"])
    for name in [n for n in numbers if n.startswith("train.ck.")]:
        compare(name, ck(final[name[9:]]))
    for n in (12000, 267735):
        counts = [int(1e9 / (r + 2.7)) for r in range(n)]
        compare(f"cuts.{n}", fast_cuts(counts, 4, fast_head_cost)[0])
    expect(used == set(numbers), "not compared", set(numbers) - used)
    print(len(used), "published results compared")


# Forms of the original Transformer-XL: (options, segment length).
PLAIN = dict(vocab=13, words_out="tied")
CLUSTERS = dict(vocab=60, words_in="adaptive", words_out="adaptive", cutoffs="20,40", tie_words=1)
ORIGINAL = OrderedDict((
    ("post", (dict(PLAIN), 6)),
    ("pre", (dict(PLAIN, norm="pre", final_norm=0), 6)),
    ("window", (dict(PLAIN, same_length=1, clamp_len=5, mem=10), 4)),
    ("rel_bias", (dict(PLAIN, positions="learned", rel_bias=1, share_uv=0, clamp_len=6), 6)),
    ("slices", (dict(CLUSTERS), 6)),
    ("one_projection", (dict(CLUSTERS, emb=6, one_projection=1, tie_projs="but_first"), 6)),
    ("projections", (dict(CLUSTERS, div_val=2, tie_projs="but_first"), 6)),
    ("pre_projections", (dict(CLUSTERS, div_val=2, norm="pre", final_norm=0), 6))))


def original_parameters(cfg):
    """The original's tensors, in its order. A single table or bias holds all clusters."""
    D, H, dh, Fi, V = cfg.dim, cfg.heads, cfg.dh, cfg.inner, cfg.vocab
    HD, rows, sizes, widths, s = H * dh, cfg.rows(), cfg.sizes(), cfg.widths(), OrderedDict()
    layers, J, split = len(cfg.kinds) // 2, len(sizes) - 1, cfg.div_val > 1
    if cfg.rel_bias:
        s["r_emb"], s["u"], s["r_bias"] = (layers, rows, H, dh), (layers, H, dh), (layers, rows, H)
    else:
        s["u"] = s["v"] = (H, dh)
    if split:
        s.update((f"table.{i}", shape) for i, shape in enumerate(zip(sizes, widths)))
    else:
        s["table"] = (V, cfg.E)
    if J and cfg.has_projections():
        s.update((f"proj.{i}", (D, e)) for i, e in enumerate(widths) if split or i == 0)
    for l in range(layers):
        s[f"{l}.qkv"], s[f"{l}.o"] = (3 * HD, D), (D, HD)
        s[f"{l}.ln_a.g"] = s[f"{l}.ln_a.b"] = (D,)
        if not cfg.rel_bias:
            s[f"{l}.r_net"] = (HD, D)
        s[f"{l}.core0.w"], s[f"{l}.core0.b"] = (Fi, D), (Fi,)
        s[f"{l}.core3.w"], s[f"{l}.core3.b"] = (D, Fi), (D,)
        s[f"{l}.ln_f.g"] = s[f"{l}.ln_f.b"] = (D,)
    if J:
        s["cluster.w"], s["cluster.b"] = (J, cfg.E), (J,)
    if split:
        s.update((f"bias.{i}", (n,)) for i, n in enumerate(sizes))
    else:
        s["bias"] = (V,)
    if J and cfg.has_projections():
        own = [i for i in range(J + 1) if not cfg.shares_projection(i)]
        s.update((f"out_proj.{i}", (D, widths[i])) for i in own)
    o = OrderedDict()
    for k, (name, shape) in enumerate(s.items()):
        e = torch.arange(int(np.prod(shape)), dtype=F64)
        value = 0.3 * torch.sin(1 + 0.37 * e + 1.91 * k) + (1 if name.endswith(".g") else 0)
        o[name] = value.reshape(shape).requires_grad_()
    return o


def from_original(cfg, o):
    """The same under our names. The original's table ends with distance 0, ours starts
    with it."""
    p, sizes = OrderedDict(), cfg.sizes()
    if not cfg.rel_bias:
        p["attn.u"], p["attn.v"] = o["u"], o["v"]
    for l in range(len(cfg.kinds) // 2):
        a, f = f"layers.{2 * l}.attn.", f"layers.{2 * l + 1}.ff."
        HD = cfg.heads * cfg.dh
        p[a + "query.weight"], p[a + "kv.weight"] = o[f"{l}.qkv"].split([HD, 2 * HD])
        p[a + "out.weight"] = o[f"{l}.o"]
        if cfg.rel_bias:
            p[a + "rel.weight"] = o["r_emb"][l].flip(0).reshape(cfg.rows(), HD)
            p[a + "r_bias"] = o["r_bias"][l].flip(0)
            p[a + "u"] = o["u"][l]
        else:
            p[a + "pos.weight"] = o[f"{l}.r_net"]
        for name, theirs in ((a + "norm", "ln_a"), (f + "norm", "ln_f")):
            p[name + ".weight"], p[name + ".bias"] = o[f"{l}.{theirs}.g"], o[f"{l}.{theirs}.b"]
        for name, theirs in ((f + "fc1", "core0"), (f + "fc2", "core3")):
            p[name + ".weight"], p[name + ".bias"] = o[f"{l}.{theirs}.w"], o[f"{l}.{theirs}.b"]
    if cfg.words_in == "plain":
        p["in_emb.weight"], p["out_emb.bias"] = o["table"], o["bias"]
    else:
        for ours, theirs in (("in_emb.tables", "table"), ("out_emb.biases", "bias")):
            if cfg.div_val > 1:
                parts = [o[f"{theirs}.{i}"] for i in range(len(sizes))]
            else:
                parts = o[theirs].split(sizes)
            p.update((f"{ours}.{i}", w) for i, w in enumerate(parts))
        p["out_emb.cluster.weight"], p["out_emb.cluster.bias"] = o["cluster.w"], o["cluster.b"]
        for side, theirs in (("in_emb", "proj"), ("out_emb", "out_proj")):
            found = [(n, w) for n, w in o.items() if n.startswith(theirs + ".")]
            p.update((f"{side}.projs.{n.split('.')[1]}", w) for n, w in found)
    assert set(p) == set(parameter_shapes(cfg)), set(p) ^ set(parameter_shapes(cfg))
    return p


def original_case(form):
    """Mean nll of three segments, sums of the memories after them, gradients of each
    loss."""
    options, T = ORIGINAL[form]
    base = dict(dim=8, heads=2, inner=12, pattern="sfsf", segment=T, mem=8)
    cfg = Config(**dict(base, **options)).checked()
    o = original_parameters(cfg)
    p = from_original(cfg, o)
    tokens = torch.tensor([[(5 * b + 3 * i + i * i % 7 + i ** 3 % 5) % cfg.vocab
                            for i in range(3 * T + 1)] for b in range(2)])
    model, nll, sums, grads = Model(cfg, p, 2), [], [], []
    for s in range(3):
        text = tokens[:, s * T:(s + 1) * T + 1]
        loss, _, _ = losses(cfg, p, model.segment(text[:, :-1]), text[:, 1:])
        nll.append(loss.detach())
        found = torch.autograd.grad(loss, list(o.values()), allow_unused=True, retain_graph=True)
        grads.append(dict(zip(o, found)))
    for l in (0, 2):
        sums.append(model.memory(l)[0].sum())
    return nll, sums, grads


def check_original():
    """Compares at least eight digits: the original rounds its masked scores to
    float32."""
    with open(os.path.join(HERE, "par_xl_numbers.txt")) as f:
        lines = [line.split() for line in f if not line.startswith("#")]
    cases = {form: original_case(form) for form in ORIGINAL}
    for name, *words in lines:
        form, kind, *rest = name.split("/")
        nll, sums, grads = cases[form]
        if kind == "nll":
            close(torch.stack(nll), [float(w) for w in words], name, tolerance=2e-8)
        elif kind == "mem":
            close(torch.stack(sums), [float(w) for w in words], name, tolerance=2e-7)
        else:
            square = float(grads[int(kind[4:]) - 1][rest[0]].pow(2).sum())
            close(square / float(words[0]), 1.0, name, tolerance=1e-6)
    forms = {name.split("/")[0] for name, *_ in lines}
    expect(forms == set(ORIGINAL), "a form of the original has no numbers")
    print(len(lines), "results of the original Transformer-XL compared")


def random_parameters(cfg, gen):
    p = OrderedDict()
    for name, shape in parameter_shapes(cfg).items():
        value = randn(gen, *shape)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * value
        elif name.startswith("arch.") and cfg.arch == "pi":
            value = torch.tensor([0.33, 0.33, 0.34], dtype=F64) + 0.1 * value
        elif (len(shape) == 2 and not name.startswith("in_emb")
              and not name.endswith((".u", ".v", "rel.weight", "r_bias"))):
            value = value * 1.2 / math.sqrt(shape[1])
        else:
            value = 0.5 * value
        p[name] = value.requires_grad_()
    return p


def run(cfg, p, tokens, lengths, w=None, mask=None, reset=None, **force):
    """Hidden states of a text that is processed in segments of the given lengths."""
    model, out, at = Model(cfg, p, len(tokens), **force), [], 0
    for s, T in enumerate(lengths):
        piece = None if mask is None else mask[:, at:at + T]
        out.append(model.segment(tokens[:, at:at + T], w, piece, reset.get(s) if reset else None))
        at += T
    return torch.cat(out, 1)


ONE = dict(words_in="adaptive", words_out="adaptive", cutoffs="6,13", emb=6, one_projection=1)
FORMS = [dict(), dict(norm="pre", biases=1, attn_relu=1),
         dict(share_uv=0, scale="full", head_dim=3), dict(positions="learned", mem=20, norm="pre"),
         dict(clamp_len=3), dict(sines_form="ref"),
         dict(sines_form="ref", pos_mode="fixed", biases=1),
         dict(words_in="adaptive", words_out="adaptive", cutoffs="6,13", div_val=2),
         dict(norm="pre", final_norm=0), dict(positions="learned", rel_bias=1, share_uv=0, mem=20),
         dict(positions="learned", rel_bias=1, clamp_len=3), dict(ONE, tie_projs="but_first")]


def check_properties(gen):
    for form in FORMS:
        for kinds in (dict(pattern="sfsi"), dict(blocks=3)):
            cfg = Config(**dict(dict(mem=20, inner=10), **form, **kinds)).checked()
            p = random_parameters(cfg, gen)
            tokens = torch.randint(0, cfg.vocab, (2, 13), generator=gen)
            w = None if cfg.pattern else gates(cfg, p, "soft")
            whole = run(cfg, p, tokens, [13], w)
            close(run(cfg, p, tokens, [4, 4, 1, 4], w), whole, "memory is not the longer segment",
                  form, kinds)
            other = tokens.clone()
            other[:, 7] = (other[:, 7] + 1) % cfg.vocab
            changed = run(cfg, p, other, [13], w)
            expect(bool((changed[:, :7] == whole[:, :7]).all())
                   and bool((changed[:, 7] != whole[:, 7]).any()), "causality", form)
            other = tokens.clone()
            other[1] = (other[1] + 3) % cfg.vocab
            expect(bool((run(cfg, p, other, [13], w)[0] == whole[0]).all()),
                   "rows depend on each other", form)
            # padding in front changes nothing
            padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
            mask = torch.ones(2, 16, dtype=torch.int32)
            mask[:, :3] = 0
            close(run(cfg, p, padded, [5, 5, 6], w, mask)[:, 3:], whole, "padding in front",
                  form, kinds)
            again = run(cfg, p, torch.cat([tokens, tokens], 1), [13, 13], w,
                        reset={1: torch.tensor([1, 0])})
            close(again[0, 13:], whole[0], "reset row", form)
            expect(float((again[1, 13:] - whole[1]).abs().max()) > 1e-6,
                   "memory of the other row is lost", form)
            logp = log_probabilities(cfg, p, whole[0])
            close(logp.exp().sum(-1), torch.ones(13, dtype=F64),
                  "probabilities do not sum to one", form)
    # every query has the same number of keys, however the text is cut into segments
    for M in (2, 5):
        cfg = Config(pattern="s", mem=M, same_length=1)
        p = random_parameters(cfg, gen)
        tokens = torch.randint(0, cfg.vocab, (2, 13), generator=gen)
        close(run(cfg, p, tokens, [13]), run(cfg, p, tokens, [1] * 13), "same length", M)
        for t in range(13):
            last = tokens[:, max(0, t - M + 1):t + 1]
            close(run(cfg, p, last, [last.shape[1]])[:, -1], run(cfg, p, tokens, [13])[:, t],
                  "same length is a window", M, t)


def check_gates(gen):
    for norm, arch in itertools.product(("post", "pre"), ("logits", "pi")):
        cfg = Config(blocks=3, mem=5, norm=norm, arch=arch, gate="st", words_out="tied")
        p = random_parameters(cfg, gen)
        tokens = torch.randint(0, cfg.vocab, (2, 12), generator=gen)
        uniforms = torch.rand(3, 3, generator=gen, dtype=F64) * 0.9 + 0.05
        for w in (gates(cfg, p, "argmax"), gates(cfg, p, "noise", uniforms, 0.7)):
            pattern = "".join("sfi"[int(row.detach().argmax())] for row in w)
            fixed = replace(cfg, pattern=pattern)
            names = parameter_shapes(fixed)
            expect(set(names) <= set(p), "names of the fixed network", pattern)
            a = run(cfg, p, tokens, [4, 4, 4], w)
            b = run(fixed, {n: p[n] for n in names}, tokens, [4, 4, 4])
            close(a, b, "one-hot gate is not the fixed network", norm, arch, pattern)
            ga = gradients((a ** 3).sum(), p)
            gb = gradients((b ** 3).sum(), {n: p[n] for n in names})
            for n, g in ga.items():
                if not n.startswith("arch."):
                    close(g, gb.get(n, torch.zeros_like(g)), "gradient of the one-hot gate", n,
                          tolerance=1e-9)
    # the logits ln p give the same gates, except for the 1e-5
    cfg = Config(blocks=2, arch="logits")
    a = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=F64)
    u = torch.rand(4, 2, 3, generator=gen, dtype=F64)
    one = gates(cfg, {f"arch.{l}": torch.log(a[l]) + 3 for l in range(2)}, "noise", u, 0.6)
    two = gates(replace(cfg, arch="pi"), {f"arch.{l}": a[l] for l in range(2)}, "noise", u, 0.6)
    close(one, two, "logits and pi differ", tolerance=2e-4)
    close(gates(cfg, {f"arch.{l}": torch.log(a[l]) for l in range(2)}, "soft"), a,
          "softmax of ln p")
    expect(float(gates(replace(cfg, arch="pi"),
                       {"arch.0": torch.tensor([1.0, -1.0, 1.0], dtype=F64), "arch.1": a[0]},
                       "soft")[0, 1]) < 1e-5, "a negative pi acts as 0")
    pi = torch.tensor([0.0, -0.1, 0.4], dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(probabilities(replace(cfg, arch="pi"), pi)[2], pi)
    expect(g[0] != 0 and g[1] == 0, "gradient passes at 0 and not below", g)
    p = {f"arch.{l}": torch.zeros(3, dtype=F64) for l in range(2)}
    expect(gates(cfg, p, "argmax").tolist() == [[1, 0, 0], [1, 0, 0]], "the first of equal ones")
    counts = torch.zeros(2, 3)
    for _ in range(4000):       # hard samples follow p at any temperature
        counts += gates(replace(cfg, gate="st"), {f"arch.{l}": torch.log(a[l]) for l in range(2)},
                        "noise", torch.rand(2, 3, generator=gen, dtype=F64), 3.0)
    close(counts / 4000, a, "frequencies of the draws", tolerance=0.04)


def check_encoder_layer(gen):
    """Against torch.nn.TransformerEncoderLayer, without positions."""
    for norm, final in (("post", 1), ("pre", 1), ("pre", 0)):
        cfg = Config(pattern="sf", mem=0, inner=10, biases=1, norm=norm, final_norm=final)
        p = random_parameters(cfg, gen)
        with torch.no_grad():
            for n in ("layers.0.attn.pos.weight", "layers.0.attn.pos.bias", "attn.u", "attn.v"):
                p[n].zero_()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 10, 0.0, batch_first=True,
                                                 norm_first=norm == "pre").double()
        names, a = OrderedDict(), "layers.0.attn."
        for kind in ("weight", "bias"):
            both = torch.cat([p[a + "query." + kind], p[a + "kv." + kind]])
            names["self_attn.in_proj_" + kind] = both
            names["self_attn.out_proj." + kind] = p[a + "out." + kind]
        for i, part in (("1", "layers.0.attn.norm"), ("2", "layers.1.ff.norm")):
            names[f"norm{i}.weight"] = p[part + ".weight"]
            names[f"norm{i}.bias"] = p[part + ".bias"]
        for i in ("1", "2"):
            for kind in ("weight", "bias"):
                names[f"linear{i}.{kind}"] = p[f"layers.1.ff.fc{i}.{kind}"]
        layer.load_state_dict({n: w.detach() for n, w in names.items()})
        tokens = torch.randint(0, 20, (2, 7), generator=gen)
        x = torch.stack([embed(cfg, p, row) for row in tokens])
        y = layer(x, src_mask=torch.full((7, 7), -math.inf, dtype=F64).triu(1))
        if norm == "pre" and final:
            y = F.layer_norm(y, (8,), p["final_norm.weight"], p["final_norm.bias"])
        close(run(cfg, p, tokens, [7]), y, "torch's encoder layer", norm)


def check_adaptive_softmax(gen):
    """Against torch.nn.AdaptiveLogSoftmaxWithLoss."""
    for words, reverse in (("ref", False), ("adaptive", True)):
        cfg = Config(pattern="f", words_out=words, cutoffs="5,12", div_val=2, proj_factor=2)
        p = random_parameters(cfg, gen)
        soft = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 12], div_value=2.0,
                                                   head_bias=True).double()
        with torch.no_grad():
            for n in p:
                if "biases" in n and not n.endswith(".0") or "proj_biases" in n:
                    p[n].zero_()
            if words == "adaptive":
                p["out_emb.projs.0"].copy_(torch.eye(8, dtype=F64))
            weight, bias = p["out_emb.cluster.weight"], p["out_emb.cluster.bias"]
            if reverse:
                weight, bias = weight.flip(0), bias.flip(0)
            soft.head.weight.copy_(torch.cat([p["out_emb.tables.0"], weight]))
            soft.head.bias.copy_(torch.cat([p["out_emb.biases.0"], bias]))
            for k in (1, 2):
                soft.tail[k - 1][0].weight.copy_(p[f"out_emb.projs.{k}"].T)
                soft.tail[k - 1][1].weight.copy_(p[f"out_emb.tables.{k}"])
        h = randn(gen, 6, 8)
        close(log_probabilities(cfg, p, h), soft.log_prob(h), "torch's adaptive softmax", words)


def check_optimisers(gen):
    """Against torch.optim.AdamW; and both forms of Adam without epsilon."""
    for decay in (0.0, 0.1):
        a = randn(gen, 5)
        b = a.clone().requires_grad_()
        mine = AdamW({"a": a}, 0.9, 0.99, 1e-6, decay)
        theirs = torch.optim.AdamW([b], 0.01, (0.9, 0.99), 1e-6, decay)
        c = a.clone()
        plain = Adam({"a": c}, 0.9, 0.99, 0.0)
        for _ in range(5):
            g = randn(gen, 5)
            b.grad = g.clone()
            mine.update({"a": g}, 0.01)
            plain.update({"a": g}, 0.01)
            theirs.step()
        close(a, b.detach(), "torch's AdamW")
        if not decay:
            close(c, a, "the two forms agree without epsilon", tolerance=1e-6)


def check_positions():
    """A table row rotated by the angle of Kt - 1 is the row of the distance."""
    D, Kt = 8, 9
    W = randn(seeded(1), D, 5)
    turned = torch.zeros(D, 5, dtype=F64)
    for j in range(0, D, 2):
        angle = 1e-4 ** (j / D) * (Kt - 1)
        c, s, even, odd = math.cos(angle), math.sin(angle), W[D - 1 - j], W[D - 2 - j]
        turned[j], turned[j + 1] = c * even + s * odd, s * even - c * odd
    for d in range(14):
        close(ref_sines(d, D).flip(0) @ turned, ref_sines(Kt - 1 - d, D) @ W,
              "conversion of positions", d)
    block = block_sines(3, D)
    for k in range(D // 2):
        close(block[k], math.sin(3 * 10000 ** (-2 * k / D)), "block sines")
        close(block[D // 2 + k], math.cos(3 * 10000 ** (-2 * k / D)), "block cosines")
        close(ref_sines(3, D)[D - 2 - 2 * k], block[k], "both tables")
        close(ref_sines(3, D)[D - 1 - 2 * k], block[D // 2 + k], "both tables")


def check_differences(gen):
    """Two entries of every parameter against central differences; memory is a
    constant."""
    cases = [dict(pattern="sfs", norm="pre", biases=1, share_uv=0),
             dict(pattern="sf", positions="learned", same_length=1),
             dict(blocks=2, latency="fbnet", latency_alpha=0.4, latency_beta=0.6, attn_relu=1),
             dict(blocks=2, arch="pi", norm="pre", latency="hinge", latency_lam=0.3,
                  latency_target=2.0, latency_w="w"),
             dict(pattern="sf", words_in="adaptive", words_out="adaptive", cutoffs="6,13",
                  div_val=2, tie_words=1, tie_projs="but_first"),
             dict(REF, blocks=2, cutoffs="5,12", proj_factor=2)]
    for options in cases:
        cfg = Config(**dict(dict(inner=6), **options)).checked()
        p = random_parameters(cfg, gen)
        inputs = {"latency": torch.tensor([1.7, 0.9, 0.0], dtype=F64),
                  "tau": torch.tensor([0.8, 0.8], dtype=F64)}
        for s in range(2):
            inputs[f"tokens.{s}"] = torch.randint(0, 20, (2, 4), generator=gen)
            inputs[f"targets.{s}"] = torch.randint(0, 20, (2, 4), generator=gen)
            inputs[f"uniforms.{s}"] = torch.rand(2, 3, generator=gen, dtype=F64) * 0.9 + 0.05
        first = Model(cfg, p, 2)
        training_step(cfg, p, first, inputs, 0)

        def loss():
            model = Model(cfg, p, 2)
            for mine, theirs in zip(model.streams, first.streams):
                mine.rows = [list(rows) for rows in theirs.rows]
            return training_step(cfg, p, model, inputs, 1)[0]
        grads = gradients(loss(), p)
        for n, w in p.items():
            flat = w.detach().view(-1)
            for at in torch.randint(0, len(flat), (2,), generator=gen).tolist():
                kept, values = float(flat[at]), []
                for step in (1e-5, -1e-5):
                    flat[at] = kept + step
                    with torch.no_grad():
                        values.append(float(loss()))
                flat[at] = kept
                close((values[0] - values[1]) / 2e-5, float(grads[n].reshape(-1)[at]), "difference",
                      n, options, tolerance=1e-8)


def check_forms(gen):
    """Forms that are a special case of another one, or equal to it."""
    tokens = torch.randint(0, 20, (2, 13), generator=gen)
    # a short table of distances equals a long one whose further rows repeat the last
    cfg = Config(pattern="sfsf", positions="learned", rel_bias=1, share_uv=0, segment=3, mem=3)
    p = random_parameters(cfg, gen)
    longer, q = replace(cfg, segment=12), dict(p)
    for n in p:
        if n.endswith(("rel.weight", "r_bias")):
            q[n] = torch.cat([p[n], p[n][-1:].expand(9, -1)])
    close(run(cfg, p, tokens, [7, 6]), run(longer, q, tokens, [7, 6]), "distances beyond the table")
    clamped, r = replace(cfg, clamp_len=2), dict(p)
    for n in p:
        if n.endswith(("rel.weight", "r_bias")):
            r[n] = torch.cat([p[n][:3], p[n][2:3].expand(3, -1)])
    close(run(clamped, p, tokens, [7, 6]), run(cfg, r, tokens, [7, 6]), "the last distance")
    # r_bias = v r is the learned form with a content-free bias v
    free = replace(cfg, rel_bias=0)
    q = dict(p)
    for l in (0, 2):
        a = f"layers.{l}.attn."
        q[a + "v"] = randn(gen, 2, 4)
        q[a + "r_bias"] = (p[a + "rel.weight"].view(-1, 2, 4) * q[a + "v"]).sum(-1)
    close(run(cfg, q, tokens, [7, 6]), run(free, q, tokens, [7, 6]), "r_bias = v r")
    # with a very large bias at one distance, every query sees that distance only
    cfg = Config(pattern="s", positions="learned", rel_bias=1, mem=0, segment=13, same_length=0)
    p = random_parameters(cfg, gen)
    with torch.no_grad():
        p["layers.0.attn.r_bias"][1] = 1e4
    x = torch.stack([embed(cfg, p, row) for row in tokens])
    v = x @ p["layers.0.attn.kv.weight"][8:].T
    y = x[:, 1:] + v[:, :-1] @ p["layers.0.attn.out.weight"].T
    y = F.layer_norm(y, (8,), p["layers.0.attn.norm.weight"], p["layers.0.attn.norm.bias"])
    close(run(cfg, p, tokens, [13])[:, 1:], y, "row d of r_bias is distance d")
    # one projection equals several equal ones, and its gradient is the sum of theirs
    for tie in ("none", "but_first", "all"):
        cfg = Config(**dict(ONE, pattern="sf", tie_words=1, tie_projs=tie)).checked()
        p = random_parameters(cfg, gen)
        many = replace(cfg, one_projection=0)
        q = OrderedDict((n, p[n if n in p else "in_emb.projs.0"].detach().clone().requires_grad_())
                        for n in parameter_shapes(many))
        out = []
        for c, w in ((cfg, p), (many, q)):
            loss = losses(c, w, run(c, w, tokens, [7, 6]), tokens.roll(-1, 1))[0]
            out.append((loss.detach(), gradients(loss, w)))
        close(out[0][0], out[1][0], "one projection and equal ones", tie)
        total = sum(g for n, g in out[1][1].items() if n.startswith("in_emb.projs"))
        close(out[0][1]["in_emb.projs.0"], total, "gradient of the one projection", tie)
        own = "out_emb.projs.0" in p, "out_emb.projs.2" in p
        expect(own == (tie != "all", tie == "none"), "names of projections", tie)


def check_xl_files():
    """Recomputes the stored files, and checks their gradients along random directions."""
    files = [f for f in os.listdir(HERE) if f.startswith("par_xl_") and f.endswith(".safetensors")]
    files.sort()
    expect(len(files) >= 9, "par_xl_*.safetensors", len(files))
    gen, worst = seeded(8), 0.0
    for name in files:
        tensors, meta = load_safetensors(os.path.join(HERE, name))
        for key, value in run_both(tensors, meta).items():
            close(tensors[key], value, name, key, tolerance=1e-10)
        for key, error in directional_errors(tensors, meta, gen).items():
            expect(error < 1e-8, name, "difference along a direction", key, error)
            worst = max(worst, error)
    print(len(files), f"files par_xl_*, gradients differ from differences by {worst:.1e}")


def check_cuts(gen):
    for _ in range(60):
        N = int(torch.randint(4, 14, (1,), generator=gen))
        counts = sorted(torch.randint(0, 6, (N,), generator=gen).tolist(), reverse=True)
        clusters = int(torch.randint(1, 5, (1,), generator=gen))
        for costs, fast in ((head_cost(counts), fast_head_cost),
                            (true_cost(counts, clusters, 8, 2), fast_true_cost(8, 2))):
            cuts, cost = optimal_cuts(N, clusters, *costs)
            expect((cuts, cost) == fast_cuts(counts, clusters, fast), "fast cuts", counts,
                   clusters, cuts)
            every = []
            for ends in itertools.combinations(range(1, N), clusters - 1):
                total, ends = costs[0]((list(ends) + [N])[0]), list(ends) + [N]
                for k in range(1, clusters):
                    total += costs[1](k, ends[k - 1], ends[k])
                every.append((total, ends[:-1]))
            least = min(t for t, _ in every)
            expect(cost == least and (least, cuts) in every, "not the optimum", counts, clusters)
            expect(cuts == max((e for t, e in every if t == least), key=lambda e: e[::-1]), "ties",
                   counts, clusters, cuts)
    expect(par_pattern(32, 5) == "sfff" * 6 + "f" * 8 and par_pattern(24, 5) == "sffff" * 4 + "ffff"
           and par_pattern(36, 5) == "sff" * 7 + "f" * 15, "published patterns")


def check():
    gen = seeded(3)
    check_published()
    check_original()
    check_positions()
    check_encoder_layer(gen)
    check_adaptive_softmax(gen)
    check_optimisers(gen)
    check_properties(gen)
    check_gates(gen)
    check_differences(gen)
    check_forms(gen)
    check_xl_files()
    check_cuts(gen)
    return CHECKER.finish()


if __name__ == "__main__":
    sys.exit(check() if "--check" in sys.argv[1:] else __doc__)
