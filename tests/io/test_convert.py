#!/usr/bin/env python3
"""Tests of tools/convert.py against PyTorch re-implementations of the original models.

    python3 tests/io/test_convert.py BUILD      BUILD: directory of train_attn_span, train_sru, ..

A random model with the names and layouts of the original is saved as its program would
save it, and converted. The log-probability of each token of a text, in float64, is
compared with the trainer, which evaluates prefixes of the text whose sums differ by one
token. The conversion back must reproduce the original bit-exactly.
"""
import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.dont_write_bytecode = True
sys.path[:0] = [os.path.join(ROOT, "tools"), os.path.join(ROOT, "tests", "golden")]
import compressive_oracle  # noqa: E402
import convert  # noqa: E402
import par_oracle  # noqa: E402
import par_tensorflow  # noqa: E402

F64 = torch.float64
BUILD, WORK = "build", ""
LIMIT = float(os.environ["LIMIT"]) if "LIMIT" in os.environ else None     # as in tests/limit.sh
TOLERANCE = 1e-5
count = {"passed": 0, "failed": 0}


def check(ok, what):
    count["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED {what}")


def path(name):
    return os.path.join(WORK, name)


# ---- random models: name -> tensor in float32

class Maker:
    def __init__(self, seed):
        self.gen, self.sd = torch.Generator().manual_seed(seed), OrderedDict()

    def put(self, name, *shape, scale=None, shift=0.0):
        fan = shape[-1] if len(shape) > 1 else 4
        scale = 1.2 / math.sqrt(fan) if scale is None else scale
        self.sd[name] = torch.randn(*shape, generator=self.gen) * scale + shift
        return self.sd[name]

    def norm(self, name, n):
        self.put(name + ".weight", n, scale=0.3, shift=1.0)
        self.put(name + ".bias", n, scale=0.3)


def doubles(sd, prefix=""):
    return {k[len(prefix):]: v.to(F64) for k, v in sd.items()}


def layer_norm(x, p, name):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], p[name + ".weight"],
                                          p[name + ".bias"], 1e-5)


def ends_of(sizes):
    return [0] + list(np.cumsum(sizes))


def tail_columns(K, first, forward):
    """Columns of the clusters i = 1..K in the head: from the last one, or from the first
    one (Hugging Face)."""
    return [first + (i - 1 if forward else K - i) for i in range(1, K + 1)]


def adaptive_logp(h, heads, tails, forward=False):
    """Log-probabilities of an adaptive softmax. heads: logits (T, c_1 + K); tails: logits
    of each other cluster."""
    K = len(tails)
    first = heads.shape[-1] - K
    head = torch.log_softmax(heads, -1)
    cols = tail_columns(K, first, forward)
    return torch.cat([head[:, :first]] + [head[:, c:c + 1] + torch.log_softmax(t, -1)
                                          for c, t in zip(cols, tails)], -1)


# ---- adaptive span

def span_model(seed, L=80, d=12, H=3, f=20, nl=2, N=0, adapt=True, V=20, sizes=None, tied=False,
               divval=2, one=False, pre="module."):
    D, m = d // H, Maker(seed)
    m.put("key_pe", 1, D, L, scale=0.7)
    if sizes:
        for i, n in enumerate(sizes):
            w = d // divval ** i
            m.put(f"in_emb.emb_layers.{i}.weight", n, w, scale=0.3)
            m.put(f"in_emb.emb_projs.{i}", d, w)
        m.put("out_emb.cluster_proj.weight", len(sizes) - 1, d)
        m.put("out_emb.cluster_proj.bias", len(sizes) - 1)
        for i, n in enumerate(sizes):
            w = d // divval ** i
            for a, b, shape in ((f"out_emb.out_layers.{i}.weight", f"in_emb.emb_layers.{i}.weight",
                                 (n, w)),
                                (f"out_emb.out_projs.{i}", f"in_emb.emb_projs.{i}", (d, w))):
                if tied:
                    m.sd[a] = m.sd[b]
                else:
                    m.put(a, *shape, scale=0.5)
            m.put(f"out_emb.out_layers.{i}.bias", n)
    else:
        m.put("in_emb.weight", V, d, scale=1)
        m.put("out_emb.weight", V, d)
        m.put("out_emb.bias", V)
    for l in range(nl):
        p = f"layers.{l}."
        if adapt:
            z = torch.rand(1 if one else H, generator=m.gen) * 0.5
            names = ["adaptive_span"] + (["persistent_memory.adaptive_span"] if N else [])
            for name in names:
                mask = p + f"attn.attn.{name}._mask."
                m.sd[mask + "current_val"] = z if one else z.view(H, 1, 1)
                m.sd[mask + "mask_template"] = torch.linspace(1 - L, 0, steps=L)
        if N:
            m.put(p + "attn.attn.persistent_memory.key", H, D, N, scale=0.5)
            m.put(p + "attn.attn.persistent_memory.val", H, N, D, scale=0.5)
        for name in ("query", "out", "val", "key"):
            m.put(p + f"attn.proj_{name}.weight", d, d)
        m.norm(p + "norm1", d)
        if not N:
            m.put(p + "ff.fc1.weight", f, d)
            m.put(p + "ff.fc1.bias", f)
            m.put(p + "ff.fc2.weight", d, f)
            m.put(p + "ff.fc2.bias", d)
            m.norm(p + "norm2", d)
    return OrderedDict((pre + k, v) for k, v in m.sd.items())


def span_logp(sd, ids, pre="module.", R=32, renorm=True, zeros=True):
    """zeros: rows before the text are zero keys, as in the original; else they do not
    exist."""
    p, T = doubles(sd, pre), len(ids)
    _, D, L = p["key_pe"].shape
    E = p["key_pe"][0]
    adaptive = "in_emb.weight" not in p
    if adaptive:
        k = len([n for n in p if re.fullmatch(r"in_emb.emb_projs.\d+", n)])
        ends = ends_of([p[f"in_emb.emb_layers.{i}.weight"].shape[0] for i in range(k)])
        rows = []
        for x in ids:
            i = max(j for j in range(k) if ends[j] <= x)
            rows.append(p[f"in_emb.emb_projs.{i}"]
                        @ p[f"in_emb.emb_layers.{i}.weight"][x - ends[i]])
        h = torch.stack(rows) * math.sqrt(rows[0].numel())
    else:
        h = p["in_emb.weight"][ids]
    d = h.shape[1]
    H, l = d // D, 0
    while f"layers.{l}.norm1.weight" in p:
        q = f"layers.{l}."
        a = q + "attn.attn."
        z = p.get(a + "adaptive_span._mask.current_val")
        S = L
        if z is not None:
            z = z.reshape(-1).expand(H).clamp(0, 1)
            cur = min(max(math.ceil(float(z.max()) * L) + R, 0), L)
            S = L - min(L - 1, L - cur) // 64 * 64
        query, key, value = ((h @ p[q + f"attn.proj_{n}.weight"].t()).view(T, H, D)
                             for n in ("query", "key", "val"))
        ts = torch.arange(1, S + 1)
        mask = torch.ones(H, S, dtype=F64)
        if z is not None:
            mask = ((1 - ts + z[:, None] * L) / R + 1).clamp(0, 1)
        old = torch.zeros(S, H, D, dtype=F64)       # what precedes the text
        k0, v0 = torch.cat([old, key]), torch.cat([old, value])
        out = torch.zeros(T, H, D, dtype=F64)
        for i in range(T):
            at = S + i - ts
            logits = torch.einsum("hd,thd->ht", query[i],
                                  k0[at] + E[:, L - ts].t()[:, None]) / math.sqrt(D)
            if not zeros:
                logits[:, at < S] = -math.inf
            values, w = v0[at].transpose(0, 1), mask
            if a + "persistent_memory.key" in p:
                pk, pv = p[a + "persistent_memory.key"], p[a + "persistent_memory.val"]
                more = torch.einsum("hd,hdn->hn", query[i], math.sqrt(D) * pk) / math.sqrt(D)
                logits = torch.cat([logits, more], 1)
                values = torch.cat([values, math.sqrt(pv.shape[1]) * pv], 1)
                w = torch.cat([w, torch.ones(pv.shape[:2], dtype=F64)], 1)
            if not torch.isfinite(logits).any():
                continue                            # the first token, which sees no key
            w = torch.softmax(logits, 1) * w
            if z is not None and renorm:
                w = w / (w.sum(1, keepdim=True) + 1e-8)
            out[i] = torch.einsum("ht,htd->hd", w, values)
        h = layer_norm(h + out.reshape(T, d) @ p[q + "attn.proj_out.weight"].t(), p, q + "norm1")
        if q + "ff.fc1.weight" in p:
            u = torch.relu(h @ p[q + "ff.fc1.weight"].t() + p[q + "ff.fc1.bias"])
            h = layer_norm(h + u @ p[q + "ff.fc2.weight"].t() + p[q + "ff.fc2.bias"], p,
                           q + "norm2")
        l += 1
    if not adaptive:
        return torch.log_softmax(h @ p["out_emb.weight"].t() + p["out_emb.bias"], -1)
    logits = [(h @ p[f"out_emb.out_projs.{i}"]) @ p[f"out_emb.out_layers.{i}.weight"].t()
              + p[f"out_emb.out_layers.{i}.bias"] for i in range(k)]
    cluster = (h @ p["out_emb.out_projs.0"]) @ p["out_emb.cluster_proj.weight"].t() + p[
        "out_emb.cluster_proj.bias"]
    return adaptive_logp(h, torch.cat([logits[0], cluster], -1), logits[1:])


# ---- SRU

def sru_model(seed, layout, O=12, E=12, P=0, nl=3, V=20, attends=None, norm=None, first=False,
              scale=1.0, sizes=None, shared=True, divval=2, skip=True, ln=True, pre="rnn."):
    m = Maker(seed)
    if sizes:
        K = len(sizes) - 1
        for i, n in enumerate(sizes):
            w = O // divval ** i
            m.put(f"output_layer.out_layers.{i}.weight", n + (K if i == 0 else 0), w, scale=0.4)
            m.put(f"output_layer.out_layers.{i}.bias", n + (K if i == 0 else 0))
            m.put(f"output_layer.out_projs.{i}", O, w)
            if shared:
                m.sd[f"embedding_layer.emb_projs.{i}"] = m.sd[f"output_layer.out_projs.{i}"]
            else:
                m.put(f"embedding_layer.emb_projs.{i}", O, w)
    elif V:
        m.put("embedding_layer.weight", V, E, scale=1)
        m.put("output_layer.weight", V, O)
        m.put("output_layer.bias", V)
    if first:
        m.put(pre + "input_to_hidden.weight", O, E)
    for l in range(nl):
        a = f"{pre}rnn_lst.{l}."
        I = O if l or first or sizes else E
        k = 4 if I != O and skip else 3
        if layout == "2.6":
            if P and P < I:
                m.put(a + "weight_proj", I, P, scale=1 / math.sqrt(I))
            m.put(a + "weight", P if P and P < I else I, O * k, scale=1 / math.sqrt(I))
        elif layout == "3.0":
            if P and P < I:
                m.put(a + "transform_module.0.weight", P, I)
                m.put(a + "transform_module.1.weight", O * k, P)
            else:
                m.put(a + "transform_module.weight", O * k, I)
        else:
            t = a + "transform_module."
            m.put(t + "linear1.weight", P, I)
            if attends[l]:
                m.put(t + "alpha", 1, scale=0, shift=0.7)
                m.put(t + "linear2.weight", 2 * P, P)
                m.put(t + "linear3.weight", O * k, P)
            else:
                m.put(t + "linear2.weight", O * k, P)
            if ln:
                m.norm(t + "layer_norm", P)
        m.put(a + "weight_c", 2 * O, scale=0.8)
        m.put(a + "bias", 2 * O, scale=0.8)
        m.sd[a + "scale_x"] = torch.tensor([scale])
        if norm:
            m.norm(a + "layer_norm", I if norm == "before" else O)
    return m.sd


