#!/usr/bin/env python3
"""Float64 PyTorch oracle of the Compressive Transformer (Rae et al. 2019,
arXiv:1911.05507).

It covers the model, memories, compression and auxiliary losses, and is written from the
specification only. Every batch row runs by itself as one stream: its memory is a list of
rows with a validity flag each, and a reset starts a new, empty stream. Attention is a
loop over heads with a dense mask, positions are looked up by distance, and all gradients
come from autograd. It is not meant to be fast.

    python3 compressive_oracle.py --check    compares with the published test numbers

Notation: B batch rows, T tokens of a call, S segment length, M and C capacities of memory
and compressed memory, n and c rows they hold, D width, H heads, hd = D / H, L layers, r
ratio, x overlap.

Functions compute in the dtype of the parameters. The golden vectors are float64; the same
code in float32 shows the size of rounding errors.
"""
import math
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

sys.dont_write_bytecode = True
from common import (F64, HERE, Checker, integers, layer_norm, leaf, leaves, parameters_in, randn,
                    seeded, slope)


# -------------------------------------------------- options and parameters

@dataclass(frozen=True)
class Config:
    vocab: int = 13
    dim: int = 8
    emb: int = 0                    # 0: dim
    layers: int = 2
    heads: int = 2
    kv_heads: int = 0               # 0: heads
    inner: int = 0                  # 0: 4 dim
    segment: int = 4
    memory_layers: str = "all"      # 1-based, "" = none
    mem: int = 4
    cmem: int = 2
    mems: str = ""                  # one value per layer, in place of mem
    cmems: str = ""
    ratio: int = 4
    compress: str = "conv"          # conv dilated max mean used none
    overlap: int = 0
    conv_no_bias: int = 0
    dilations: str = "1,2,4"
    aux: str = "attention"          # attention autoencode bptt none
    aux_weight: float = 1.0
    bptt: int = 1
    positions: str = "learned"      # learned xl
    norm_after: int = 0
    final_norm: int = 0
    glu: int = 0
    tied: int = 0
    gate: str = "residual"          # residual gru input output highway sigtanh gtrxl
    gate_relu: int = 0
    gate_bias: float = 0.0          # initial value only
    mogrify: int = 0
    recurrence: str = "none"        # none ernie rotate
    literal_rows: int = 0
    literal_pad: int = 0
    literal_target: int = 0
    literal_mask: int = 0
    literal_freeze: int = 0

    def checked(self):
        listed = integers(self.memory_layers) if self.memory_layers != "all" else []
        assert len(set(listed)) == len(listed) and all(1 <= v <= self.layers for v in listed)
        assert self.dim % self.heads == 0 and self.heads % self.K == 0
        assert self.compress in ("conv", "dilated") or self.aux == "none"
        assert self.compress == "conv" or not (self.overlap or self.conv_no_bias)
        assert self.gate == "gru" or not self.mogrify
        sizes = {(self.capacity(l), self.compressed_capacity(l)) for l in self.memory}
        assert len(sizes) <= 1 or not (self.literal_rows or self.recurrence == "rotate")
        return self

    @property
    def E(self):
        return self.emb or self.dim

    @property
    def K(self):
        return self.kv_heads or self.heads

    @property
    def hd(self):
        return self.dim // self.heads

    @property
    def F(self):
        return self.inner or 4 * self.dim

    @property
    def memory(self):
        """0-based layers with memory, in ascending order."""
        if self.memory_layers == "all":
            return list(range(self.layers))
        return sorted(v - 1 for v in integers(self.memory_layers))

    def capacity(self, l):
        return integers(self.mems)[l] if self.mems else self.mem

    def compressed_capacity(self, l):
        if self.compress == "none":
            return 0
        return integers(self.cmems)[l] if self.cmems else self.cmem

    @property
    def table_rows(self):
        return (self.segment + max([self.capacity(l) for l in self.memory], default=0)
                + max([self.compressed_capacity(l) for l in self.memory], default=0))

    @property
    def taps(self):
        return self.ratio + self.overlap

    def metadata(self):
        return OrderedDict((f.name, repr(v) if isinstance(v, float) else str(v))
                           for f in fields(self) for v in [getattr(self, f.name)])


def config_from(meta):
    return Config(**{f.name: type(f.default)(meta[f.name]) for f in fields(Config)}).checked()


def gate_shapes(cfg):
    D = cfg.dim
    if cfg.gate == "gru":
        shapes = [("weight_ih", (3 * D, D)), ("weight_hh", (3 * D, D)), ("bias_ih", (3 * D,)),
                  ("bias_hh", (3 * D,))]
        if cfg.mogrify:
            k = D // 4
            shapes += [("mogrify.q0", (k, D)), ("mogrify.q1", (D, k)), ("mogrify.r0", (k, D)),
                       ("mogrify.r1", (D, k))]
        return shapes
    square = {"residual": "", "input": "w", "output": "w", "highway": "w", "sigtanh": "w u",
              "gtrxl": "wr ur wz uz wg ug"}
    shapes = [(name, (D, D)) for name in square[cfg.gate].split()]
    if cfg.gate in ("output", "highway", "sigtanh", "gtrxl"):
        shapes.append(("b", (D,)))
    return shapes


def parameter_shapes(cfg):
    D, E, V, F_, hd = cfg.dim, cfg.E, cfg.vocab, cfg.F, cfg.hd
    s = OrderedDict()
    s["in_emb.weight"] = (V, E)
    if E != D:
        s["in_proj.weight"], s["in_proj.bias"] = (D, E), (D,)
        s["out_proj.weight"], s["out_proj.bias"] = (E, D), (E,)
    if not cfg.tied:
        s["out_emb.weight"] = (V, E)
    s["out_emb.bias"] = (V,)
    if cfg.final_norm:
        s["final_norm.weight"], s["final_norm.bias"] = (D,), (D,)
    if cfg.positions == "learned":
        s["key_pe"] = (cfg.heads, cfg.table_rows, hd)
    for l in range(cfg.layers):
        a, f = f"layers.{l}.attn.", f"layers.{l}.ff."
        s[a + "norm.weight"], s[a + "norm.bias"] = (D,), (D,)
        s[a + "query.weight"] = (D, D)
        s[a + "kv.weight"] = (2 * cfg.K * hd, D)
        s[a + "out.weight"], s[a + "out.bias"] = (D, D), (D,)
        if cfg.positions == "xl":
            s[a + "pos.weight"] = (D, D)
            s[a + "u"], s[a + "v"] = (cfg.heads, hd), (cfg.heads, hd)
        for name, shape in gate_shapes(cfg):
            s[a + "gate." + name] = shape
        if l in cfg.memory and cfg.compressed_capacity(l) and cfg.compress in ("conv", "dilated"):
            c = f"layers.{l}.compress."
            s[c + "weight"] = (D, D, cfg.taps)
            if cfg.compress == "dilated":
                for j in range(len(integers(cfg.dilations))):
                    s[c + f"dilated.{j}.weight"] = (D, D, 2)
            elif not cfg.conv_no_bias:
                s[c + "bias"] = (D,)
            if cfg.aux == "autoencode":
                s[c + "decoder.weight"] = (D, D, cfg.taps)
        s[f + "norm.weight"], s[f + "norm.bias"] = (D,), (D,)
        hidden = 2 * F_ if cfg.glu else F_
        s[f + "fc1.weight"], s[f + "fc1.bias"] = (hidden, D), (hidden,)
        s[f + "fc2.weight"], s[f + "fc2.bias"] = (D, F_), (D,)
        for name, shape in gate_shapes(cfg):
            s[f + "gate." + name] = shape
    return s