def sru_logp(sd, ids, heads=1, norm=None, window=0, tanh=False, skip=True, segment=0, pre="rnn."):
    """segment: memory, which is all that precedes a token's segment, does not pass the
    cell's LayerNorm."""
    p, T = doubles(sd), len(ids)
    O = p[pre + "rnn_lst.0.bias"].numel() // 2
    k = len([n for n in p if n.startswith("output_layer.out_projs.")])
    if k:
        sizes = [p[f"output_layer.out_layers.{i}.weight"].shape[0] for i in range(k)]
        sizes[0] -= k - 1
        ends = ends_of(sizes)
        rows = []
        for x in ids:
            i = max(j for j in range(k) if ends[j] <= x)
            rows.append(p[f"embedding_layer.emb_projs.{i}"]
                        @ p[f"output_layer.out_layers.{i}.weight"][x - ends[i]])
        x = torch.stack(rows)
    else:
        x = p["embedding_layer.weight"][ids]
    if pre + "input_to_hidden.weight" in p:
        x = x @ p[pre + "input_to_hidden.weight"].t()
    l = 0
    while f"{pre}rnn_lst.{l}.bias" in p:
        a = f"{pre}rnn_lst.{l}."
        t, raw = a + "transform_module.", x
        if norm == "before":
            x = layer_norm(x, p, a + "layer_norm")
        if a + "weight" in p:
            U = (x @ p[a + "weight_proj"] if a + "weight_proj" in p else x) @ p[a + "weight"]
        elif t + "weight" in p:
            U = x @ p[t + "weight"].t()
        elif t + "0.weight" in p:
            U = x @ p[t + "0.weight"].t() @ p[t + "1.weight"].t()
        else:
            z = x @ p[t + "linear1.weight"].t()
            if t + "alpha" in p:
                K, V = (z @ p[t + "linear2.weight"].t()).chunk(2, -1)
                past = raw @ p[t + "linear1.weight"].t() @ p[t + "linear2.weight"].t()
                Km, Vm = past.chunk(2, -1)
                e, o = z.shape[1] // heads, torch.zeros_like(z)
                for h in range(heads):
                    c = slice(h * e, (h + 1) * e)
                    for i in range(T):
                        low = max(0, i - window) if window else 0
                        own = i // segment * segment if segment else 0
                        keys = torch.cat([Km[low:own, c], K[max(low, own):i + 1, c]])
                        values = torch.cat([Vm[low:own, c], V[max(low, own):i + 1, c]])
                        o[i, c] = torch.softmax(keys @ z[i, c] / math.sqrt(e), 0) @ values
                z = p[t + "alpha"] * o + z
            if t + "layer_norm.weight" in p:
                z = layer_norm(z, p, t + "layer_norm")
            U = z @ p[t + ("linear3.weight" if t + "alpha" in p else "linear2.weight")].t()
        U = U.view(T, O, -1)
        (vf, vr), (bf, br) = p[a + "weight_c"].view(2, O), p[a + "bias"].view(2, O)
        c, out = torch.zeros(O, dtype=F64), []
        for i in range(T):
            f, r = torch.sigmoid(U[i, :, 1] + vf * c + bf), torch.sigmoid(U[i, :, 2] + vr * c + br)
            c = U[i, :, 0] + (c - U[i, :, 0]) * f
            xt = torch.zeros(O, dtype=F64)
            if skip:
                xt = U[i, :, 3] if U.shape[2] == 4 else p[a + "scale_x"] * raw[i]
            out.append(xt + ((torch.tanh(c) if tanh else c) - xt) * r)
        x = torch.stack(out)
        if norm == "after":
            x = layer_norm(x, p, a + "layer_norm")
        l += 1
    if not k:
        return torch.log_softmax(x @ p["output_layer.weight"].t() + p["output_layer.bias"], -1)
    logits = [(x @ p[f"output_layer.out_projs.{i}"]) @ p[f"output_layer.out_layers.{i}.weight"].t()
              + p[f"output_layer.out_layers.{i}.bias"] for i in range(k)]
    return adaptive_logp(x, logits[0], logits[1:])


# ---- compressive: the oracle of tests/golden has its names in ours and its layouts in
# the original's

def comp_model(seed, cfg, old="", pre="net."):
    m = Maker(seed)
    for name, shape in compressive_oracle.parameter_shapes(cfg).items():
        key = compressive_oracle.published_name(name)
        scale = None
        if len(shape) == 1 or name == "key_pe":
            scale = 0.3
        elif name == "out_emb.weight":
            # without a norm before the logits, small weights keep their rounding small
            scale = 0.05
        elif ".mogrify." in key:
            # with larger weights their rounding to float32 alone would change
            # log-probabilities by 1.6e-5
            scale = 0.6 / math.sqrt(shape[-1])
        m.put(key, *shape, scale=scale, shift=1.0 if key.endswith("norm.weight") else 0.0)
    for l in range(cfg.layers):
        conv = f"attn_layers.{l}.fn.fn.compress_mem_fn.conv."
        if conv + "weight" not in m.sd:
            m.put(conv + "weight", cfg.dim, cfg.dim, cfg.ratio)
            m.put(conv + "bias", cfg.dim)
    out = OrderedDict()
    for key, value in m.sd.items():
        if old and ".gru." in key:
            key += "_l0"
        if old == "0.3.13":
            key = key.replace("to_logits.1.", "to_logits.")
        out[pre + key] = value
    return out


def comp_logp(sd, cfg, ids, pre="net."):
    new = {re.sub(r"to_logits\.(weight|bias)", r"to_logits.1.\1", k.replace("_l0", "")): v
           for k, v in doubles(sd, pre).items()}
    p = {name: new[compressive_oracle.published_name(name)]
         for name in compressive_oracle.parameter_shapes(cfg)}
    model, out = compressive_oracle.Model(cfg, p, 1), []
    for at in range(0, len(ids), cfg.segment):
        out.append(model.segment(torch.tensor([ids[at:at + cfg.segment]]), training=False)[0][0])
    return torch.log_softmax(torch.cat(out), -1)


# ---- Transformer-XL