# -------------------------------------------------- parts

def gelu(t):
    return t * 0.5 * (1 + torch.erf(t / math.sqrt(2)))


def linear(x, w, b=None):
    y = x @ w.T
    return y if b is None else y + b


def gate(cfg, p, y, x):
    """Joins a sublayer's output y with its input x; p(name) is a tensor of this gate
    (1910.06764, section 3.2)."""
    if cfg.gate_relu:
        y = torch.relu(y)
    if cfg.gate == "residual":
        return x + y
    if cfg.gate == "input":
        return torch.sigmoid(linear(x, p("w"))) * x + y
    if cfg.gate == "output":
        return x + torch.sigmoid(linear(x, p("w")) - p("b")) * y
    if cfg.gate == "highway":
        s = torch.sigmoid(linear(x, p("w")) + p("b"))
        return s * x + (1 - s) * y
    if cfg.gate == "sigtanh":
        return x + torch.sigmoid(linear(y, p("w")) - p("b")) * torch.tanh(linear(y, p("u")))
    if cfg.gate == "gtrxl":
        r = torch.sigmoid(linear(y, p("wr")) + linear(x, p("ur")))
        z = torch.sigmoid(linear(y, p("wz")) + linear(x, p("uz")) - p("b"))
        h = torch.tanh(linear(y, p("wg")) + linear(r * x, p("ug")))
        return (1 - z) * x + z * h
    assert cfg.gate == "gru"
    if cfg.mogrify:
        for step in range(5):
            if step % 2 == 0:
                y = 2 * torch.sigmoid(linear(linear(x, p("mogrify.q0")), p("mogrify.q1"))) * y
            else:
                x = 2 * torch.sigmoid(linear(linear(y, p("mogrify.r0")), p("mogrify.r1"))) * x
    ir, iz, i_n = linear(y, p("weight_ih"), p("bias_ih")).chunk(3, -1)
    hr, hz, hn = linear(x, p("weight_hh"), p("bias_hh")).chunk(3, -1)
    r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
    n = torch.tanh(i_n + r * hn)
    return (1 - z) * n + z * x


def feed_forward(cfg, p, l, h):
    u = linear(h, p[f"layers.{l}.ff.fc1.weight"], p[f"layers.{l}.ff.fc1.bias"])
    a = gelu(u[:, :cfg.F]) * u[:, cfg.F:] if cfg.glu else gelu(u)
    return linear(a, p[f"layers.{l}.ff.fc2.weight"], p[f"layers.{l}.ff.fc2.bias"])