def xl_model(seed, d=12, H=2, dh=5, f=16, nl=2, V=20, sizes=None, divval=1, tied=None, hf=False,
             names="full", E=None, learned=0, not_tied=False):
    """E: d_embed, with div_val 1. learned: rows of attn_type 1's tables. not_tied: the
    output has separate tables."""
    m, n, pre, E = Maker(seed), H * dh, "transformer." if hf else "", E or d
    widths = [d // divval ** i for i in range(len(sizes))] if sizes else [E]
    tables = list(zip(sizes, widths)) if sizes and divval > 1 else [(sum(sizes) if sizes else V, E)]
    for i, (size, w) in enumerate(tables):
        table = m.put(f"{pre}word_emb.emb_layers.{i}.weight", size, w, scale=0.5)
        if not_tied:
            m.put(f"crit.out_layers.{i}.weight", size, w)
        elif names == "full":
            m.sd[f"crit.out_layers.{i}.weight"] = table
        m.put(f"crit.out_layers.{i}.bias", size)
        if divval > 1:
            proj = m.put(f"{pre}word_emb.emb_projs.{i}", d, w)
            if not tied[i]:
                m.put(f"crit.out_projs.{i}", d, w)
            elif names == "full":
                m.sd[f"crit.out_projs.{i}"] = proj
    if E != d:
        proj = m.put(f"{pre}word_emb.emb_projs.0", d, E)
        for i in range(len(sizes or [V])):
            if not tied[i]:
                m.put(f"crit.out_projs.{i}", d, E)
            elif names == "full":
                m.sd[f"crit.out_projs.{i}"] = proj
    if sizes:
        m.put("crit.cluster_weight", len(sizes) - 1, E)
        m.put("crit.cluster_bias", len(sizes) - 1)
    for l in range(nl):
        p = f"{pre}layers.{l}."
        m.put(p + "dec_attn.qkv_net.weight", 3 * n, d)
        m.put(p + "dec_attn.o_net.weight", d, n)
        if not learned:
            m.put(p + "dec_attn.r_net.weight", n, d)
        m.norm(p + "dec_attn.layer_norm", d)
        if hf:
            m.put(p + "dec_attn.r_w_bias", H, dh)
            m.put(p + "dec_attn.r_r_bias", H, dh)
        m.put(p + "pos_ff.CoreNet.0.weight", f, d)
        m.put(p + "pos_ff.CoreNet.0.bias", f)
        m.put(p + "pos_ff.CoreNet.3.weight", d, f)
        m.put(p + "pos_ff.CoreNet.3.bias", d)
        m.norm(p + "pos_ff.layer_norm", d)
    if learned:
        m.put("r_emb", nl, learned, H, dh)
        m.put("r_w_bias", nl, H, dh)
        m.put("r_bias", nl, learned, H)
        return m.sd
    if not hf:
        m.put("r_w_bias", H, dh)
        m.put("r_r_bias", H, dh)
    m.sd[pre + "pos_emb.inv_freq"] = 1 / (10000 ** (torch.arange(0.0, d, 2.0) / d))
    return m.sd


def xl_logp(sd, ids, block, mem, sizes=None, divval=1, hf=False, clamp=0, same=False, before=False):
    pre, T = "transformer." if hf else "", len(ids)
    p = doubles(sd)
    d = p[pre + "layers.0.dec_attn.o_net.weight"].shape[0]
    V = sum(sizes) if sizes else p[pre + "word_emb.emb_layers.0.weight"].shape[0]
    ends = ends_of(sizes or [V])
    k = len(ends) - 1

    def table(i, names=pre + "word_emb.emb_layers"):
        return p[f"{names}.{i}.weight"] if divval > 1 else p[f"{names}.0.weight"][
            ends[i]:ends[i + 1]]

    def bias(i):
        return p[f"crit.out_layers.{i}.bias"] if divval > 1 else p["crit.out_layers.0.bias"][
            ends[i]:ends[i + 1]]
    rows = []
    for x in ids:
        i = max(j for j in range(k) if ends[j] <= x)
        row = table(i)[x - ends[i]]
        proj = p.get(f"{pre}word_emb.emb_projs.{i if divval > 1 else 0}")
        rows.append(row if proj is None else proj @ row)
    h = torch.stack(rows) * math.sqrt(d)
    l, w = 0, torch.tensor([10000.0 ** (-2 * j / d) for j in range(d // 2)], dtype=F64)
    while f"{pre}layers.{l}.dec_attn.o_net.weight" in p:
        q = f"{pre}layers.{l}."
        if "r_emb" in p:
            u, v = p["r_w_bias"][l], None
        else:
            u, v = (p[q + f"dec_attn.r_{x}_bias"] if hf else p[f"r_{x}_bias"] for x in "wr")
        H, dh = u.shape
        n = H * dh
        seen = layer_norm(h, p, q + "dec_attn.layer_norm") if before else h
        Q, K, W = ((seen @ x.t()).view(T, H, dh) for x in p[q + "dec_attn.qkv_net.weight"].split(n))
        out = torch.zeros(T, H, dh, dtype=F64)
        for i in range(T):
            low = max(0, i // block * block - mem)      # the memory at the start of this block
            if same:
                low = max(low, i - mem + 1)
            for head in range(H):
                s = []
                for j in range(low, i + 1):
                    t = min(i - j, clamp) if clamp else i - j
                    # the last row is distance 0; with clamp the last `clamp` rows are
                    # left
                    if v is None:
                        far = (clamp or len(p["r_emb"][l])) - 1
                        at = len(p["r_emb"][l]) - 1 - min(i - j, far)
                        r, b = p["r_emb"][l, at, head], p["r_bias"][l, at, head]
                        s.append(((Q[i, head] + u[head]) @ K[j, head] + Q[i, head] @ r + b)
                                 / math.sqrt(dh))
                        continue
                    R = torch.cat([torch.sin(t * w), torch.cos(t * w)])
                    r = (p[q + "dec_attn.r_net.weight"] @ R).view(H, dh)[head]
                    s.append(((Q[i, head] + u[head]) @ K[j, head] + (Q[i, head] + v[head]) @ r)
                             / math.sqrt(dh))
                out[i, head] = torch.softmax(torch.stack(s), 0) @ W[low:i + 1, head]
        h = h + out.view(T, n) @ p[q + "dec_attn.o_net.weight"].t()
        if not before:
            h = layer_norm(h, p, q + "dec_attn.layer_norm")
        a = layer_norm(h, p, q + "pos_ff.layer_norm") if before else h
        a = torch.relu(a @ p[q + "pos_ff.CoreNet.0.weight"].t() + p[q + "pos_ff.CoreNet.0.bias"])
        h = h + a @ p[q + "pos_ff.CoreNet.3.weight"].t() + p[q + "pos_ff.CoreNet.3.bias"]
        if not before:
            h = layer_norm(h, p, q + "pos_ff.layer_norm")
        l += 1

    def narrow(i):
        proj = p.get(f"crit.out_projs.{i}",
                     p.get(f"{pre}word_emb.emb_projs.{i if divval > 1 else 0}"))
        return h if proj is None else h @ proj
    out = "crit.out_layers" if "crit.out_layers.0.weight" in p else pre + "word_emb.emb_layers"
    logits = [narrow(i) @ table(i, out).t() + bias(i) for i in range(k)]
    if not sizes:
        return torch.log_softmax(logits[0], -1)
    cluster = narrow(0) @ p["crit.cluster_weight"].t() + p["crit.cluster_bias"]
    return adaptive_logp(h, torch.cat([logits[0], cluster], -1), logits[1:], forward=hf)


# ---- the trainers

def letter(i):
    return chr(0x4E00 + i)


def program(*words):
    return subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=LIMIT, errors="replace")


def train(family, *words):
    return program(os.path.join(BUILD, "train_" + family), "--threads", "1", *words)


def evaluate(family, checkpoint, texts, more=()):
    """The losses of both texts, from the trainer's log."""
    data = path("data")
    os.makedirs(data, exist_ok=True)
    for name, text in zip(("train.txt", "valid.txt", "test.txt"), (texts[0], *texts)):
        with open(os.path.join(data, name), "w") as f:
            f.write(text)
    log = path("log.jsonl")
    if os.path.exists(log):
        os.unlink(log)
    done = train(family, "--checkpoint", checkpoint, "--eval-only", "--data", data, "--log",
                 log, *more)
    if done.returncode:
        raise RuntimeError(done.stderr)
    lines = [json.loads(line) for line in open(log)]
    return [x["loss"] for x in lines if x["event"] == "eval"]


def run_convert(*words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        convert.run([str(w) for w in words])
    return said.getvalue()


def vocabulary_file(V):
    with open(path("letters.txt"), "w") as f:
        f.write("".join(letter(i) + "\n" for i in range(V)))
    return path("letters.txt")


def texts_to(V, n, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (n,), generator=gen).tolist()


def same_file(a, b, what):
    bad = [k for k in set(a) | set(b) if k not in a or k not in b or a[k].shape != b[k].shape
           or a[k].dtype != b[k].dtype or a[k].numpy().tobytes() != b[k].numpy().tobytes()]
    check(not bad and list(b), f"{what}: not the same bits again in {sorted(bad)[:4]}")


def both_ways(what, family, sd, V, logp, options, block, saved=lambda sd: sd, inner=lambda x: x,
              n=26, expect=None):
    """Saves, converts, compares log-probabilities, converts back and compares bits."""
    theirs, ours, again = path("theirs.pt"), path("ours.safetensors"), path("again.pt")
    torch.save(saved(sd), theirs)
    if one_way(what, family, theirs, V, logp, options, block, n=n):
        run_convert(ours, again)
        got = inner(torch.load(again))
        same_file(expect(sd) if expect else sd, got, what)


def one_way(what, family, theirs, V, logp, options, block, more=(), n=26, whole=False):
    """Converts the file theirs to ours.safetensors and compares log-probabilities.

    They are those of tokens or, if those of a block depend on its length, of texts
    (whole). Token 0 is not in the text, because PAR ignores it in the loss.
    """
    ours = path("ours.safetensors")
    ids = [max(x, 1) for x in texts_to(V, n, 7)]
    try:
        run_convert(theirs, ours, "--tokens", "chars", "--vocab", vocabulary_file(V), "--block-sz",
                    block, *options)
        text = "".join(letter(i) for i in ids)
        sums = []
        # texts of m and m + 1 tokens, without a probability of the first token
        for m in range(block + 1, n, 2):
            sums += [loss * (k - 1)
                     for k, loss in zip((m, m + 1),
                                        evaluate(family, ours, (text[:m], text[:m + 1]), more))]
        def nll(ids):
            with torch.no_grad():
                lp = logp(ids[:-1])
            return [-float(lp[i, x]) for i, x in enumerate(ids[1:])]
        if whole:
            worst = max(abs(x - sum(nll(ids[:block + 1 + i]))) for i, x in enumerate(sums))
            check(worst < TOLERANCE, f"{what}: log-probabilities of a text differ by {worst:.3g}")
            print(f"{what}: log-probabilities of {len(sums)} texts within {worst:.1e}")
            return True
        expected = nll(ids)
        first = block - 1                       # predictions before the shortest text ends
        worst = abs(sums[0] - sum(expected[:first + 1])) / (first + 1)
        for i in range(1, len(sums)):
            worst = max(worst, abs(sums[i] - sums[i - 1] - expected[first + i]))
        check(worst < TOLERANCE, f"{what}: log-probabilities differ by {worst:.3g}")
        print(f"{what}: {len(sums)} log-probabilities within {worst:.1e}")
        return True
    except (convert.Refuse, RuntimeError, subprocess.TimeoutExpired) as e:
        check(False, f"{what}: {e}")
        return False


# ---- what is tested

def in_model(sd):
    return {"iter_no": 3, "model": sd, "logger": {"step": [1.0, 2.0]}, "scheduler_iter": 9}


def test_span():
    for what, seed, V, kw in (
            ("full span", 1, 20, dict(adapt=False, L=30)),
            ("adaptive span", 2, 20, dict(L=120)),
            ("persistent vectors", 3, 20, dict(L=120, N=5)),
            ("persistent vectors, full span", 4, 20, dict(adapt=False, L=20, N=3)),
            ("adaptive input, tied", 5, 60, dict(L=40, N=4, sizes=[20, 20, 20], tied=True)),
            ("adaptive input, untied", 6, 60, dict(L=40, adapt=False, sizes=[20, 25, 15]))):
        sd = span_model(seed, V=V, **kw)
        both_ways("attn-span, " + what, "attn_span", sd, V, lambda ids: span_logp(sd, ids), [], 8,
                  in_model, lambda x: x["model"])
    sd = span_model(7, L=40)
    both_ways("attn-span, no prefix, another ramp", "attn_span",
              OrderedDict((k[7:], v) for k, v in sd.items()), 20,
              lambda ids: span_logp(sd, ids, R=5), ["--ramp", "5"], 8, in_model,
              lambda x: x["model"])
    both_ways("attn-span, --corrected", "attn_span", sd, 20,
              lambda ids: span_logp(sd, ids, zeros=False), ["--corrected"], 8, in_model,
              lambda x: x["model"])
    for one in (False, True):
        sd = span_model(8, L=120, one=one, pre="decoder.model.")
        for zeros, options in ((True, []), (False, ["--corrected"])):
            def logp(ids):
                return span_logp(sd, ids, pre="decoder.model.", renorm=False, zeros=zeros)

            both_ways(f"fairseq-span, a span per {'layer' if one else 'head'} {' '.join(options)}",
                      "attn_span", sd, 20, logp, options, 8,
                      lambda sd: {"args": None, "model": sd}, lambda x: x["model"])


def test_sru():
    for layout in ("2.6", "3.0"):
        for what, kw, options, run in (
                ("plain", dict(), [], {}),
                ("projection, four products, scaled highway", dict(E=10, P=6, scale=1.5), [], {}),
                ("four products", dict(E=8), [], {}),
                ("input brought to width first", dict(E=8, first=True, scale=1.25), [], {}),
                ("layer norm before", dict(norm="before"), ["--norm", "before"],
                 dict(norm="before")),
                ("layer norm after, tanh, no highway", dict(norm="after"),
                 ["--norm", "after", "--tanh", "--no-skip"],
                 dict(norm="after", tanh=True, skip=False))):
            sd = sru_model(11, layout, **kw)
            both_ways(f"sru-{layout}, {what}", "sru", sd, 20, lambda ids: sru_logp(sd, ids, **run),
                      options, 8)
        sd = sru_model(12, layout, P=6, V=0, pre="")     # no words
        stack, again = path("stack.safetensors"), path("stack.pt")
        torch.save(sd, path("theirs.pt"))
        run_convert(path("theirs.pt"), stack)
        run_convert(stack, again, "--to", "sru-" + layout)
        same_file(sd, torch.load(again), f"sru-{layout}, a stack alone")
    for what, V, kw, options, run in (
            ("attention everywhere, 2 heads", 20, dict(attends=[1, 1, 1]), ["--heads", "2"],
             dict(heads=2)),
            ("attention in every second layer", 20, dict(attends=[0, 1, 0, 1], nl=4),
             ["--heads", "1"], {}),
            ("attention in the last layer, no norm", 20, dict(attends=[0, 0, 1], ln=False),
             ["--heads", "3"], dict(heads=3)),
            ("no attention", 20, dict(attends=[0, 0, 0]), [], {}),
            ("layer norm before, memory without", 20, dict(attends=[1, 1, 1], norm="before"),
             ["--heads", "1", "--norm", "before"], dict(norm="before", segment=8)),
            ("layer norm before, --corrected", 20, dict(attends=[1, 1, 1], norm="before"),
             ["--heads", "1", "--norm", "before", "--corrected"], dict(norm="before")),
            ("layer norm after", 20, dict(attends=[1, 1, 1], norm="after"),
             ["--heads", "1", "--norm", "after"], dict(norm="after")),
            ("adaptive, shared projections", 60, dict(attends=[1, 1, 1], sizes=[20, 20, 20]),
             ["--heads", "2"], dict(heads=2)),
            ("adaptive, separate projections", 60,
             dict(attends=[1, 1, 1], sizes=[20, 15, 25], shared=False), ["--heads", "2"],
             dict(heads=2))):
        sd = sru_model(13, "++", P=6, V=V, **kw)
        both_ways(f"sru++, {what}", "sru", sd, V, lambda ids: sru_logp(sd, ids, window=8, **run),
                  options, 8)


def test_compressive():
    literal = dict(recurrence="rotate", literal_rows=1, literal_pad=1, literal_target=1,
                   literal_mask=1)
    for what, old, kw, options in (
            ("GRU, memory in all layers", "", dict(gate="gru", layers=3, **literal),
             ["--mem", "8", "--memory-layers", "all"]),
            ("residual, GLU, another embedding", "",
             dict(emb=6, glu=1, layers=3, memory_layers="2,3", **literal),
             ["--mem", "8", "--memory-layers", "2,3"]),
            ("mogrifier, 0.3.18's names", "0.3.18", dict(gate="gru", mogrify=1, **literal),
             ["--mem", "8", "--memory-layers", "all"]),
            ("0.3.13's names, one head of keys, no enhanced recurrence", "0.3.13",
             dict(kv_heads=1, **dict(literal, recurrence="none")),
             ["--mem", "8", "--memory-layers", "all", "--no-enhanced-recurrence"]),
            ("a ratio that does not divide", "", dict(ratio=3, **literal),
             ["--mem", "8", "--memory-layers", "all"]),
            ("--corrected", "", dict(recurrence="rotate"),
             ["--mem", "8", "--memory-layers", "all", "--corrected"])):
        cfg = compressive_oracle.Config(**dict(dict(vocab=20, mem=8, cmem=2, segment=4, aux="none"),
                                               **kw)).checked()
        sd = comp_model(21, cfg, old)
        both_ways(f"compressive, {what}", "compressive", sd, 20,
                  lambda ids: comp_logp(sd, cfg, ids), options, 4, n=30)
    cfg = compressive_oracle.Config(vocab=20, mem=4, cmem=0, ratio=5, segment=4, aux="none",
                                    **literal)
    sd = comp_model(22, cfg)
    both_ways("compressive, no compressed memory", "compressive", sd, 20,
              lambda ids: comp_logp(sd, cfg, ids), ["--memory-layers", "all"], 4, n=30)


def test_xl():
    def with_output(sd):        # a tied tensor is in the file once or twice
        out, pre = OrderedDict(sd), "transformer."
        for k, v in sd.items():
            for a, b in (("emb_layers", "out_layers"), ("emb_projs", "out_projs")):
                m = re.fullmatch(pre + f"word_emb.{a}(.*)", k)
                if m:
                    out.setdefault(f"crit.{b}{m.group(1)}", v)
        return out
    narrow, wide = dict(sizes=[20, 15, 25], divval=2), dict(sizes=[20, 15, 25])
    one = dict(wide, E=7)
    for what, V, kw, run, options in (
            ("plain", 20, {}, {}, []),
            ("positions clamped, same length", 20, {}, dict(clamp=3, same=True),
             ["--clamp-len", "3", "--same-length"]),
            ("adaptive, one table", 60, dict(sizes=[20, 15, 25]), dict(sizes=[20, 15, 25]),
             ["--cutoffs", "20,35"]),
            ("adaptive, tied but the first", 60, dict(narrow, tied=[0, 1, 1]), narrow, []),
            ("adaptive, nothing tied", 60, dict(narrow, tied=[0, 0, 0]), narrow, []),
            ("adaptive, all tied", 60, dict(narrow, tied=[1, 1, 1]), narrow, []),
            ("pre_lnorm", 20, {}, dict(before=True), ["--norm", "before"]),
            ("attn_type 1", 20, dict(learned=14), {}, []),
            ("attn_type 1, clamped, adaptive", 60, dict(narrow, tied=[1, 1, 1], learned=14),
             dict(narrow, clamp=5), ["--clamp-len", "5"]),
            ("plain, not tied", 20, dict(not_tied=True), {}, []),
            ("adaptive, not tied", 60, dict(narrow, tied=[0, 1, 1], not_tied=True), narrow, []),
            ("plain, another width of the embedding", 20, dict(E=7, tied=[0]), {}, []),
            ("one projection, all tied", 60, dict(one, tied=[1, 1, 1]), wide,
             ["--cutoffs", "20,35"]),
            ("one projection, nothing tied", 60, dict(one, tied=[0, 0, 0], not_tied=True), wide,
             ["--cutoffs", "20,35"]),
            ("one projection, tied but the first, pre_lnorm, attn_type 1", 60,
             dict(one, nl=1, tied=[0, 1, 1], learned=14), dict(wide, before=True),
             ["--cutoffs", "20,35", "--norm", "before"])):
        sd = xl_model(31, V=V, **kw)
        both_ways(f"transformer-xl, {what}", "par", sd, V,
                  lambda ids: xl_logp(sd, ids, 6, 8, **run), ["--mem", "8"] + options, 6)
    for names in ("full", "once"):
        sd = xl_model(32, sizes=[20, 15, 25], divval=2, tied=[0, 1, 1], hf=True, names=names)
        both_ways(f"transfo-xl, names {names}", "par", sd, 60,
                  lambda ids: xl_logp(sd, ids, 6, 8, [20, 15, 25], 2, True), ["--mem", "8"], 6,
                  expect=with_output)


def test_xl_trained():
    """A trained model of one of the original's forms, converted and back; and models that
    the original cannot express."""
    ours = path("forms.safetensors")
    theirs = path("forms.pt")
    again = path("again.safetensors")
    text = path("text.txt")
    with open(text, "w") as f:
        f.write("".join(letter(i) for i in texts_to(20, 400, 3)))
    options = ("--pattern xl --nlayers 4 --hid-sz 8 --nheads 2 --inner-hid-sz 12 --block-sz 6 "
               "--mem 4 --norm-before --no-final-norm --positions learned-bias --own-uv "
               "--words-out adaptive --adaptive-in --tied --tie-projs but-first --cutoffs 5,12 "
               "--div-val 1 --emb-sz 6 --one-proj --steps 3 --batch-sz 1 --batch-split 1 --tokens "
               "chars").split()
    done = train("par", "--checkpoint", ours, "--data", text, *options)
    if done.returncode:
        raise RuntimeError(done.stderr)
    run_convert(ours, theirs)
    names = list(torch.load(theirs))
    check("r_bias" in names and "crit.out_projs.0" in names and "word_emb.emb_projs.1" not in names,
          f"names: {names}")
    run_convert(theirs, again, "--mem", "4", "--norm", "before", "--cutoffs", "5,12",
                "--vocab", ours)
    a, b = (convert.read_safetensors(x) for x in (ours, again))
    lost = [k for k in a[0] if not k.startswith(("optim.", "memory.", "state.", "grads"))]
    check(len(b[0]) == len(lost)
          and all(k in b[0] and a[0][k].tobytes() == b[0][k].tobytes() for k in lost),
          "Transformer-XL, trained here: another model after a way over the original's file")
    a, b = (json.loads(x[1]["config"]) for x in (a, b))
    wrong = [k for k in b if k in a and b[k] != a[k]
             and k in ("positions", "no-final-norm", "norm-before", "one-proj", "own-uv",
                       "block-sz", "mem", "tie-projs", "tied", "div-val", "emb-sz", "cutoffs",
                       "clamp-len")]
    check(not wrong, f"Transformer-XL, trained here: other options {wrong} after that way")
    tensors, meta = convert.read_safetensors(ours)
    meta.pop("seal")
    config, out = json.loads(meta["config"]), path("refused")
    for name, value, said in (("no-final-norm", False, "--norm-before without --no-final-norm"),
                              ("positions", "learned", "--positions learned"),
                              ("own-uv", False, "with --own-uv"),
                              ("one-proj", False, "without --one-proj"),
                              ("adaptive-in", False, "without --adaptive-in")):
        convert.write_safetensors(path("wrong.safetensors"), tensors,
                                  dict(meta, config=json.dumps(dict(config, **{name: value}))))
        refused(f"Transformer-XL, {name} {value}",
                [path("wrong.safetensors"), out, "--to", "transformer-xl"], said)
    refused("learned positions of Hugging Face", [ours, out, "--to", "transfo-xl"],
            "--to transformer-xl")


def test_files():
    """Half precision becomes float32; files of torch before 1.6, as some published ones;
    a module. prefix."""
    V, ours = ["--tokens", "chars", "--vocab", vocabulary_file(20)], path("ours.safetensors")
    sd = span_model(81, L=20)
    torch.save(in_model(sd), path("old.pt"), _use_new_zipfile_serialization=False)
    run_convert(path("old.pt"), ours, *V)
    run_convert(ours, path("again.pt"))
    same_file(sd, torch.load(path("again.pt"))["model"], "a file of old")
    for dtype in (torch.float16, torch.bfloat16):
        torch.save(OrderedDict((k, v.to(dtype)) for k, v in sd.items()), path("half.pt"))
        run_convert(path("half.pt"), ours, *V)
        run_convert(ours, path("again.pt"))
        same_file(OrderedDict((k, v.to(dtype).float()) for k, v in sd.items()),
                  torch.load(path("again.pt"))["model"], f"{dtype}")
    sd = OrderedDict(("module." + k, torch.nn.Parameter(v)) for k, v in xl_model(82).items())
    torch.save(sd, path("module.pt"))
    run_convert(path("module.pt"), ours, "--mem", "4", *V)
    run_convert(ours, path("again.pt"))
    same_file(OrderedDict((k, v.data) for k, v in sd.items()), torch.load(path("again.pt")),
              "parameters, with module.")
    sd = xl_model(83, hf=True)
    tensors = OrderedDict((k, v.numpy()) for k, v in sd.items())
    convert.write_safetensors(path("hf.safetensors"), tensors, {"format": "pt"})
    run_convert(path("hf.safetensors"), ours, "--mem", "4", *V)
    run_convert(ours, path("again.pt"))
    same_file(sd, torch.load(path("again.pt")), "safetensors of another program")


def test_hostile():
    """Tensors of other shapes, or missing ones: converted, or refused with a reason."""
    gen = np.random.RandomState(5)
    cfg = compressive_oracle.Config(vocab=20, mem=8, cmem=2, aux="none", gate="gru")
    models = [(span_model(91, N=2), []), (span_model(92, sizes=[9, 9]), []),
              (sru_model(93, "2.6", P=6, E=10), []), (sru_model(94, "3.0", P=6, E=10), []),
              (sru_model(95, "++", P=6, attends=[0, 1, 1], sizes=[9, 9]), ["--heads", "2"]),
              (comp_model(96, cfg), ["--block-sz", "4", "--mem", "8", "--memory-layers", "all"]),
              (xl_model(97, sizes=[9, 9], divval=2, tied=[0, 1]), ["--mem", "4"]),
              (xl_model(98, hf=True), ["--mem", "4"]),
              (xl_model(99, learned=10, not_tied=True), ["--mem", "4"]),
              (xl_model(100, sizes=[9, 9], E=7, tied=[0, 1]), ["--mem", "4", "--cutoffs", "9"])]
    bad = []
    for turn in range(120):
        sd, options = models[turn % len(models)]
        sd, names = OrderedDict(sd), list(sd)
        for name in gen.choice(names, gen.randint(1, 4), replace=False):
            shape, how = list(sd[name].shape), gen.randint(0, 5)
            if how == 0 or not shape:
                sd.pop(name, None)
                break
            if how == 1:
                shape[gen.randint(len(shape))] = int(gen.choice([0, 1, 2, 3, 7]))
            elif how == 2:
                shape = shape[1:]
            elif how == 3:
                shape.append(1)
            else:
                shape = shape[::-1]
            sd[name] = torch.zeros(shape)
        torch.save(sd, path("hostile.pt"))
        try:
            run_convert(path("hostile.pt"), path("hostile.safetensors"), "--vocab",
                        vocabulary_file(20), "--tokens", "chars", *options)
        except convert.Refuse as e:
            if "\n" in str(e) or "Error" in str(e):
                bad.append(f"{turn}: {e}")
        except Exception as e:
            bad.append(f"{turn}: {type(e).__name__}: {e}")
    check(not bad, f"other shapes: {len(bad)} failed in another way: {bad[:3]}")


# ---- PAR: a TensorFlow checkpoint, whose parameters are those of the oracle's reference,
# in its layout

class Bundle:
    """A TensorFlow checkpoint, read independently of tools/convert.py and fully checked.

    It checks checksums, order and places. blocks: (last key, place) of the index;
    entries: {key: (type, shape, offset, bytes)}; nodes: (children by name, keys of
    values) of the object graph.
    """

    def __init__(self, prefix):
        self.index, self.data = (open(prefix + part, "rb").read()
                                 for part in (".index", ".data-00000-of-00001"))
        self.entries, self.nodes = OrderedDict(), []
        footer = io.BytesIO(self.index[-48:])
        assert footer.seek(40) and footer.read() == bytes.fromhex("57fb808b247547db")
        footer.seek(0)
        self.meta, top = [[self.number(footer), self.number(footer)] for _ in range(2)]
        assert not list(self.block(*self.meta)) and sum(top) + 5 == len(self.index) - 48
        keys, ends, self.blocks = [], 0, list(self.block(*top))
        for last, handle in self.blocks:
            at = io.BytesIO(handle)
            begin, size = self.number(at), self.number(at)
            rows = list(self.block(begin, size))
            assert begin == ends and rows[-1][0] <= last and (not keys or keys[-1] < rows[0][0])
            keys, ends = keys + [k for k, _ in rows], begin + size + 5
            for key, value in rows:
                self.entry(key.decode(), value)
        assert keys == sorted(set(keys)) and keys[0] == b"" and ends == self.meta[0]
        places = sorted((at, len(b)) for _, _, at, b in self.entries.values())
        assert [at for at, _ in places] == [sum(n for _, n in places[:i])
                                            for i in range(len(places))]
        assert sum(n for _, n in places) == len(self.data)

    @staticmethod
    def number(f):
        n = k = 0
        while True:
            (byte,) = f.read(1)
            n += (byte % 128) << 7 * k
            k += 1
            if byte < 128:
                return n

    steps = []      # the remainder of each byte, by division bit by bit

    @classmethod
    def crc(cls, data):
        for c in range(256 if not cls.steps else 0):
            for _ in range(8):
                c = c // 2 ^ c % 2 * 0x82F63B78
            cls.steps.append(c)
        c = 2 ** 32 - 1
        for byte in data:
            c = c // 256 ^ cls.steps[c % 256 ^ byte]
        return c ^ 2 ** 32 - 1

    @classmethod
    def masked(cls, data):
        c = cls.crc(data)
        return ((c // 2 ** 15 + c % 2 ** 15 * 2 ** 17 + 0xa282ead8) % 2 ** 32).to_bytes(4, "little")

    def block(self, begin, size):
        """The rows of a block; each of its restarts is the place of a complete key."""
        body = self.index[begin:begin + size]
        kind = self.index[begin + size:begin + size + 1]
        crc = self.index[begin + size + 1:][:4]
        assert kind == b"\0" and self.masked(body + kind) == crc
        count = int.from_bytes(body[-4:], "little")
        restarts = [int.from_bytes(body[-4 * (i + 1):][:4], "little") for i in range(count, 0, -1)]
        assert restarts[0] == 0 and restarts == sorted(restarts)
        f, key, whole = io.BytesIO(body[:len(body) - 4 * (count + 1)]), b"", []
        while f.tell() < len(f.getvalue()):
            at = f.tell()
            shared, more, length = self.number(f), self.number(f), self.number(f)
            whole += [at] if not shared else []
            key = key[:shared] + f.read(more)
            yield key, f.read(length)
        assert set(restarts) <= set(whole or [0])

    def message(self, data):
        """{field: its values}."""
        f, out = io.BytesIO(data), {}
        while f.tell() < len(data):
            key = self.number(f)
            value = {0: lambda: self.number(f), 2: lambda: f.read(self.number(f)),
                     5: lambda: f.read(4)}[key % 8]()
            out.setdefault(key // 8, []).append(value)
        return out

    def entry(self, key, value):
        m = self.message(value)
        if not key:
            assert m == {1: [1], 3: [b"\x08\x01"]}
            return
        shape = tuple(self.message(dim).get(1, [0])[0] for dim in self.message(m[2][0]).get(2, []))
        kind, at = m[1][0], m.get(4, [0])[0]
        numbers = self.data[at:at + m[5][0]]
        crc = numbers
        if kind == 7:
            f = io.BytesIO(numbers)
            size = self.number(f).to_bytes(4, "little")
            check, graph = f.read(4), f.read()
            assert len(graph) == int.from_bytes(size, "little") and check == self.masked(size)
            crc = size + check + graph
            for node in self.message(graph)[1]:
                m1 = self.message(node)
                children = [self.message(c) for c in m1.get(1, [])]
                values = [self.message(v) for v in m1.get(2, [])]
                assert all(v[1] == [b"VARIABLE_VALUE"] for v in values)
                self.nodes.append(({c[2][0].decode(): c.get(1, [0])[0] for c in children},
                                   [v[3][0].decode() for v in values]))
        else:
            assert len(numbers) == {1: 4, 9: 8}[kind] * int(np.prod(shape))
        assert self.masked(crc) == m[6][0], key
        self.entries[key] = kind, shape, at, numbers

    def values(self, under=""):
        """{key: (type, shape, bytes)} of the values that object names lead to."""
        return {k: (kind, shape, b) for k, (kind, shape, _, b) in self.entries.items()
                if k.startswith(under) and kind != 7 and "OPTIMIZER" not in k}

    def find(self, path):
        """The keys of the object at the end of a path, from child to child."""
        at = 0
        for part in path.split("/"):
            at = self.nodes[at][0][part]
        return self.nodes[at][1]


def par_variables(cfg, seed, short):
    """The reference's parameters as TensorFlow variables (short: of versions with u and
    v), and under our names."""
    gen, theirs, o = torch.Generator().manual_seed(seed), {}, OrderedDict()
    layers = {"W_emb": "rmha/W_emb", "W_pos": "rmha/W_pos", "dense": "rmha/dense",
              "ffn1": "ffn/layer_with_weights-0", "ffn2": "ffn/layer_with_weights-1",
              "ln_mha": "layernorm_mha", "ln_ffn": "layernorm_ffn"}
    last = {"k": "kernel", "b": "bias"}
    empty = OrderedDict((n, torch.zeros(s)) for n, s in par_oracle.parameter_shapes(cfg).items())
    shapes = par_oracle.to_published(cfg, empty)
    if cfg.words_out == "plain":
        shapes.update({"out.k": empty["out_emb.weight"].T, "out.b": empty["out_emb.bias"]})
    for name, w in shapes.items():
        part = name.split(".")
        scale = 0.3 if w.dim() < 2 else 1.2 / math.sqrt(w.shape[0])
        w = torch.randn(w.shape, generator=gen) * scale
        if part[-1] == "g":
            w = w + 1
        if part[-1] == "pi":
            w = w + 0.3
        o[name] = w.to(F64)
        if name == "embed":
            key, w = "embed/embeddings", w
        elif name.startswith("head"):
            key = "final_layer/head_w/" + last[part[1]]
        elif name.startswith("tail"):
            inside = f"layer_with_weights-{'po'.index(part[1])}"
            key = f"final_layer/tail_w/{part[0][4:]}/{inside}/{last[part[2]]}"
        elif name.startswith("out"):
            key = "final_layer/" + last[part[1]]
        elif part[1] in layers:
            ends = {"g": "gamma", "b": "beta"} if part[1].startswith("ln") else last
            key = f"stoch_blks/{part[0]}/{layers[part[1]]}/{ends[part[2]]}"
        elif part[1] in "uv":
            long = {"u": "global_content_bias", "v": "global_position_bias"}
            key = f"stoch_blks/{part[0]}/rmha/" + (part[1] if short else long[part[1]])
            w = w.reshape(1, cfg.heads, 1, -1)
        else:
            key = f"stoch_blks/{part[0]}/{part[1]}"
        theirs["model/" + key] = w.numpy()
        theirs["model/" + key + "/.OPTIMIZER_SLOT/optimizer/m"] = w.numpy() * 0
    if not short:
        for l in range(cfg.blocks):
            theirs[f"model/stoch_blks/{l}/tau"] = np.float32(0.5 + l).reshape(())
    theirs["optimizer/iter"] = np.array(7)
    return theirs, par_oracle.from_published(cfg, o)


def test_par():
    for what, short, kw in (("adaptive", False, dict(cutoffs="5,12", proj_factor=2)),
                            ("plain", True, dict(words_out="plain", pad_id=-1))):
        cfg = par_oracle.Config(**dict(par_oracle.REF, vocab=20, dim=8, heads=2, inner=12, blocks=3,
                                       segment=6, mem=4, **kw)).checked()
        theirs, p = par_variables(cfg, 101, short)

        def logp(ids):
            model, out = par_oracle.Model(cfg, p, 1), []
            for at in range(0, len(ids), cfg.segment):
                hidden = model.segment(torch.tensor([ids[at:at + cfg.segment]]),
                                       par_oracle.gates(cfg, p, "soft"))
                out.append(par_oracle.log_probabilities(cfg, p, hidden[0]))
            return torch.cat(out)
        prefix, again = path("ckpt-7"), path("again/ckpt-12")
        os.makedirs(os.path.dirname(again), exist_ok=True)
        convert.write_tensorflow(prefix, theirs, {})
        one_way(f"par, {what}", "par", prefix, 20, logp, ["--mem", "4"], 6, ["--gate-eval", "soft"],
                whole=True)
        run_convert(path("ours.safetensors"), again)
        there_and_back(f"par, {what}", Bundle(prefix), Bundle(again), 12)
        check(sorted(os.listdir(os.path.dirname(again)))
              == ["checkpoint", "ckpt-12.data-00000-of-00001", "ckpt-12.index"]
              and open(path("again/checkpoint")).read() == 'model_checkpoint_path: '
              '"ckpt-12"\nall_model_checkpoint_paths: "ckpt-12"\n',
              f"par, {what}: other files than three: {os.listdir(os.path.dirname(again))}")
    damage(prefix,
           ["--mem", "4", "--block-sz", "6", "--tokens", "chars", "--vocab", vocabulary_file(20)])


def there_and_back(what, theirs, again, number):
    """Bit-exact variables, objects that lead to them under the names of both versions,
    and only the counter besides."""
    a, b = theirs.values("model/"), again.values()
    counter = b.pop("save_counter/.ATTRIBUTES/VARIABLE_VALUE", None)
    check(len(again.blocks) > 1,
          f"{what}: one block only, so that the index of the index says nothing")
    check(a and a == b, f"{what}: other bits than those that were read in "
          f"{sorted(k for k in set(a) | set(b) if a.get(k) != b.get(k))[:4]}")
    check(counter == (9, (), number.to_bytes(8, "little")), f"{what}: save_counter is {counter}")
    bad = []
    for key in again.values():
        name = key[:-len("/.ATTRIBUTES/VARIABLE_VALUE")]
        names = {name}
        for long, short in (("global_content_bias", "u"), ("global_position_bias", "v")):
            for x, y in ((long, short), (short, long)):
                if name.endswith("/rmha/" + x):
                    names.add(name[:-len(x)] + y)
        bad += [n for n in names if again.find(n) != [key]]
    check(not bad, f"{what}: objects that do not lead to their variables: {bad[:4]}")


def test_par_original():
    """A checkpoint that TensorFlow wrote (golden/par_tensorflow.py), whose values are
    known; and the conversion back."""
    golden = os.path.join(ROOT, "tests", "golden", "par_ckpt-3")
    ours = path("ours.safetensors")
    again = path("golden-3")
    run_convert(golden, ours, "--block-sz", "6", "--mem", "4", "--tokens", "ids", "--vocab",
                vocabulary_file(12))
    run_convert(ours, again)
    theirs = Bundle(golden)
    there_and_back("par, of TensorFlow itself", theirs, Bundle(again), 3)
    bad = [k for k, (_, shape, b) in theirs.values("model/").items()
           if b != par_tensorflow.numbers(k[:-len("/.ATTRIBUTES/VARIABLE_VALUE")], shape).tobytes()]
    check(len(theirs.values("model/")) > 40 and not bad,
          f"par, of TensorFlow itself: other numbers in {bad[:4]}")
    tensors = convert.read_safetensors(ours)[0]
    expected = par_tensorflow.numbers("model/stoch_blks/1/rmha/W_pos/kernel", (4, 4)).T
    check(np.array_equal(tensors["layers.1.attn.pos.weight"], expected),
          "par, of TensorFlow itself: W_pos is not transposed")


def test_par_trained():
    """A trained search, converted and back; and models that the original cannot
    express."""
    ours = path("search.safetensors")
    theirs = path("search")
    again = path("again.safetensors")
    text = path("text.txt")
    with open(text, "w") as f:
        f.write("".join(letter(i) for i in texts_to(20, 400, 3)))
    flags = ["--own-uv", "--biases", "--divide-all", "--full-scale", "--attn-relu"]
    options = ("--pattern search --nlayers 2 --hid-sz 8 --nheads 2 --inner-hid-sz 12 --block-sz 6 "
               "--mem 4 --norm-eps 0.001 --words-out reference --cutoffs 5,12 --proj-factor 2 "
               "--pad-id 0 --arch pi --gate-eval soft --sines reference --pos-mode reference "
               "--steps 2 --batch-sz 1 --batch-split 1 --tokens chars").split()
    done = train("par", "--checkpoint", ours, "--data", text, *options, *flags)
    if done.returncode:
        raise RuntimeError(done.stderr)
    run_convert(ours, theirs)
    Bundle(theirs)
    run_convert(theirs, again, "--mem", "4", "--block-sz", "6", "--vocab", ours)
    a, b = (convert.read_safetensors(x)[0] for x in (ours, again))
    left_out = ("optim.", "memory.", "state.", "arch.", "grads")
    lost = [k for k in a if not k.startswith(left_out)] + ["arch.0", "arch.1"]
    check(len(b) == len(lost) and all(k in b and a[k].shape == b[k].shape
                                      and a[k].tobytes() == b[k].tobytes() for k in lost), "par, "
          "trained here: another model after a way over TensorFlow")
    run_convert(ours, path("search-uv"), "--to", "par-uv")
    check(
        "model/stoch_blks/1/rmha/v/.ATTRIBUTES/VARIABLE_VALUE" in Bundle(path("search-uv")).entries,
        "par-uv: not the short names")
    tensors, meta = convert.read_safetensors(ours)
    meta.pop("seal")
    config, out = json.loads(meta["config"]), path("refused")
    for name, value, said in (
            ("pattern", "sf", "--pattern sf"), ("positions", "learned", "--positions learned"),
            ("arch", "logits", "--arch logits"), ("norm-eps", 1e-5, "--norm-eps 1e-05"),
            ("own-uv", False, "without --own-uv"), ("biases", False, "without --biases"),
            ("norm-before", True, "with --norm-before"), ("head-sz", 5, "--head-sz 5"),
            ("emb-scale", 3.5, "--emb-scale 3.5"),
            ("words-out", "adaptive", "--words-out adaptive"), ("clamp-len", 7, "--clamp-len 7"),
            ("same-length", True, "--same-length"), ("attn-relu", False, "without --attn-relu"),
            ("full-scale", False, "without --full-scale"),
            ("pos-mode", "dist", "--pos-mode dist"), ("tied", True, "with --tied")):
        convert.write_safetensors(path("wrong.safetensors"), tensors,
                                  dict(meta, config=json.dumps(dict(config, **{name: value}))))
        refused(f"par, {name} {value}", [path("wrong.safetensors"), out, "--to", "par"],
                "PAR's files", said)
    more = dict(tensors, **{"layers.0.extra": np.zeros(2, np.float32)})
    convert.write_safetensors(path("wrong.safetensors"), more, meta)
    refused("par, a tensor that has no place", [path("wrong.safetensors"), out],
            "not known: layers.0.extra")
    less = {k: v for k, v in tensors.items() if k != "arch.1"}
    convert.write_safetensors(path("wrong.safetensors"), less, meta)
    refused("par, no gates", [path("wrong.safetensors"), out], "it lacks arch.1")
    os.makedirs(path("taken.index"))
    refused("par, a directory in its place", [ours, path("taken")], "cannot write", "taken.index")
    refused("par, no directory", [ours, path("none/ckpt-1")], "cannot write", "none/ckpt-1.data")
    os.rename(ours, path("checkpoint"))
    refused("par, IN is the file `checkpoint`", [path("checkpoint"), path("ckpt-1")], "one file")


def test_crc():
    """CRC-32C: the check value, the examples of RFC 3720, appendix B.4, and others
    against a plain loop."""
    for data, expected in ((b"123456789", 0xe3069283), (b"", 0), (bytes(32), 0x8a9136aa),
                       (b"\xff" * 32, 0x62a8ab43), (bytes(range(32)), 0x46dd794e),
                       (bytes(range(31, -1, -1)), 0x113fdb5c)):
        check(convert.crc32c(data) == Bundle.crc(data) == expected,
              f"CRC-32C of {data[:9]}.. is {convert.crc32c(data):x}, expected {expected:x}")
    data = np.random.RandomState(3).bytes(5000)
    bad = [n for n in list(range(70)) + [4096, 4097, 4999, 5000]
           if convert.crc32c(data[:n]) != Bundle.crc(data[:n])]
    check(not bad, f"CRC-32C of random bytes: wrong for {bad} of them")
    long = data * 420       # more than two pieces
    check(convert.crc32c(long) == Bundle.crc(long), "CRC-32C of two million bytes")
    check(convert.masked_crc(b"123456789") == Bundle.masked(b"123456789")
          == bytes.fromhex("e5b08ac7"), "a masked CRC")


def damage(prefix, words):
    """Truncated files, and files with any byte changed, are refused with the file and the
    entry."""
    good = path("good.safetensors")
    run_convert(prefix, good, *words)
    expected = open(good, "rb").read()
    bundle, words = Bundle(prefix), [prefix, path("refused.safetensors")] + words
    for part, n in ((".index", 10), (".index", 2000), (".data-00000-of-00001", 500)):
        whole = open(prefix + part, "rb").read()
        with open(prefix + part, "wb") as f:
            f.write(whole[:n])
        refused(f"PAR, {part} cut at {n}", words, "ckpt-7" + part)
        with open(prefix + part, "wb") as f:
            f.write(whole)
    for part, places in ((".index", range(0, len(bundle.index), 97)),
                         (".data-00000-of-00001", range(0, len(bundle.data), 331))):
        whole, bad = open(prefix + part, "rb").read(), []
        for at in places:
            with open(prefix + part, "wb") as f:
                f.write(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1:])
            if part == ".index":
                name, must = prefix + part, at < bundle.meta[0]
            else:
                (name,) = [k for k, (_, _, begin, b) in bundle.entries.items()
                           if begin <= at < begin + len(b)]
                must = name.startswith("model/") and "OPTIMIZER" not in name
            try:
                run_convert(*words)
                if must or open(words[1], "rb").read() != expected:
                    bad.append(f"{at}: taken")
            except convert.Refuse as e:
                if prefix + part not in str(e) or name not in str(e):
                    bad.append(f"{at}: {e}")
        check(len(places) > 20 and not bad, f"PAR, {part} with another byte: {bad[:3]}")
        with open(prefix + part, "wb") as f:
            f.write(whole)


def refused(what, words, *texts, path_out=None):
    """Exit code 2, one line that contains these texts, no file."""
    out = path_out or path("refused.safetensors")
    if os.path.exists(out):
        os.unlink(out)
    before = set(os.listdir(WORK))
    said = io.StringIO()
    old = sys.argv
    sys.argv = ["convert.py"] + [str(w) for w in words]
    with contextlib.redirect_stderr(said):
        try:
            code = convert.main()
        except SystemExit as e:
            code = e.code
    sys.argv = old
    text = said.getvalue()
    check(code == 2 and text.count("\n") == 1 and all(t in text for t in texts)
          and set(os.listdir(WORK)) == before,
          f"{what}: exit code {code}, said {text!r}, expected {texts}")


class Whole(torch.nn.Module):
    pass


def test_errors():
    def save(sd, name="bad.pt"):
        torch.save(sd, path(name))
        return path(name)
    out = path("refused.safetensors")
    letters = ["--tokens", "chars", "--vocab", vocabulary_file(20)]
    sd = span_model(41, L=20)
    good = save(in_model(sd), "good.pt")

    def without(*names):
        return save(OrderedDict((k, v) for k, v in sd.items() if not k.endswith(names)))
    refused("a key is missing", [without("layers.1.norm2.bias"), out] + letters,
            "it lacks layers.1.norm2.bias")
    refused("a key is unknown", [save(dict(sd, **{"module.layers.0.extra": torch.zeros(2)})), out]
            + letters, "not known: layers.0.extra")
    refused("a shape is wrong",
            [save(dict(sd, **{"module.layers.1.norm1.bias": torch.zeros(3)})), out] + letters,
            "layers.1.norm1.bias", "(3,)", "(12,)")
    refused("numbers of another type",
            [save(dict(sd, **{"module.out_emb.bias": torch.zeros(20, dtype=F64)})), out] + letters,
            "float64")
    refused("two copies differ",
            [save({k: v + k.count("persistent_memory.adaptive") if k.endswith("current_val") else v
                   for k, v in span_model(42, N=2).items()}), out] + letters,
            "should be one tensor")
    refused("nothing known", [save({"a.weight": torch.zeros(2)}), out], "no kind of model",
            "a.weight", "attn-span")
    refused("no tensors", [save({"epoch": 3}), out], "state_dict()")
    refused("a whole object", [save(Whole()), out], "state_dict()")
    refused("an object among the tensors",
            [save({"model": sd, "args": argparse.Namespace(lr=1)}), out], "Namespace", "['model']")
    data = open(good, "rb").read()
    for n in (0, 7, 100, len(data) // 2, len(data) - 1):
        with open(path("cut.pt"), "wb") as f:
            f.write(data[:n])
        refused(f"cut at {n}", [path("cut.pt"), out] + letters, "cut.pt")
    refused("no such file", [path("none.pt"), out], "none.pt", "No such file")
    refused("no vocabulary", [good, out], "20 tokens", "--text", "--vocab")
    refused("no kind of token", [good, out, "--vocab", letters[3]], "--tokens")
    refused("another vocabulary", [good, out, "--tokens", "chars", "--vocab", vocabulary_file(19)],
            "20 tokens", "19")
    vocabulary_file(20)
    refused("an option of another model", [good, out, "--mem", "3"] + letters,
            "--mem means nothing for attn-span")
    refused("an unknown option", [good, out, "--wrong"], "--wrong")
    refused("heads that are others", [good, out, "--heads", "4"] + letters, "--heads 4: it has 3")
    refused("--from", [good, out, "--from", "sru++"] + letters, "attn-span")
    refused("--to", [good, out, "--to", "sru++"] + letters, "--to sru++")
    refused("IN is OUT", [good, good] + letters, "one file", path_out=path("refused.pt"))
    refused("no directory", [good, path("none/x.safetensors")] + letters, "cannot write")
    pp = save(sru_model(43, "++", P=6, attends=[1, 1, 1]), "pp.pt")
    refused("heads are needed", [pp, out] + letters, "--heads is needed")
    refused("heads that do not divide", [pp, out, "--heads", "4"] + letters,
            "--heads 4 does not divide")
    refused("layers that attend", [save(sru_model(44, "++", P=6, nl=4, attends=[1, 0, 0, 1])), out,
                                   "--heads", "1"] + letters, "1, 4 attend")
    refused("--norm is needed", [save(sru_model(45, "2.6", norm="before")), out] + letters,
            "--norm is needed")
    cfg = compressive_oracle.Config(vocab=20, mem=8, cmem=2, aux="none")
    comp = save(comp_model(46, cfg), "comp.pt")
    refused("--block-sz is needed", [comp, out, "--memory-layers", "all"] + letters,
            "--block-sz is needed")
    refused("--memory-layers is needed", [comp, out, "--block-sz", "4", "--mem", "8"] + letters,
            "--memory-layers is needed")
    refused("sizes of memories", [comp, out, "--block-sz", "4", "--memory-layers", "all"] + letters,
            "pos_emb has 14")
    refused("a layer too many", [comp, out, "--block-sz", "4", "--mem", "8", "--memory-layers", "3"]
            + letters, "from 1 to 2")
    xl = save(xl_model(47, sizes=[5, 7, 8]), "xl.pt")
    refused("--mem is needed", [xl, out, "--cutoffs", "5,12"] + letters, "--mem is needed")
    refused("--cutoffs is needed", [xl, out, "--mem", "4"] + letters, "--cutoffs is needed")
    refused("--cutoffs", [xl, out, "--mem", "4", "--cutoffs", "5,4"] + letters, "--cutoffs 5,4")
    learned = xl_model(48, learned=10)
    rel = save(learned, "rel.pt")
    refused("memory of learned positions", [rel, out, "--mem", "10"] + letters,
            "--mem 10: r_emb has 10 rows")
    refused("segment of learned positions", [rel, out, "--mem", "4", "--block-sz", "5"] + letters,
            "--block-sz 5: r_emb has 10 rows")
    refused("one distance", [rel, out, "--mem", "4", "--clamp-len", "1"] + letters, "--clamp-len 1")
    third = OrderedDict((k, v) for k, v in learned.items() if k not in ("r_bias", "r_w_bias"))
    refused("attn_type 3", [save(third, "third.pt"), out, "--mem", "4"] + letters, "attn_type 3")
    second = OrderedDict((k.replace("qkv_net", "q_net"), v) for k, v in xl_model(49).items())
    refused("attn_type 2", [save(second, "second.pt"), out, "--mem", "4"] + letters, "attn_type 2")
    ours = path("good.safetensors")
    run_convert(good, ours, *letters)
    data = bytearray(open(ours, "rb").read())
    back = path("refused.pt")
    for n in (4, 30, len(data) // 2, len(data) - 1):
        with open(path("cut.safetensors"), "wb") as f:
            f.write(data[:n])
        refused(f"ours, cut at {n}", [path("cut.safetensors"), back], "cut.safetensors",
                path_out=back)
    data[-1000] ^= 1
    with open(path("bit.safetensors"), "wb") as f:
        f.write(data)
    refused("ours, a bit", [path("bit.safetensors"), back], "checksum", path_out=back)
    refused("ours, to another family", [ours, back, "--to", "sru++"], "can become attn-span",
            path_out=back)
    refused("ours, to fairseq", [ours, back, "--to", "fairseq-span"], "different models",
            path_out=back)
    refused("ours, an option", [ours, back, "--heads", "2"], "--heads means nothing", path_out=back)
    tensors, meta = convert.read_safetensors(ours)
    for what, config, text in (
        ("none", "[1]", "no JSON object"), ("short", '{"nlayers":2}', "lacks 'hid-sz'"),
        ("wrong", meta["config"].replace('"hid-sz": 12', '"hid-sz": "x"'), "in_emb.weight")):
        meta.pop("seal", None)
        convert.write_safetensors(path("wrong.safetensors"), tensors, dict(meta, config=config))
        refused(f"ours, a configuration that is {what}", [path("wrong.safetensors"), back], text,
                path_out=back)
    open(path("tf.index"), "wb").close()
    refused("TensorFlow without its data", [path("tf"), out], "tf.data-00000-of-00001")
    open(path("tf.data-00000-of-00001"), "wb").close()
    refused("TensorFlow's index", [path("tf.index"), out],
            "tf.index is no index of a TensorFlow checkpoint")


def test_vocabularies():
    """A vocabulary that convert.py counts is the trainer's."""
    text = path("text.txt")
    with open(text, "w") as f:
        f.write("to be or\tnot to be\n\nthat is the question\r\nto be é or what\nis or it\n" * 6)
    for what, family, more, tokens in (
            ("bytes in order of appearance", "attn_span", [], "bytes-compact"),
            ("characters", "attn_span", [], "chars"),
            ("words in order of appearance", "attn_span", [], "words"),
            ("words by count, later first", "attn_span",
             ["--adapt-io", "--adapt-io-cutoffs", "3,5"], "words"),
            ("words by count, <eos> first", "sru", ["--adapt-io", "--adapt-io-cutoffs", "3,5"],
             "words")):
        made = path("made.safetensors")
        if os.path.exists(made):
            os.unlink(made)
        data = path("data")
        os.makedirs(data, exist_ok=True)
        for name in ("train.txt", "valid.txt", "test.txt"):
            with open(os.path.join(data, name), "wb") as f:
                f.write(open(text, "rb").read())
        if family == "attn_span":
            more += ["--attn-span", "16"]
        else:
            more += ["--attention-last", "0", "--proj-sz", "4", "--emb-sz", "16"]
        done = train(family, "--checkpoint", made, "--data", data, "--tokens", tokens, "--steps",
                     "1", "--nlayers", "1", "--hid-sz", "16", "--nheads", "1", "--batch-sz", "1",
                     "--block-sz", "4", *more)
        if done.returncode:
            check(False, f"{what}: {done.stderr}")
            continue
        expected = convert.read_safetensors(made)[0]["vocab"]
        size = int(expected[8:16].view("<u8")[0])
        theirs, ours = path("theirs.pt"), path("ours.safetensors")
        run_convert(made, theirs)
        heads = ["--heads", "1"]
        run_convert(theirs, ours, "--text", text, "--tokens", tokens, *heads)
        got, meta = convert.read_safetensors(ours)
        check(np.array_equal(got["vocab"], expected),
              f"{what}: another vocabulary than the trainer's {size} tokens")
        run_convert(theirs, ours, "--vocab", made, *heads)
        got, meta = convert.read_safetensors(ours)
        check(np.array_equal(got["vocab"], expected)
              and json.loads(meta["config"])["tokens"] == tokens, f"{what}: --vocab CHECKPOINT")
    sd = sru_model(51, "2.6", V=4)
    torch.save(sd, path("theirs.pt"))
    with open(text, "wb") as f:
        f.write(b"zb\na\n")
    run_convert(path("theirs.pt"), path("ours.safetensors"), "--text", text, "--tokens",
                "bytes-compact")
    blob = convert.read_safetensors(path("ours.safetensors"))[0]["vocab"].tobytes()
    check(blob == convert.vocab_blob([b"<eos>", b"a", b"b", b"z"], "bytes-compact"),
          "bytes in order of their values")
    with open(path("dict.txt"), "w") as f:
        f.write("".join(f"{i} 5\n" for i in range(97, 110)))
    sd = span_model(52, V=24, pre="decoder.model.")
    torch.save({"model": sd}, path("theirs.pt"))
    run_convert(path("theirs.pt"), path("ours.safetensors"), "--tokens", "words", "--vocab",
                path("dict.txt"))
    with open(text, "w") as f:
        f.write("97 98 99\n100 99\n" * 20)
    done = train("attn_span", "--checkpoint", path("ours.safetensors"), "--data", text,
                 "--eval-only")
    check(done.returncode == 0 and "test ppl" in done.stdout,
          f"a dictionary of fairseq's: {done.stderr}")


def test_list_of_pieces():
    """A .vocab file: a piece may contain tabs and newlines, and a byte-order mark is not
    a piece."""
    for pieces in ([b"<unk>", b"\t", b"a\tb", b"\t\t", b"b"],
                   [b"<unk>", b"\n", b"\n\n", b"a\n", b"\nb", b"\r", b"c"]):
        for mark in (b"", b"\xef\xbb\xbf"):
            with open(path("list.vocab"), "wb") as f:
                f.write(mark + b"".join(piece + b"\t-%d.5\n" % i for i, piece in enumerate(pieces)))
            got = convert.pieces_of_list(path("list.vocab"), "ids", len(pieces), False)
            check(got == pieces, f"{got}, not {pieces}")
    with open(path("list.vocab"), "wb") as f:
        f.write(b"\xef\xbb\xbfa\nb\n")
    got = convert.pieces_of_list(path("list.vocab"), "words", 2, False)
    check(got == [b"a", b"b"], f"words after a byte-order mark: {got}")
    for tokens in ("ids", "words", "chars"):
        with open(path("list.vocab"), "wb") as f:
            f.write(b"<eos>\r\nb\r\n\r\r\nd")
        got = convert.pieces_of_list(path("list.vocab"), tokens, 4, False)
        check(got == [b"<eos>", b"b", b"\r", b"d"], f"{tokens}, lines that end with CRLF: {got}")
        with open(path("list.vocab"), "wb") as f:
            f.write(b"a\n\0\nb\n")
        got = convert.pieces_of_list(path("list.vocab"), tokens, 3, False)
        check(got == [b"a", b"\0", b"b"], f"{tokens}, a piece that is a zero byte: {got}")
        for encoding in ("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32", "UTF-32LE", "UTF-32BE"):
            with open(path("list.vocab"), "wb") as f:
                f.write("\u65e5\n\u672c\nb\n".encode(encoding))
            try:
                got = convert.pieces_of_list(path("list.vocab"), tokens, 3, False)
                check(False, f"a list in {encoding} is read as {got}")
            except convert.Refuse as e:
                check(f"-f {encoding} " in str(e), str(e))
    with open(path("list.vocab"), "wb") as f:
        f.write(b"a\t1\nb\nc\t2\n")
    try:
        got = convert.pieces_of_list(path("list.vocab"), "ids", 3, False)
        check(False, f"a missing score is read as {got}")
    except convert.Refuse as e:
        check("line 2 has no score" in str(e), str(e))


def test_document():
    """The commands of docs/convert.md, unchanged and in order, and those of
    docs/cookbook.md that belong to this test."""
    text = open(os.path.join(ROOT, "docs", "convert.md")).read()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    recipe = open(os.path.join(ROOT, "docs", "cookbook.md")).read()
    mark = r"<!-- run by: tests/io/test_convert.py -->\n```sh\n(.*?)```"
    blocks += re.findall(mark, recipe, re.S)
    lines = [line.replace("${STEPS:-2000}", "3") for block in blocks for line in block.splitlines()
             if line.strip()]
    os.makedirs(path("doc/build"))
    for name in ("attn_span", "sru", "compressive", "par"):
        os.symlink(os.path.join(os.path.abspath(BUILD), "train_" + name),
                   path(f"doc/build/train_{name}"))
    sample = ("the quick brown fox jumps over the lazy dog\n" * 40).encode()
    V = len(set(sample))
    for name in ("enwik8.train", "enwik8", "words.train", "text8.train", "text8"):
        with open(path("doc/" + name), "wb") as f:
            f.write(sample.replace(b"\n", b" ") if name[:5] == "text8" else sample)
    words = len(set(sample.split())) + 1
    cfg = compressive_oracle.Config(vocab=256, mem=512, cmem=128, segment=512, layers=8, aux="none",
                                    gate="gru")
    big = xl_model(67, sizes=[4, words - 4], divval=2, tied=[0, 1], hf=True, names="once")
    for name, sd in (("enwik8.pt", {"iter_no": 1, "model": span_model(61, V=V)}),
                     ("fairseq.pt", {"model": span_model(62, V=40, pre="decoder.model.")}),
                     ("sru.pt", sru_model(63, "2.6", V=V)),
                     ("srupp.pt", sru_model(64, "++", P=6, attends=[1, 1, 1], V=V)),
                     ("compressive.pt", comp_model(65, cfg)), ("xl.pt", xl_model(66, V=V - 1)),
                     ("pytorch_model.bin", big)):
        torch.save(sd, path("doc/" + name))
    with open(path("doc/dict.txt"), "w") as f:
        f.write("".join(w.decode() + " 1\n" for w in sorted(set(sample.split()))))
        f.write("".join(f"x{i} 1\n" for i in range(36 - words + 1)))
    search = par_oracle.Config(**dict(par_oracle.REF, vocab=20, dim=8, heads=2, inner=12, blocks=3,
                                      cutoffs="5,12")).checked()
    convert.write_tensorflow(path("doc/ckpt-7"), par_variables(search, 68, False)[0], {})
    with open(path("doc/pieces.vocab"), "w") as f:
        f.write("".join(f"\u2581{letter(i)}\t-{i}\n" for i in range(20)))
    with open(path("doc/pieces.txt"), "w") as f:
        f.write("1 2 3 4 5 6 7\n" * 40)
    seen, here = set(), os.getcwd()
    os.chdir(path("doc"))
    for line in lines:
        seen |= set(re.findall(r"[\w.]+\.(?:pt|bin)\b", line))
        words = shlex.split(line)
        try:
            # in this process, because torch takes a second to load
            if words[0] == "tools/convert.py":
                run_convert(*words[1:])
            else:
                done = program(*words)
                if done.returncode:
                    raise RuntimeError(done.stderr)
            check(True, line)
        except (convert.Refuse, RuntimeError) as e:
            check(False, f"docs/convert.md: {line}: {e}")
    os.chdir(here)
    ours = {re.sub(r"\.(\d+|2?l|i|2l\+1|i\+1)(?=\.|$)", ".N", n)
            for row in re.findall(r"^\| `[^|]*\|([^|]*)\|", text, re.M)
            for n in re.findall(r"`([^`]+)`", row)}
    for name in ("enwik8", "fairseq", "sru", "srupp", "compressive", "xl", "wt103", "par"):
        tensors = convert.read_safetensors(path(f"doc/{name}.safetensors"))[0]
        unknown = [n for n in tensors if n != "vocab"
                   and not any(re.sub(r"\.\d+(?=\.|$)", ".N", n).endswith(o.lstrip("."))
                               for o in ours)]
        check(tensors and not unknown, f"docs/convert.md has no row with {unknown} of ours")
    check(len(lines) == 27 and len(seen) == 10,
          f"docs/convert.md: {len(lines)} commands, {sorted(seen)}")
    names = {n.replace("/", ".") for n in re.findall(r"^\| `([^`]+)`", text, re.M)}
    par = [n for short in (True, False) for n in par_variables(search, 1, short)[0]
           if n.startswith("model/") and "OPTIMIZER" not in n]
    for sd in (
        span_model(1, N=2), span_model(1, sizes=[9, 9]),
        sru_model(1, "2.6", P=6, norm="before", first=True, E=8), sru_model(1, "3.0", P=6),
        sru_model(1, "++", P=6, attends=[0, 1, 1], sizes=[9, 9]), comp_model(1, cfg),
        comp_model(1, compressive_oracle.Config(vocab=9, emb=4, gate="gru", mogrify=1, aux="none")),
        xl_model(1, sizes=[9, 9], divval=2, tied=[1, 1]), xl_model(1, hf=True),
        xl_model(1, learned=9, sizes=[9, 9], E=5, tied=[0, 0], not_tied=True), par):
        unknown = [] if len(sd) else ["?"]
        for name in sd:
            name = name.replace("/.ATTRIBUTES/VARIABLE_VALUE", "").replace("/", ".")
            short = re.sub(r"^(module|net|transformer)\.(?=.)|^rnn\.(?=rnn_lst|input_to)", "", name)
            short = re.sub(r"\.(\d+)(?=\.|$)", ".N", short)
            # indices of a Sequential are not layers
            if not any(re.sub(r"\.\d+(?=\.|$)|\.(l|i)(?=\.|$)", ".N", n) == short for n in names):
                unknown.append(name)
        check(not unknown, f"docs/convert.md has no row for {unknown}")


def rezipped(name, compression=zipfile.ZIP_STORED, **parts):
    """A file of torch.save with some members replaced."""
    made = path("new.pt")
    with zipfile.ZipFile(path(name)) as old, zipfile.ZipFile(made, "w", compression) as new:
        for part in old.namelist():
            new.writestr(part, parts.get(os.path.basename(part).replace(".", "_"), old.read(part)))
    return made


def test_hostile_pickles():
    """Small files that would expand to large ones, and errors that have no class in
    torch."""
    out, good = path("refused.safetensors"), in_model(span_model(75, V=256))
    torch.save({"w": torch.zeros(1).expand(100000, 100000)}, path("wide.pt"))
    refused("a stride of 0", [path("wide.pt"), out],
            "wide.pt is damaged: w of shape (100000, 100000)")
    torch.save({"w": torch.zeros(2, 2).to_sparse()}, path("sparse.pt"))
    refused("a sparse tensor", [path("sparse.pt"), out], "sparse.pt: w cannot be read")
    types = os.path.join(ROOT, "tests", "golden", "types.safetensors")
    refused("a type that numpy lacks", [types, out], "types.safetensors: F8_E4M3 has the type")
    with open(path("integers.safetensors"), "wb") as f:
        header = {n: {"dtype": n, "shape": [1], "data_offsets": [8 * i, 8 * i + size]}
                  for i, (n, size) in enumerate((("U64", 8), ("BOOL", 1)))}
        text = json.dumps(header).encode()
        f.write(struct.pack("<Q", len(text)) + text + struct.pack("<Q?", 1 << 63, True))
    read = convert.read_safetensors(path("integers.safetensors"))[0]
    check(read["U64"][0] == 1 << 63 and read["BOOL"][0], f"integers and BOOL: {read}")
    torch.save(good, path("good.pt"))
    refused("a compressed archive", [rezipped("good.pt", zipfile.ZIP_DEFLATED), out],
            "new.pt is a compressed archive", "zip -0")
    call = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(tR."          # without its arguments
    refused("a TypeError of the pickle", [rezipped("good.pt", data_pkl=call), out],
            "new.pt is not a file of torch.save, is damaged")
    run = convert.run
    try:
        convert.run = lambda words: [][1:].append(bytearray(1 << 62))
        refused("no memory", [path("good.pt"), out], "not enough memory")
    finally:
        convert.run = run
    long_name = path("n" * 243 + ".safetensors")
    run_convert(rezipped("good.pt"), long_name)
    check(os.path.exists(long_name), "a name as long as names can be")
    os.makedirs(path("bare"), exist_ok=True)
    with open(path("bare/numpy.py"), "w") as f:
        f.write("raise ImportError('no numpy here')\n")
    words = [sys.executable, os.path.join(ROOT, "tools", "convert.py")]
    for more, code, text in ((["--help"], 0, "usage: convert.py"),
                             (["a.pt", "b.st"], 2, "convert.py: numpy is missing")):
        done = subprocess.run(words + more, env=dict(os.environ, PYTHONPATH=path("bare")),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              universal_newlines=True, timeout=LIMIT)
        check(done.returncode == code and text in done.stdout and "Traceback" not in done.stdout,
              f"without numpy, {more}: {done.returncode}, {done.stdout[-300:]}")


def test_hostile_options():
    """A checkpoint whose options describe a model that it cannot hold: trainers refuse
    before they build the model."""
    with open(path("text.txt"), "w") as f:
        f.write("text to train on\n" * 100)
    for family in ("attn_span", "sru", "compressive", "par"):
        small, large = path(f"small.{family}"), path("large.safetensors")
        sizes = ["--hid-sz", "16", "--nheads", "2", "--nlayers", "2", "--batch-sz", "2",
                 "--block-sz", "8"]
        done = train(family, "--data", path("text.txt"), "--checkpoint", small, "--steps",
                     "2", *sizes)
        check(done.returncode == 0, f"{family}: {done.stderr}")
        tensors, meta = convert.read_safetensors(small)
        del meta["seal"]
        meta["config"] = json.dumps(dict(json.loads(meta["config"]), **{"hid-sz": 4096}))
        convert.write_safetensors(large, tensors, meta)
        for more in ["--no-train", "--generate", "1"], ["--steps", "9"]:
            done = train(family, "--checkpoint", large, *more)
            check(done.returncode == 2 and "its options describe a model of" in done.stderr,
                  f"{family} {more}: {done.returncode}, {done.stderr}")


def test_use():
    """Generation; fine-tuning, which starts at the loss of the evaluation; and the error
    of a trainer that shall resume."""
    with open(path("text.txt"), "w") as f:
        f.write("text to train on\n" * 100)
    ours = path("ours.safetensors")
    cfg = compressive_oracle.Config(vocab=256, mem=8, cmem=2, aux="none", gate="gru")
    for family, sd, options in (
            ("compressive", comp_model(71, cfg),
             ["--block-sz", "4", "--mem", "8", "--memory-layers", "all"]),
            ("sru", sru_model(72, "++", V=256, P=6, attends=[1, 1, 1]),
             ["--heads", "2"]), ("par", xl_model(73, V=256), ["--mem", "4"]),
            ("attn_span", in_model(span_model(74, V=256)), [])):
        torch.save(sd, path("theirs.pt"))
        run_convert(path("theirs.pt"), ours, *options)
        words = [os.path.join(BUILD, "train_" + family), "--checkpoint", ours, "--no-train",
                 "--generate", "100", "--prompt", "ab"]
        done = subprocess.run(words + ["--seed", "3"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=LIMIT)
        check(done.returncode == 0 and len(done.stdout) in (102, 103),
              f"{family} --generate 100: {len(done.stdout)} bytes, {done.stderr}")
        streams = ["--data", path("text.txt"), "--eval-batch-sz", "1"]
        done = train(family, "--checkpoint", ours, "--eval-only", *streams)
        loss = re.search(r"valid bpb \S+ \(loss (\S+)\)", done.stdout)
        done = train(family, "--init-from", ours, "--precision", "f32", "--steps", "2",
                     "--checkpoint", path(f"tuned.{family}"), *streams)
        first = re.search(r"step 0: valid bpb \S+ \(loss ([0-9.]+)", done.stderr)
        check(done.returncode == 0 and loss and first and loss[1] == first[1],
              f"{family}: fine-tuning begins with {first and first[1]}, "
              f"the evaluation says {loss and loss[1]}: {done.stderr}")
    done = train("attn_span", "--checkpoint", ours, "--data", path("text.txt"))
    check(done.returncode == 2 and done.stderr.count("\n") == 1 and f"--init-from {ours} starts a "
          "new run" in done.stderr, f"training from a converted file: {done.stderr}")
    done = program(sys.executable, os.path.join(ROOT, "tools", "convert.py"), path("none.pt"),
                   path("x.safetensors"))
    check(done.returncode == 2 and done.stderr.startswith("convert.py: "),
          f"the program itself: {done.returncode}, {done.stderr}")


def main():
    global BUILD, WORK
    BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
    only = sys.argv[2:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="seqtx-convert.") as WORK:
        for name, test in list(globals().items()):
            if name.startswith("test_") and (not only or name[5:] in only):
                try:
                    test()
                except Exception as e:      # the other tests run, and this one counts as failed
                    check(False, f"{name}: {type(e).__name__}: {e}")
    print(f"{count['passed']} passed, {count['failed']} failed")
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