def sinusoid(dist, D, dtype):
    f = [10000.0 ** (-2 * k / D) for k in range(D // 2)]
    return torch.tensor([math.sin(dist * v) for v in f] + [math.cos(dist * v) for v in f],
                        dtype=F64).to(dtype)


# -------------------------------------------------- memory of one stream in one layer

class Row:
    """One row of memory or compressed memory."""

    def __init__(self, value, ok, born=None):
        self.value, self.ok, self.born = value, ok, born
        self.used, self.seen = 0.0, 0       # attention received, real queries that could see it

    def usage(self):
        return float(self.used) / self.seen if self.seen else 0.0


class Slot:
    def __init__(self):
        self.mem, self.cmem = [], []


def usable(row, call, cfg):
    """The row's value as a later call reads it, attached to the compression for bptt
    calls."""
    if row.born is None or call - row.born > cfg.bptt:
        return row.value.detach()
    return row.value


def first_row(cfg, e):
    """Index of the first group's first row among e evicted rows; negative if padding is
    in front."""
    return -(e % cfg.ratio) if cfg.literal_pad else 0


def groups(cfg, e):
    return (e + e % cfg.ratio) // cfg.ratio if cfg.literal_pad else -(-e // cfg.ratio)


# relative usage gaps between the last row kept and the first one dropped
TIES = []


def compress_used(old, G):
    # best first: valid rows by usage, then the newer; after them invalid rows, the older
    # first
    def rank(i):
        return (0, -old[i].usage(), -i) if old[i].ok else (1, 0.0, i)
    order = sorted(range(len(old)), key=rank)
    if G < len(order) and old[order[G]].ok:
        a, b = old[order[G - 1]].usage(), old[order[G]].usage()
        if a != b:
            TIES.append((a - b) / a)
    return [old[i] for i in sorted(order[:G])]


def compress(cfg, p, l, old):
    """Compresses the evicted rows `old` to a list of (value, ok). Values carry the
    gradient to the compression."""
    e, r, x = len(old), cfg.ratio, cfg.overlap
    first, G = first_row(cfg, e), groups(cfg, e)
    if cfg.compress == "used":
        return [(row.value, row.ok) for row in compress_used(old, G)]
    zero = torch.zeros_like(old[0].value)

    def source(j):
        return old[j].value if 0 <= j < e and old[j].ok else zero

    def ok(j):
        return 0 <= j < e and old[j].ok

    out = []
    name = f"layers.{l}.compress."
    if cfg.compress == "dilated":
        rates = integers(cfg.dilations)
        z = [source(first + j) if j >= 0 else zero for j in range(-sum(rates), G * r)]
        for i, rate in enumerate(rates):
            w = p[name + f"dilated.{i}.weight"]
            z = [torch.relu(w[:, :, 0] @ z[j] + w[:, :, 1] @ z[j + rate])
                 for j in range(len(z) - rate)]
        assert len(z) == G * r
    for g in range(G):
        rows = range(first + g * r - x, first + g * r + r)
        valid = [j for j in rows if ok(j)]
        if cfg.compress == "max":
            value = torch.stack([source(j) for j in valid]).max(0)[0] if valid else zero
        elif cfg.compress == "mean":
            value = torch.stack([source(j) for j in valid]).mean(0) if valid else zero
        elif cfg.compress == "dilated":
            w = p[name + "weight"]
            value = sum(w[:, :, t] @ z[g * r + t] for t in range(r))
        else:
            w = p[name + "weight"]
            value = sum(w[:, :, t] @ source(j) for t, j in enumerate(rows))
            if not cfg.conv_no_bias:
                value = value + p[name + "bias"]
        out.append((value if valid else zero, bool(valid)))
    return out


def plain_attention(q, k, v):
    """q (T,hd), k and v (J,hd) -> (T,hd), without mask and positions."""
    return torch.softmax(q @ k.T / math.sqrt(q.shape[-1]), -1) @ v


def no_loss():
    return 0.0, 0, 0.0


def attention_loss(cfg, p, l, q, target_k, target_v, comp, queries):
    """Attention-reconstruction loss (1911.05507, section 3.2): (sum of squares, count,
    sum of squares of the target).

    q is (T,H,hd), target_k and target_v are lists of (K,hd), comp is a list of valid
    values.
    """
    if not target_k or not comp or not queries:
        return no_loss()
    H, K, hd = cfg.heads, cfg.K, cfg.hd
    src = torch.stack(comp)
    if cfg.recurrence == "ernie" and not cfg.norm_after:
        src = layer_norm(src, p[f"layers.{l}.attn.norm.weight"].detach(),
                         p[f"layers.{l}.attn.norm.bias"].detach())
    kv = linear(src, p[f"layers.{l}.attn.kv.weight"].detach())
    ck, cv = kv[:, :K * hd].reshape(-1, K, hd), kv[:, K * hd:].reshape(-1, K, hd)
    tk, tv = torch.stack(target_k).detach(), torch.stack(target_v).detach()
    q = q.detach()[queries]
    error, size, count = 0.0, 0.0, 0
    for i in range(H):
        head = i * K // H
        t = plain_attention(q[:, i], tk[:, head], tv[:, head])
        c = plain_attention(q[:, i], ck[:, head], cv[:, head])
        error = error + ((t - c) ** 2).sum()
        size = size + (t ** 2).sum()
        count += t.numel()
    return error, count, size


def autoencode_loss(cfg, p, l, old, comp):
    """Auto-encoding loss, reconstructing the evicted rows: the same triple as
    attention_loss."""
    e, r, x, D = len(old), cfg.ratio, cfg.overlap, cfg.dim
    w = p[f"layers.{l}.compress.decoder.weight"]
    rec = [torch.zeros(D, dtype=w.dtype) for _ in range(e)]
    for g, value in enumerate(comp):
        for t in range(cfg.taps):
            j = first_row(cfg, e) + g * r - x + t
            if 0 <= j < e:
                rec[j] = rec[j] + value @ w[:, :, t]
    error, size, count = 0.0, 0.0, 0
    for j, row in enumerate(old):
        if row.ok:
            error = error + ((row.value - rec[j]) ** 2).sum()
            size = size + (row.value ** 2).sum()
            count += D
    return error, count, size


# -------------------------------------------------- one row of the batch, one call

def position_row(cfg, table_rows, dist, held):
    """Row of the position table at a distance. held: rows now in both memories, for
    literal_rows."""
    row = (cfg.segment + held if cfg.literal_rows else table_rows) - 1 - dist
    assert not (cfg.literal_rows and row < 0)
    return max(row, 0)


def attention(cfg, p, l, inp, slot, mask, call, table_rows, held, kv_weight):
    """Attention of layer l on inp (T,D): output before the gate, q, k, v, probabilities
    (H,T,keys)."""
    T, H, K, hd, a = inp.shape[0], cfg.heads, cfg.K, cfg.hd, f"layers.{l}.attn."
    mem = [row.value.detach() for row in slot.mem] if slot else []
    cmem = [usable(row, call, cfg) for row in slot.cmem] if slot else []
    n, c = len(mem), len(cmem)
    src = inp
    if n + c:
        old = torch.stack(cmem + mem)
        if cfg.recurrence == "ernie" and not cfg.norm_after:
            old = layer_norm(old, p[a + "norm.weight"], p[a + "norm.bias"])
        src = torch.cat([old, inp])
    keys = c + n + T
    q = linear(inp, p[a + "query.weight"]).reshape(T, H, hd)
    kv = linear(src, kv_weight)
    k, v = kv[:, :K * hd].reshape(keys, K, hd), kv[:, K * hd:].reshape(keys, K, hd)
    ok = ([row.ok for row in slot.cmem] + [row.ok for row in slot.mem] if slot else []) + mask
    allowed = torch.zeros(T, keys, dtype=torch.bool)
    for i in range(T):
        for j in range(keys):
            current = j >= c + n
            live = j <= i + c + n
            if cfg.literal_mask:
                allowed[i, j] = live and (not current or (mask[i] and mask[j - c - n]))
            else:
                allowed[i, j] = live and mask[i] and ok[j]
    heads, positions = [], {}
    if cfg.positions == "xl":
        positions = {dist: linear(sinusoid(dist, cfg.dim, inp.dtype),
                                  p[a + "pos.weight"]).reshape(H, hd)
                     for dist in range(1 - T, keys)}
    for h in range(H):
        rows = []
        for i in range(T):
            cols = []
            for j in range(keys):
                dist = i + c + n - j
                qh, kh = q[i, h], k[j, h * K // H]
                if cfg.positions == "xl":
                    s = (qh + p[a + "u"][h]) @ kh + (qh + p[a + "v"][h]) @ positions[dist][h]
                else:
                    s = qh @ kh
                    if dist >= 0:
                        s = s + qh @ p["key_pe"][h, position_row(cfg, table_rows, dist, held)]
                cols.append(s / math.sqrt(hd))
            rows.append(torch.stack(cols))
        heads.append(torch.stack(rows))
    score = torch.stack(heads).masked_fill(~allowed, -torch.finfo(inp.dtype).max)
    prob = torch.softmax(score, -1)
    if not cfg.literal_mask:
        prob = prob * allowed.to(prob.dtype)        # a query without keys gives 0
    o = torch.cat([prob[h] @ v[:, h * K // H] for h in range(H)], -1)
    return linear(o, p[a + "out.weight"], p[a + "out.bias"]), q, k, v, prob


def norm(p, part, x):
    """The LayerNorm of a sublayer, "layers.L.attn." or "layers.L.ff."."""
    return layer_norm(x, p[part + "norm.weight"], p[part + "norm.bias"])


def forward_row(cfg, p, ids, mask, slots, call, training, table_rows, frozen=()):
    """One call of one stream. ids: T tokens; mask: T bools; slots: {layer: Slot}, changed
    in place.

    Returns logits (T,V) and, per memory layer, (sum of squares, count, sum of squares of
    the target).
    """
    T, S, D = len(ids), cfg.segment, cfg.dim
    assert 1 <= T <= S
    memory = cfg.memory
    if cfg.recurrence == "rotate" and memory:
        moved = [slots[memory[(i + 1) % len(memory)]] for i in range(len(memory))]
        for l, slot in zip(memory, moved):
            slots[l] = slot
    held = len(slots[memory[0]].mem) + len(slots[memory[0]].cmem) if memory else 0
    x = p["in_emb.weight"][ids]
    if cfg.E != D:
        x = linear(x, p["in_proj.weight"], p["in_proj.bias"])
    seen = {}
    for l in range(cfg.layers):
        a, f = f"layers.{l}.attn.", f"layers.{l}.ff."
        inp = x if cfg.norm_after else norm(p, a, x)
        kv_weight = p[a + "kv.weight"].detach() if l in frozen else p[a + "kv.weight"]
        y, q, k, v, prob = attention(cfg, p, l, inp, slots.get(l), mask, call, table_rows, held,
                                     kv_weight)
        x = gate(cfg, lambda name: p[a + "gate." + name], y, x)
        if cfg.norm_after:
            x = norm(p, a, x)
        y = feed_forward(cfg, p, l, x if cfg.norm_after else norm(p, f, x))
        x = gate(cfg, lambda name: p[f + "gate." + name], y, x)
        if cfg.norm_after:
            x = norm(p, f, x)
        if l in memory:
            seen[l] = (x if cfg.recurrence == "ernie" else inp, q, k, v, prob)
    out = layer_norm(x, p["final_norm.weight"], p["final_norm.bias"]) if cfg.final_norm else x
    if cfg.E != D:
        out = linear(out, p["out_proj.weight"], p["out_proj.bias"])
    logits = linear(out, p["in_emb.weight"] if cfg.tied else p["out_emb.weight"], p["out_emb.bias"])
    losses = OrderedDict((l, no_loss()) for l in memory)
    if T == S:
        for l in memory:
            losses[l] = update(cfg, p, l, slots[l], mask, call, training, *seen[l])
    return logits, losses


def update(cfg, p, l, slot, mask, call, training, pushed, q, k, v, prob):
    """Pushes a full segment into memory and compresses what is evicted. Returns the
    layer's auxiliary loss."""
    S, M, C = cfg.segment, cfg.capacity(l), cfg.compressed_capacity(l)
    n, c, real = len(slot.mem), len(slot.cmem), sum(mask)
    for i, row in enumerate(slot.mem):
        row.used = row.used + sum(prob[:, a, c + i].detach().mean() for a in range(S) if mask[a])
        row.seen += real
    pushed = pushed.detach()
    keep = [True] * S if cfg.literal_mask else mask
    buffer = slot.mem + [Row(pushed[t] if keep[t] else torch.zeros_like(pushed[t]), keep[t])
                         for t in range(S)]
    e = max(0, n + S - M)
    old, slot.mem = buffer[:e], buffer[e:]
    if not e or not C:
        return no_loss()
    comp = compress(cfg, p, l, old)
    live = cfg.aux == "bptt" and training
    new = [Row(value if live else value.detach(), ok, call if live else None) for value, ok in comp]
    if not cfg.literal_mask:
        assert all(row.ok or not bool(row.value.any()) for row in new)
    slot.cmem = (slot.cmem + new)[-C:]
    if not training or cfg.aux in ("none", "bptt"):
        return no_loss()
    if cfg.aux == "autoencode":
        return autoencode_loss(cfg, p, l, old, [value for value, _ in comp])
    # rows that come straight from the segment were not projected as memory yet
    if cfg.recurrence == "ernie" and e > n:
        src = pushed
        if not cfg.norm_after:
            src = layer_norm(src, p[f"layers.{l}.attn.norm.weight"],
                             p[f"layers.{l}.attn.norm.bias"])
        kv = linear(src, p[f"layers.{l}.attn.kv.weight"])
        half = cfg.K * cfg.hd
        k = torch.cat([k[:c + n], kv[:, :half].reshape(S, cfg.K, cfg.hd)])
        v = torch.cat([v[:c + n], kv[:, half:].reshape(S, cfg.K, cfg.hd)])
    count = n if cfg.literal_target else e
    target = [c + i for i in range(count) if buffer[i].ok]
    queries = [a for a in range(S) if mask[a] or cfg.literal_mask]
    return attention_loss(cfg, p, l, q, [k[i] for i in target], [v[i] for i in target],
                          [value for value, ok in comp if ok], queries)


# -------------------------------------------------- the batch, segment after segment

class Model:
    """A batch of streams. p: parameters; mem, cmem: capacities in evaluation, if they
    differ from the configuration's."""

    def __init__(self, cfg, p, B, mem=None, cmem=None):
        self.table_rows = cfg.table_rows
        if mem is not None:
            cfg = replace(cfg, mem=mem, cmem=cmem, mems="", cmems="")
        self.cfg, self.p, self.B, self.call = cfg, p, B, 0
        self.streams = [self.fresh() for _ in range(B)]
        self.n = {l: 0 for l in cfg.memory}     # of the batch, as if no row had been reset
        self.c = {l: 0 for l in cfg.memory}
        self.frozen = set()

    def fresh(self):
        return {l: Slot() for l in self.cfg.memory}

    def segment(self, ids, mask=None, reset=None, training=True):
        """ids (B,T) -> logits (B,T,V), aux_layer (A), ratio_layer (A), aux."""
        cfg = self.cfg
        T = ids.shape[1]
        if cfg.literal_mask or cfg.literal_rows or cfg.literal_pad:
            assert reset is None
        if cfg.literal_freeze and T == cfg.segment and training:
            self.frozen |= {l for l in cfg.memory if self.n[l] + T > cfg.capacity(l)
                            and cfg.compressed_capacity(l) and cfg.aux == "attention"}
        logits, losses = [], []
        for b in range(self.B):
            if reset is not None and int(reset[b]):
                self.streams[b] = self.fresh()
            row_mask = [bool(m) for m in mask[b]] if mask is not None else [True] * T
            y, loss = forward_row(cfg, self.p, ids[b].tolist(), row_mask, self.streams[b],
                                  self.call, training, self.table_rows, self.frozen)
            logits.append(y)
            losses.append(loss)
        self.call += 1
        if T == cfg.segment:
            for l in cfg.memory:
                e = max(0, self.n[l] + T - cfg.capacity(l))
                self.n[l] = min(self.n[l] + T, cfg.capacity(l))
                if e and cfg.compressed_capacity(l):
                    self.c[l] = min(self.c[l] + groups(cfg, e), cfg.compressed_capacity(l))
        logits = torch.stack(logits)
        zero = torch.zeros((), dtype=logits.dtype)
        aux_layer, ratio_layer = [], []
        for l in cfg.memory:
            error = sum(row[l][0] for row in losses) + zero
            size = sum(row[l][2] for row in losses) + zero
            count = sum(row[l][1] for row in losses)
            aux_layer.append(error / count if count else zero)
            ratio_layer.append((error / size).detach() if count else zero)
        with_compression = sum(1 for l in cfg.memory if cfg.compressed_capacity(l))
        aux = cfg.aux_weight / with_compression * sum(aux_layer) if with_compression else zero
        none = torch.zeros(0, dtype=logits.dtype)
        aux_layer = torch.stack(aux_layer) if aux_layer else none
        ratio_layer = torch.stack(ratio_layer) if ratio_layer else none
        return logits, aux_layer, ratio_layer, aux

    def memories(self, l):
        """mem (B,n,D), mem_pad (B,n), cmem (B,c,D), cmem_pad (B,c). A shorter memory is
        aligned to the newest end."""
        out = []
        for size, rows in ((self.n[l], [s[l].mem for s in self.streams]),
                           (self.c[l], [s[l].cmem for s in self.streams])):
            value = torch.zeros(self.B, size, self.cfg.dim, dtype=self.p["in_emb.weight"].dtype)
            pad = torch.ones(self.B, size, dtype=torch.int32)
            for b, own in enumerate(rows):
                assert len(own) <= size
                for i, row in enumerate(own):
                    value[b, size - len(own) + i] = row.value.detach()
                    pad[b, size - len(own) + i] = 0 if row.ok else 1
            out += [value, pad]
        return out


def nll(logits, targets):
    """Mean nats over the targets that are not negative; 0 if there are none."""
    flat, want = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    counted = want >= 0
    if not bool(counted.any()):
        return flat.sum() * 0
    return F.cross_entropy(flat[counted], want[counted])


def run_model(inputs, meta):
    """Results of a golden file from its inputs param.*, ids.<s>, targets.<s>, mask.<s>,
    reset.<s>."""
    cfg = config_from(meta)
    training = not int(meta.get("eval", "0"))
    p = parameters_in(inputs)
    assert set(p) == set(parameter_shapes(cfg))
    if training:
        p = leaves(p)
    other = (int(meta["eval_mem"]), int(meta["eval_cmem"])) if not training else (None, None)
    model = Model(cfg, p, int(meta["B"]), *other)
    r, total = OrderedDict(), 0.0
    for s, T in enumerate(integers(meta["lengths"])):
        ids = inputs[f"ids.{s}"]
        assert ids.shape[1] == T
        mask, reset = inputs.get(f"mask.{s}"), inputs.get(f"reset.{s}")
        logits, aux_layer, ratio_layer, aux = model.segment(ids, mask, reset, training)
        loss = nll(logits, inputs[f"targets.{s}"])
        total = total + loss + aux
        r[f"logits.{s}"] = logits.detach()
        r[f"nll.{s}"] = loss.detach().reshape(1)
        if training:
            r[f"aux.{s}"] = aux.detach().reshape(1)
            if cfg.memory:
                r[f"aux_layer.{s}"] = aux_layer.detach()
                r[f"ratio_layer.{s}"] = ratio_layer.detach()
    for l in cfg.memory:
        mem, mem_pad, cmem, cmem_pad = model.memories(l)
        for name, value, pad in ((f"mem.{l}", mem, mem_pad), (f"cmem.{l}", cmem, cmem_pad)):
            if value.shape[1]:
                r[name] = value
                if bool(pad.any()):
                    r[name.replace("mem", "mem_pad")] = pad
    if training:
        total.backward()
        for n in parameter_shapes(cfg):
            if p[n].grad is not None:
                r["grad." + n] = p[n].grad
    return r


# -------------------------------------------------- the published numbers

NUMBERS = os.path.join(HERE, "compressive_numbers.txt")
LITERAL = dict(vocab=11, dim=8, heads=2, segment=4, layers=2, mem=4, cmem=2, ratio=2, gate="gru",
               recurrence="rotate", literal_rows=1, literal_pad=1, literal_target=1, literal_mask=1)
CASES = OrderedDict(
    A=(dict(), "4,4,4,4"),
    B=(dict(recurrence="none", gate="residual"), "4,4,4,4"),
    C=(dict(mem=6, ratio=3, cmem=3, layers=3, memory_layers="1,3", emb=6, glu=1, aux_weight=0.5),
       "4,4,4,4,3"),
    D=(dict(mogrify=1, layers=1), "4,4,4"),
    E=(dict(mem=10, cmem=5, layers=3, gate="residual"), "4,4,4,4,4,4"))


def hashed(k, i):
    u = (i * 2654435761 + k * 40503 + 12345) & 0xffffffff
    for _ in range(2):
        u = ((u ^ (u >> 16)) * 73244475) & 0xffffffff
    return u ^ (u >> 16)


def published_name(name):
    """The name of a parameter in the published numbers."""
    fixed = {"in_emb": "token_emb", "in_proj": "to_model_dim", "out_proj": "to_logits.0",
             "out_emb": "to_logits.1"}
    part = name.split(".")
    if name == "key_pe":
        return "pos_emb"
    if part[0] in fixed:
        return fixed[part[0]] + "." + part[1]
    i, rest = part[1], ".".join(part[2:])
    if rest.startswith("compress."):
        return f"attn_layers.{i}.fn.fn.compress_mem_fn.conv.{part[3]}"
    side, inner = f"{part[2]}_layers.{i}.", ".".join(part[3:])
    if inner.startswith("norm."):
        return side + "fn." + inner
    if inner.startswith("gate.mogrify."):
        return side + f"mogrify.{part[5][0].upper()}.{part[5][1]}.weight"
    if inner.startswith("gate."):
        return side + "gru." + part[4]
    return side + "fn.fn." + {"query": "to_q", "kv": "to_kv", "out": "to_out", "fc1": "w1",
                              "fc2": "w2"}[part[3]] + "." + part[4]


def published_tokens(B, count):
    return torch.tensor([[(7 * b + 3 * n + n * n % 5) % 11 for n in range(count)]
                         for b in range(B)], dtype=torch.int32)


def published_case(letter):
    """Inputs and metadata of a published case, as stored in comp_<letter>.safetensors."""
    options, text = CASES[letter]
    cfg = Config(**dict(LITERAL, **options)).checked()
    shapes = parameter_shapes(cfg)
    keys = {published_name(n) for n in shapes}
    # the numbering includes the compressions of layers without memory
    for i in range(cfg.layers):
        keys |= {f"attn_layers.{i}.fn.fn.compress_mem_fn.conv.{w}" for w in ("weight", "bias")}
    order = {key: k for k, key in enumerate(sorted(keys))}
    t = OrderedDict()
    for name, shape in shapes.items():
        key = published_name(name)
        values = [hashed(order[key], i) / 4294967296 - 0.5
                  + (1 if key.endswith("norm.weight") else 0) for i in range(math.prod(shape))]
        t["param." + name] = torch.tensor(values, dtype=F64).reshape(shape)
    lengths, at = integers(text), 0
    tokens = published_tokens(2, sum(lengths) + 1)
    for s, T in enumerate(lengths):
        t[f"ids.{s}"], t[f"targets.{s}"] = tokens[:, at:at + T], tokens[:, at + 1:at + T + 1]
        if letter == "B":
            t[f"mask.{s}"] = torch.tensor([[int((5 * b + 3 * n + s) % 4 != 1) for n in range(T)]
                                           for b in range(2)], dtype=torch.int32)
        at += T
    meta = cfg.metadata()
    meta.update(B=2, segments=len(lengths), lengths=text, eval=0)
    return t, meta


def greedy(letter, prompt, count, rotate_always):
    """The published decodings. rotate_always: calls that do not fill a segment also keep
    the rotation."""
    t, meta = published_case(letter)
    cfg = config_from(meta)
    model = Model(cfg, parameters_in(t), 1)
    tokens = published_tokens(1, prompt)[0].tolist()
    done, out = 0, []
    gap = math.inf
    with torch.no_grad():
        while len(out) < count:
            now = tokens[done:done + cfg.segment]
            before = dict(model.streams[0])
            y = model.segment(torch.tensor([now]), training=False)[0]
            if len(now) < cfg.segment and not rotate_always:
                # such a call reads the rotated memory, but does not keep the rotation
                model.streams[0] = before
            if len(now) == cfg.segment:
                done += cfg.segment
            if done + (len(now) if len(now) < cfg.segment else 0) < len(tokens):
                continue                    # the prompt is not consumed yet
            best = torch.topk(y[0, -1], 2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            out.append(int(best.indices[0]))
            tokens.append(out[-1])
    return out, gap


def weighted(t):
    flat = t.reshape(-1).to(F64)
    return float((flat * torch.cos(0.31 * torch.arange(flat.numel(), dtype=F64) + 0.1)).sum())


def square(t):
    return float((t.to(F64) ** 2).sum())


def check_published(report):
    with open(NUMBERS, encoding="ascii") as f:
        lines = f.read().splitlines()
    case, got, frozen, seen = None, None, None, set()
    for line in lines:
        word = line.split()
        if word[0] == "CASE":
            case = word[1].rstrip(":")
            inputs, meta = published_case(case)
            got = run_model(inputs, meta)
            frozen = run_model(inputs, OrderedDict(meta, literal_freeze="1"))
            own = {published_name(n): "grad." + n for n in parameter_shapes(config_from(meta))}
            memory = config_from(meta).memory
        elif word[0] == "seg":
            s = word[1].rstrip(":")
            report.digits(f"{case} {s} CE", float(got["nll." + s]), word[3])
            report.digits(f"{case} {s} aux", float(got["aux." + s]), word[5])
            report.digits(f"{case} {s} W(logits)", weighted(got["logits." + s]), word[7])
        elif word[0] == "final":
            for name, at in (("mem", 3), ("cmem", 8)):
                stacked = torch.stack([got[f"{name}.{l}"] for l in memory])
                report.digits(f"{case} {name} S2", square(stacked), word[at])
                report.digits(f"{case} {name} W", weighted(stacked), word[at + 2].rstrip(";"))
        elif word[0] in ("grad", "frozen"):
            key = word[1].rstrip(":")
            results = got if word[0] == "grad" else frozen
            if word[2] == "none":
                report.expect(own.get(key) not in results, f"{case} {key} has a gradient")
            else:
                report.digits(f"{case} {word[0]} {key} S2", square(results[own[key]]), word[2])
                report.digits(f"{case} {word[0]} {key} W", weighted(results[own[key]]), word[3])
            if word[0] == "grad":
                seen.add((case, key))
        elif word[0] == "DECODE":
            case, prompt = word[1].rstrip(","), int(word[2].rstrip(":")[2:])
            at = word.index("fixed")
            for kind, text in (("literal", word[4:at]), ("fixed", word[at + 1:])):
                out, gap = greedy(case, prompt, 16, kind == "literal")
                report.expect([str(v) for v in out] == text, f"{case} {prompt} {kind}: {out}")
                report.expect(gap > 0.003, f"{case} {prompt} {kind}: gap {gap}")
    for case in CASES:
        inputs, meta = published_case(case)
        missing = {published_name(n) for n in parameter_shapes(config_from(meta))}
        missing -= {key for c, key in seen if c == case}
        report.expect(not missing, f"{case}: no published gradient of {missing}")


def check_hash(report):
    report.expect(hashed(0, 0) == 1747545881 and hashed(0, 1) == 1963196093
                  and hashed(3, 5) == 946756691, "hash")


# -------------------------------------------------- properties

def random_parameters(cfg, seed, scale=0.5):
    gen = seeded(seed)
    return OrderedDict((n, scale * randn(gen, *shape) + (1 if n.endswith("norm.weight") else 0))
                       for n, shape in parameter_shapes(cfg).items())


def random_tokens(cfg, B, count, seed):
    return torch.randint(0, cfg.vocab, (B, count), generator=seeded(seed)).to(torch.int32)


VARIETY = [     # configurations for the general properties
    dict(ratio=2, cmem=3),
    dict(ratio=3, mem=6, cmem=4, positions="xl", gate="gtrxl", norm_after=1, kv_heads=1),
    dict(ratio=3, mem=2, cmem=4, overlap=1, recurrence="ernie", gate="gru", mogrify=1),
    dict(ratio=2, mem=0, cmem=5, compress="dilated", dilations="1,2", emb=6, final_norm=1),
    dict(ratio=3, mem=7, cmem=4, compress="used", aux="none", glu=1, tied=1),
    dict(ratio=2, layers=3, memory_layers="1,3", mems="5,0,2", cmems="2,0,4", compress="mean",
         aux="none", recurrence="ernie", norm_after=1),
    dict(ratio=2, cmem=3, recurrence="rotate", compress="max", aux="none")]


def near(a, b, tolerance=1e-12):
    return a.shape == b.shape and (not a.numel() or float((a - b).abs().max()) <= tolerance)


def run_plain(cfg, p, tokens, masks=None, resets=None, training=False, **other):
    """Logits of tokens (B,N), in segments of S and a shorter last one, and the model
    afterwards."""
    model, out = Model(cfg, p, tokens.shape[0], **other), []
    for s, at in enumerate(range(0, tokens.shape[1], cfg.segment)):
        ids = tokens[:, at:at + cfg.segment]
        out.append(model.segment(ids, masks[:, at:at + cfg.segment] if masks is not None else None,
                                 resets.get(s) if resets else None, training)[0])
    return torch.cat(out, 1), model


def check_streams(report):
    for i, options in enumerate(VARIETY):
        cfg = Config(**options).checked()
        p = random_parameters(cfg, i)
        S, N = cfg.segment, 6 * cfg.segment + 2
        tokens = random_tokens(cfg, 3, N, 100 + i)
        mask = (torch.rand(3, N, generator=seeded(i)) > 0.2).to(torch.int32)
        with torch.no_grad():
            full, model = run_plain(cfg, p, tokens, mask)
            # a growing last segment gives the logits of the whole segment and keeps the
            # memory
            if cfg.recurrence != "rotate":
                steps = Model(cfg, p, 3)
                for at in range(0, N, S):
                    for T in range(1, min(S, N - at) + 1):
                        y = steps.segment(tokens[:, at:at + T], mask[:, at:at + T], None, False)[0]
                        report.expect(near(y[:, -1], full[:, at + T - 1]),
                                      f"variety {i}: step {at} {T}")
            # rows of the batch are independent
            for b in range(3):
                alone = run_plain(cfg, p, tokens[b:b + 1], mask[b:b + 1])[0]
                report.expect(near(alone[0], full[b]), f"variety {i}: row {b} alone")
            # a reset row is a new stream, aligned to the newest end; the other rows do
            # not change
            again, model = run_plain(cfg, p, tokens, mask, {3: torch.tensor([0, 1, 0])})
            fresh, young = run_plain(cfg, p, tokens[1:2, 3 * S:], mask[1:2, 3 * S:])
            report.expect(near(again[1, 3 * S:], fresh[0]), f"variety {i}: reset row")
            report.expect(near(again[0], full[0]) and near(again[2], full[2]),
                          f"variety {i}: rows next to a reset")
            for l in cfg.memory:
                for kind in (0, 2):
                    value, pad = model.memories(l)[kind:kind + 2]
                    own = young.memories(l)[kind]
                    k = own.shape[1]
                    report.expect(near(value[1:2, value.shape[1] - k:], own),
                                  f"variety {i}: memory of a reset row")
                    report.expect(bool((pad[1, :value.shape[1] - k] == 1).all()),
                                  f"variety {i}: memory before a reset")
            # causality, and padding is invisible
            other = tokens.clone()
            at = 2 * S + 1
            other[:, at] = (other[:, at] + 1) % cfg.vocab
            changed = run_plain(cfg, p, other, mask)[0]
            report.expect(near(changed[:, :at], full[:, :at]), f"variety {i}: causality")
            for b in range(3):
                after = near(changed[b, at + 1:], full[b, at + 1:])
                report.expect(after == (int(mask[b, at]) == 0),
                              f"variety {i}: row {b}, token {at}, mask {int(mask[b, at])}")


@torch.no_grad()
def check_equivalences(report):
    """Different configurations that compute the same."""
    base = Config(layers=2, positions="xl", segment=4, mem=5, cmem=0, ratio=1)
    p = random_parameters(base, 50)
    tokens = random_tokens(base, 2, 22, 51)
    mask = (torch.rand(2, 22, generator=seeded(52)) > 0.2).to(torch.int32)
    eye = torch.eye(8, dtype=F64)[:, :, None]
    # memory of 9 rows = memory of 5 and 4 compressed at ratio 1 by the identity
    want = run_plain(replace(base, mem=9), p, tokens, mask)[0]
    for compress_kind in ("conv", "max", "mean", "used"):
        conv = compress_kind == "conv"
        cfg = replace(base, cmem=4, compress=compress_kind, conv_no_bias=int(conv),
                      aux="attention" if conv else "none").checked()
        q = OrderedDict(p)
        for l in range(2):
            q[f"layers.{l}.compress.weight"] = eye
        got, model = run_plain(cfg, q, tokens, mask, training=True)
        report.expect(near(got, want), f"ratio 1 by {compress_kind}")
        if conv:
            aux = model.segment(tokens[:, :4])[1:]
            report.expect(float(aux[0].abs().max()) < 1e-25, "attention loss of the identity")
            coded = replace(cfg, aux="autoencode")
            for l in range(2):
                q[f"layers.{l}.compress.decoder.weight"] = eye
            aux = run_plain(coded, q, tokens, mask, training=True)[1].segment(tokens[:, :4])[1]
            report.expect(float(aux.abs().max()) == 0, "autoencoding loss of the identity")
    # segments with enough memory = one long segment
    long = run_plain(replace(base, segment=22), p, tokens, mask)[0]
    report.expect(near(run_plain(replace(base, mem=22), p, tokens, mask)[0], long),
                  "segments against one long one")
    # mean of 3 = convolution by a third of the identity, with or without two taps of
    # zeros for overlap
    mean = run_plain(replace(base, cmem=4, ratio=2, mem=6, compress="mean", aux="none"), p,
                     tokens)[0]
    for x in (0, 2):
        w = torch.cat([torch.zeros(8, 8, x, dtype=F64), eye / 2, eye / 2], 2)
        q = OrderedDict(p, **{f"layers.{l}.compress.weight": w for l in range(2)})
        got = run_plain(replace(base, cmem=4, ratio=2, mem=6, conv_no_bias=1, overlap=x), q,
                        tokens)[0]
        report.expect(near(got, mean), f"mean as a convolution, overlap {x}")
    # one key head = the same head twice
    one = replace(base, kv_heads=1, cmem=3, mem=4, ratio=2)
    q = random_parameters(one, 55)
    r = OrderedDict(q)
    for l in range(2):
        k, v = q[f"layers.{l}.attn.kv.weight"].chunk(2)
        r[f"layers.{l}.attn.kv.weight"] = torch.cat([k, k, v, v])
    report.expect(near(run_plain(one, q, tokens)[0],
                       run_plain(replace(one, kv_heads=0), r, tokens)[0]), "key heads")


@torch.no_grad()
def check_learned_positions(report):
    base = Config(layers=2, positions="learned", segment=4, mem=6, cmem=3, ratio=2)
    tokens = random_tokens(base, 2, 22, 51)
    mask = (torch.rand(2, 22, generator=seeded(52)) > 0.2).to(torch.int32)
    # a learned table filled with the projected sinusoids, u = v = 0
    q = random_parameters(base, 53)
    r = OrderedDict((k, v) for k, v in q.items() if k != "key_pe")
    rows, pos = base.table_rows, 0.5 * randn(seeded(54), 8, 8)
    for i in range(rows):
        q["key_pe"][:, i] = linear(sinusoid(rows - 1 - i, 8, F64), pos).reshape(2, 4)
    for l in range(2):
        r[f"layers.{l}.attn.pos.weight"] = pos
        r[f"layers.{l}.attn.u"] = r[f"layers.{l}.attn.v"] = torch.zeros(2, 4, dtype=F64)
    a = run_plain(base, q, tokens, mask)[0]
    b = run_plain(replace(base, positions="xl"), r, tokens, mask)[0]
    report.expect(near(a, b), "learned positions against sinusoids")
    # literal rows are shifted while memory fills, and equal once it is full
    full = run_plain(replace(base, literal_rows=1), q, tokens[:, :4])[0]
    shifted = OrderedDict(q, key_pe=torch.roll(q["key_pe"], rows - base.segment, 1))
    report.expect(near(full, run_plain(base, shifted, tokens[:, :4])[0]),
                  "literal rows, nothing held")
    literal = run_plain(replace(base, literal_rows=1), q, tokens[:, :20])[1]
    fixed = run_plain(base, q, tokens[:, :20])[1]
    report.expect(not near(literal.memories(1)[2], fixed.memories(1)[2]),
                  "literal rows change what is remembered")
    fixed.streams = literal.streams
    a, b = (m.segment(tokens[:, 20:], None, None, False)[0] for m in (literal, fixed))
    report.expect(near(a, b), "literal rows, all full")


def check_pieces(report):
    """Convolutions, gates and norms against PyTorch's."""
    gen = seeded(60)
    # strided convolution and its transpose against torch's
    for e, r, x in ((6, 3, 0), (7, 3, 0), (5, 2, 1), (4, 2, 3)):
        cfg = Config(ratio=r, overlap=x, aux="autoencode")
        p = random_parameters(cfg, 61)
        rows = [Row(randn(gen, 8), True) for _ in range(e)]
        G = groups(cfg, e)
        source = torch.cat([torch.zeros(x, 8, dtype=F64), torch.stack([row.value for row in rows]),
                            torch.zeros(G * r - e, 8, dtype=F64)])
        want = F.conv1d(source.T[None], p["layers.0.compress.weight"], p["layers.0.compress.bias"],
                        stride=r)[0].T
        comp = [value for value, _ in compress(cfg, p, 0, rows)]
        report.expect(near(torch.stack(comp), want), f"convolution {e} {r} {x}")
        rec = F.conv_transpose1d(want.T[None], p["layers.0.compress.decoder.weight"],
                                 stride=r)[0].T[x:x + e]
        error, count, size = autoencode_loss(cfg, p, 0, rows, comp)
        old = source[x:x + e]
        report.expect(near(error / count, F.mse_loss(rec, old)) and near(size, (old ** 2).sum()),
                      f"decoder {e} {r} {x}")
    # dilated convolutions
    cfg = Config(ratio=2, compress="dilated", dilations="1,3")
    p = random_parameters(cfg, 62)
    rows = [Row(randn(gen, 8), True) for _ in range(5)]
    z = torch.cat([torch.zeros(4, 8, dtype=F64), torch.stack([row.value for row in rows]),
                   torch.zeros(1, 8, dtype=F64)]).T[None]
    for j, rate in enumerate((1, 3)):
        z = torch.relu(F.conv1d(z, p[f"layers.0.compress.dilated.{j}.weight"], dilation=rate))
    want = F.conv1d(z, p["layers.0.compress.weight"], stride=2)[0].T
    report.expect(near(torch.stack([value for value, _ in compress(cfg, p, 0, rows)]), want),
                  "dilated")
    # torch's GRU cell and LayerNorm
    cfg = Config(gate="gru")
    p = random_parameters(cfg, 63)
    cell = torch.nn.GRUCell(8, 8).to(F64)
    with torch.no_grad():
        for name, w in cell.named_parameters():
            w.copy_(p["layers.0.attn.gate." + name])
        y, x = randn(gen, 5, 8), randn(gen, 5, 8)
        report.expect(near(gate(cfg, lambda n: p["layers.0.attn.gate." + n], y, x), cell(y, x)),
                      "GRU")
        g, b = randn(gen, 8), randn(gen, 8)
        report.expect(near(layer_norm(x, g, b), F.layer_norm(x, (8,), g, b))
                      and near(gelu(x), F.gelu(x)), "LayerNorm, GELU")


def check_gradients(report):
    """Which loss reaches which parameter, and through how many segments."""
    for options, reach in ((dict(), 0), (dict(aux="bptt"), 1), (dict(aux="bptt", bptt=2), 2),
                           (dict(aux="autoencode"), 0), (dict(recurrence="ernie"), 0),
                           (dict(compress="dilated", aux="bptt", recurrence="ernie"), 1)):
        cfg = Config(ratio=2, cmem=8, **options).checked()
        p = leaves(random_parameters(cfg, 70))
        tokens = random_tokens(cfg, 2, 28, 71)
        model, losses = Model(cfg, p, 2), []
        for s in range(7):
            logits, _, _, aux = model.segment(tokens[:, 4 * s:4 * s + 4])
            losses.append((nll(logits, tokens[:, 4 * s:4 * s + 4]), aux))
        for s, (language, aux) in enumerate(losses):
            grads = torch.autograd.grad(language, list(p.values()), allow_unused=True,
                                        retain_graph=True)
            touched = {n for n, g in zip(p, grads) if g is not None and bool(g.any())}
            report.expect(any("compress" in n for n in touched) == (reach > 0 and s > 1),
                          f"{options} language loss {s}")
            report.expect("layers.1.attn.kv.weight" in touched, f"{options} kv {s}")
            if cfg.aux != "bptt" and s > 0:
                grads = torch.autograd.grad(aux, list(p.values()), allow_unused=True,
                                            retain_graph=True)
                touched = {n for n, g in zip(p, grads) if g is not None and bool(g.any())}
                report.expect(touched == {n for n in p if "compress" in n},
                              f"{options} auxiliary loss {s}: {touched}")
        # separate weights per segment: which compressions does the language loss of
        # segment s reach?
        name, own = "layers.0.compress.weight", []
        model = Model(cfg, p, 2)
        for s in range(7):
            own.append(leaf(p[name]))
            model.p = OrderedDict(p, **{name: own[s]})
            logits = model.segment(tokens[:, 4 * s:4 * s + 4])[0]
            grads = torch.autograd.grad(nll(logits, tokens[:, 4 * s:4 * s + 4]), own,
                                        allow_unused=True, retain_graph=True)
            reached = {i for i, g in enumerate(grads) if g is not None and bool(g.any())}
            report.expect(reached == set(range(max(1, s - reach), s)),
                          f"{options} segment {s} reaches {reached}")
    # the gradient of the total against differences, for parameters that do not enter
    # constants
    cfg = Config(ratio=2, cmem=3, layers=1, positions="xl", gate="sigtanh", final_norm=1).checked()
    p = random_parameters(cfg, 72)
    tokens = random_tokens(cfg, 2, 17, 73)

    def total(q):
        model, value = Model(cfg, q, 2), 0.0
        for s in range(4):
            logits, _, _, aux = model.segment(tokens[:, 4 * s:4 * s + 4])
            value = value + nll(logits, tokens[:, 4 * s + 1:4 * s + 5]) + aux
        return value

    with_grad = leaves(p)
    total(with_grad).backward()
    free = [n for n in p if n.startswith(("layers.0.attn.out", "layers.0.attn.gate", "layers.0.ff",
                                          "layers.0.attn.pos", "layers.0.attn.u", "layers.0.attn.v",
                                          "out_emb", "final_norm"))]
    gen = seeded(74)
    for name in free:
        d = randn(gen, *p[name].shape)
        with torch.no_grad():
            numeric = slope(total, p, name, d, 1e-6)
        exact = float((with_grad[name].grad * d).sum())
        report.expect(abs(numeric - exact) < 1e-7 * max(1.0, abs(exact)), f"differences of {name}")


def main():
    if sys.argv[1:] != ["--check"]:
        print(__doc__)
        return 2
    report = Checker(verbose=False)
    for check in (check_hash, check_published, check_streams, check_equivalences,
                  check_learned_positions, check_pieces, check_gradients):
        before = report.passed + report.failed
        check(report)
        print(f"{check.__name__[6:]:18s} {report.passed + report.failed - before:4d} comparisons")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
