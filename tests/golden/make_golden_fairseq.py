#!/usr/bin/env python3
"""Golden vectors of fairseq's form of adaptive span (no renormalisation) and of
fractional ramps.

    python3 make_golden_fairseq.py              writes the files into this directory
    python3 make_golden_fairseq.py --out DIR    into another directory
    python3 make_golden_fairseq.py --check      identities, finite differences and published
                                                numbers; writes nothing

The formulas are written out for one attention row (batch row, head, query) at a time;
gradients come from autograd. README_fairseq.md describes the contents.
"""
import math
import sys
from collections import OrderedDict
from dataclasses import replace

import torch

sys.dont_write_bytecode = True
import attn_span_oracle as oracle
from attn_span_oracle import (Config, Optimiser, embed, fill_init, fill_random, fill_t, log_probs,
                              nll_of, random_tokens, tokens_t)
from common import (F64, Checker, GoldenFiles, f32, grads_of, layer_norm, leaves, normal, prefixed,
                    randn, seeded, slope)

FILES = GoldenFiles(limit=110_000)


# -------------------------------------------------- one attention row

def ramp_of(z, t, L, R):
    """u(t) before the clip, in the specification's order of operations."""
    return (1.0 - t + z * L) / R + 1.0


def row_weights(s, m, no_renorm, eps=0.0):
    """Logits s and mask m of the keys of one query -> weights. eps > 0: the reference's
    order of operations."""
    if no_renorm or eps > 0:
        e = torch.exp(s - s.max().detach())
        p = e / e.sum()
        w = m * p
        return w if no_renorm else w / (w.sum() + eps)
    seen = s[m > 0]
    if seen.numel() == 0:
        return 0.0 * s
    w = m * torch.exp(s - seen.max().detach())
    return w / w.sum()


# -------------------------------------------------- attention alone

def attention_alone(q, k, v, H, pe=None, u=None, vb=None, z=None, delta_min=1, span=0, ramp=1.0,
                    max_span=0, first_key=0, scale=None, no_renorm=True, eps=0.0):
    """q (B,T,HD), k and v (B,S,HD) -> (B,T,HD); the options of attention_op in
    attn_span_oracle."""
    B, T, width = q.shape
    S, D = k.shape[1], width // H
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    P = 0 if pe is None else pe.shape[0]
    zero = torch.zeros(D, dtype=q.dtype)
    batch = []
    for b in range(B):
        rows = []
        for i in range(T):
            heads = []
            for h in range(H):
                cut = slice(h * D, (h + 1) * D)
                qi = q[b, i, cut]
                logits, values, masks = [], [], []
                for delta in range(delta_min, span + 1):
                    j = S - T + i - delta
                    if j < first_key or j >= S:
                        continue
                    kj, vj = (k[b, j, cut], v[b, j, cut]) if j >= 0 else (zero, zero)
                    s = ((qi if u is None else qi + u[h]) * kj).sum()
                    if pe is not None:
                        row = pe[P - 1 + delta_min - delta]
                        row = row if row.shape[0] == D else row[cut]
                        s = s + ((qi if vb is None else qi + vb[h]) * row).sum()
                    logits.append(scale * s)
                    values.append(vj)
                    if z is None:
                        masks.append(torch.ones((), dtype=q.dtype))
                    else:
                        zh = z[h if z.numel() > 1 else 0]
                        masks.append(ramp_of(zh, delta, max_span, ramp).clamp(0.0, 1.0))
                if logits:
                    a = row_weights(torch.stack(logits), torch.stack(masks), no_renorm, eps)
                    heads.append((a[:, None] * torch.stack(values)).sum(0))
                else:
                    heads.append(zero)
            rows.append(torch.cat(heads))
        batch.append(torch.stack(rows))
    return torch.stack(batch)


# -------------------------------------------------- window and cache

def window_of(L, R, z, rounded=None):
    """(cur, S, C) of a layer. `rounded` replaces ceil(Z) + ceil(R) by another integer
    formula of (Z, R)."""
    Z = float(z.detach().max().to(torch.float32)) * L
    want = math.ceil(Z) + math.ceil(R) if rounded is None else rounded(Z, R)
    cur = min(max(want, 0), L)
    S = L - min(L - 1, L - cur) // 64 * 64
    return cur, S, min(L, S + 64)


def tight(Z, R):
    return math.ceil(Z + R)


def rounded_down(Z, R):
    return math.ceil(Z) + math.floor(R)


# -------------------------------------------------- whole model

def layer_attention(cfg, opt, params, l, h, cache, real):
    """Attention of layer l: h (B,M,d), cache (B,c,d) whose newest `real` rows exist ->
    (B,M,d)."""
    B, M, d = h.shape
    H, D, L, c = cfg.heads, cfg.head_dim, cfg.span, cache.shape[1]
    name = f"layers.{l}.attn."
    z = params[name + "span"]
    _, S, _ = window_of(L, cfg.ramp, z)
    memory = torch.cat([cache, h], 1)
    q = h @ params[name + "wq"].t()
    k = memory @ params[name + "wk"].t()
    v = memory @ params[name + "wv"].t()
    pe = params["key_pe"]
    t = torch.arange(1, S + 1)
    batch = []
    for b in range(B):
        rows = []
        for i in range(M):
            row = c + i - t
            if opt["literal"]:                       # rows before the cache are zero keys, too
                ts, row = t, row
            else:
                there = row >= c - real
                ts, row = t[there], row[there]
            heads = []
            for hd in range(H):
                cut = slice(hd * D, (hd + 1) * D)
                if ts.numel() == 0:
                    heads.append(torch.zeros(D, dtype=h.dtype))
                    continue
                real_key = (row >= 0).to(h.dtype)[:, None]
                kt = k[b, row.clamp(min=0), cut] * real_key
                vt = v[b, row.clamp(min=0), cut] * real_key
                s = (kt @ q[b, i, cut] + pe[L - ts] @ q[b, i, cut]) / math.sqrt(D)
                m = torch.clamp(ramp_of(z[hd if z.numel() > 1 else 0], ts.to(h.dtype), L, cfg.ramp),
                                0.0, 1.0)
                a = row_weights(s, m, opt["no_renorm"], cfg.eps
                                if opt["literal"] and not opt["no_renorm"] else 0.0)
                heads.append(a @ vt)
            rows.append(torch.cat(heads))
        batch.append(torch.stack(rows))
    return torch.stack(batch) @ params[name + "wo"].t()


def start(cfg, params, dtype=F64):
    """Initial caches: zero rows of the lengths that the spans require, none of which
    exists."""
    rows = [torch.zeros(cfg.batch,
                        window_of(cfg.span, cfg.ramp, params[f"layers.{l}.attn.span"])[2], cfg.dim,
                        dtype=dtype) for l in range(cfg.layers)]
    return rows, [0] * cfg.layers


def model_block(cfg, opt, params, x, y, rows, real):
    """One block: nll and total (with graph), log-probabilities, and the next caches."""
    M = x.shape[1]
    h = embed(cfg, params, x)
    new_rows, new_real = [], []
    for l in range(cfg.layers):
        p = f"layers.{l}."
        C = window_of(cfg.span, cfg.ramp, params[p + "attn.span"])[2]
        both = torch.cat([rows[l], h], 1)
        length = min(rows[l].shape[1], C - M) + M if C > M else C
        new_rows.append(both[:, both.shape[1] - length:].detach())
        new_real.append(min(length, real[l] + M))
        h = layer_norm(h + layer_attention(cfg, opt, params, l, h, rows[l], real[l]),
                       params[p + "norm1.weight"], params[p + "norm1.bias"])
        inner = torch.relu(h @ params[p + "ff.fc1.weight"].t() + params[p + "ff.fc1.bias"])
        h = layer_norm(h + inner @ params[p + "ff.fc2.weight"].t() + params[p + "ff.fc2.bias"],
                       params[p + "norm2.weight"], params[p + "norm2.bias"])
    logp = log_probs(cfg, params, h)
    nll = nll_of(logp, y)
    total = nll
    for l in range(cfg.layers):
        total = total + cfg.span_loss * cfg.span * params[f"layers.{l}.attn.span"].mean()
    return nll, total, logp, new_rows, new_real


def run(cfg, opt, params, tokens, schedule=None, optimiser=None, dtype=F64):
    """All blocks. Parameters are fixed, take their spans from `schedule`, or are updated
    after every block by `optimiser`."""
    params = OrderedDict((k, v.to(dtype).clone()) for k, v in params.items())
    M = cfg.block
    r = {"nll": [], "total": [], "cur": [], "S": [], "C": [], "in": [], "out": [], "spans": []}
    rows = real = None
    for b in range(cfg.blocks):
        for l in range(cfg.layers):
            if schedule is not None:
                params[f"layers.{l}.attn.span"] = schedule[b, l].to(dtype).clone()
        if rows is None:
            rows, real = start(cfg, params, dtype)
        windows = [window_of(cfg.span, cfg.ramp, params[f"layers.{l}.attn.span"])
                   for l in range(cfg.layers)]
        for l, (cur, S, C) in enumerate(windows):
            z = params[f"layers.{l}.attn.span"]
            assert window_of(cfg.span, cfg.ramp, z,
                             tight)[1:] == (S, C), "the two formulas of the window differ"
            beyond = torch.arange(S + 1, cfg.span + 1, dtype=dtype)
            assert bool((ramp_of(z.max(), beyond, cfg.span, cfg.ramp) <= 0).all())
        r["in"].append([x.shape[1] for x in rows])
        p = leaves(params)
        x, y = tokens[:, b * M:(b + 1) * M], tokens[:, b * M + 1:(b + 1) * M + 1]
        nll, total, logp, rows, real = model_block(cfg, opt, p, x, y, rows, real)
        if b == cfg.blocks - 1 or optimiser is not None:
            total.backward()
            r["grads"] = grads_of(p)
        r["nll"].append(nll.item())
        r["total"].append(total.item())
        for key, n in (("cur", 0), ("S", 1), ("C", 2)):
            r[key].append([w[n] for w in windows])
        r["out"].append([x.shape[1] for x in rows])
        if optimiser is not None:
            optimiser.step(params, r["grads"])
            for l in range(cfg.layers):
                z = params[f"layers.{l}.attn.span"]
                before = window_of(cfg.span, cfg.ramp, z)
                z.clamp_(0.0, 1.0)  # equivalent to clamping in the next forward pass
                assert window_of(cfg.span, cfg.ramp, z)[1:] == before[1:]
            r["spans"].append(
                torch.stack([params[f"layers.{l}.attn.span"].clone() for l in range(cfg.layers)]))
    r.update(logits=logp.detach(), rows=rows, real=real, final=params)
    return r


# -------------------------------------------------- files

def no_near_ties(z, L, R):
    """A ramp end that nearly hits an integer distance would make dz depend on rounding;
    exact hits are fine."""
    for end in (z.flatten() * L, z.flatten() * L + R):
        off = (end - end.round()).abs()
        assert bool(((off < 1e-12) | (off > 1e-4)).all()), end


def model_metadata(cfg, opt):
    meta = cfg.metadata()
    meta["literal"] = int(opt["literal"])
    meta["no_renorm"], meta["span_per_layer"] = int(opt["no_renorm"]), int(opt["span_per_layer"])
    return meta


def window_tensors(r):
    return OrderedDict(window_cur=torch.tensor(r["cur"]), window_span=torch.tensor(r["S"]),
                       window_cache=torch.tensor(r["C"]), rows_in=torch.tensor(r["in"]),
                       rows_out=torch.tensor(r["out"]))


def switches(no_renorm=1, per_layer=0, literal=0):
    return {"no_renorm": bool(no_renorm), "span_per_layer": bool(per_layer),
            "literal": bool(literal)}


BASE = dict(adapt_span=True, layers=2, heads=2, dim=8, inner=12, batch=2)
# name: (switches, seed (None: fill_t), spans, schedule, configuration)
MODELS = OrderedDict([
    ("t_f1", (switches(literal=1), None, [(0.05, 0.3), (0.0, 0.61)], None,
              dict(BASE, vocab=13, span=256, ramp=32, block=8, span_loss=1e-3))),
    ("t_f2", (switches(per_layer=1, literal=1), None, [(0.3,), (0.61,)], None,
              dict(BASE, vocab=13, span=256, ramp=32, block=8, span_loss=1e-3))),
    # windows 6, 70, 6: shorter than the cache, so trimming decides which keys share the
    # softmax
    ("fs_head", (switches(), 601, [(0.011, 0.04, 0.0), (0.31, 0.021, 0.17), (0.0, 0.0, 0.033)],
                 None, dict(BASE, vocab=23, span=70, ramp=3, block=7, blocks=4, layers=3, heads=3,
                            dim=9, inner=7, span_loss=2e-3))),
    ("fs_layer", (switches(per_layer=1), 602, [(0.012,), (0.23,)], None,
                  dict(BASE, vocab=19, span=67, ramp=2, block=11, blocks=3, heads=2, dim=10,
                       inner=7, batch=3, span_loss=1e-3))),
    ("fs_layer_zero", (switches(per_layer=1, literal=1), 602, [(0.012,), (0.23,)], None,
                       dict(BASE, vocab=19, span=67, ramp=2, block=11, blocks=3, heads=2, dim=10,
                            inner=7, batch=3, span_loss=1e-3))),
    # largest z of layer 0 over the blocks; window 22, 86, 150, 150, 22
    ("fs_growth",
     (switches(), 603, None,
      [[[0.5 * z, z], [0.11, 0.47]] for z in (0.0, 0.3125, 0.9375, 1.0, 0.0)],
      dict(BASE, vocab=13, span=150, ramp=5, block=9, blocks=5, inner=9, span_loss=1e-3))),
    ("frac_a",
     (switches(no_renorm=0), 604, [(0.6 / 66, 0.25 / 66), (0.31, 0.0)], None,
      dict(BASE, vocab=17, span=66, ramp=1.5, block=7, blocks=3, inner=9, span_loss=1e-3))),
    ("frac_b",
     (switches(no_renorm=0), 605, None,
      [[[z, 0.5 * z, 0.075], [0.115, 0.455, 0.0]] for z in (0.013, 0.215, 0.835)],
      dict(BASE, vocab=11, span=100, ramp=7.3, block=5, heads=3, dim=9, inner=7, span_loss=1e-3))),
    ("frac_fs",
     (switches(), 606, [(0.6 / 67, 0.25 / 67), (0.31, 0.0)], None,
      dict(BASE, vocab=17, span=67, ramp=2.7, block=7, blocks=3, inner=9, span_loss=1e-3))),
])


def model_case(name):
    opt, seed, spans, schedule, fields = MODELS[name]
    cfg = Config(**fields).set_mode(opt["literal"])
    if schedule is not None:
        schedule = f32(torch.tensor(schedule, dtype=F64))
        spans = schedule[0].tolist()
        no_near_ties(schedule, cfg.span, cfg.ramp)
    if seed is None:
        params, tokens = fill_t(cfg, spans), tokens_t(cfg)
    else:
        gen = seeded(seed)
        params = fill_random(cfg, gen, 0.5, spans)
        tokens = random_tokens(cfg, gen)
    for l in range(cfg.layers):
        no_near_ties(params[f"layers.{l}.attn.span"], cfg.span, cfg.ramp)
    return cfg, opt, params, tokens, schedule


def single(cfg, opt, params, tokens, schedule, grads):
    """Largest float32 difference of a gradient, relative to its largest entry."""
    r = run(cfg, opt, params, tokens, schedule, dtype=torch.float32)
    return max(float((r["grads"][k].double() - g).abs().max() / max(1e-30, float(g.abs().max())))
               for k, g in grads.items())


def make_models():
    for name in MODELS:
        cfg, opt, params, tokens, schedule = model_case(name)
        r = run(cfg, opt, params, tokens, schedule)
        t = prefixed("param.", params)
        t["tokens"] = tokens
        if schedule is not None:
            t["z_schedule"] = schedule
        t["nll"] = torch.tensor(r["nll"], dtype=F64)
        t["total"] = torch.tensor(r["total"], dtype=F64)
        t["logits"] = r["logits"]
        for l, rows in enumerate(r["rows"]):
            t[f"cache.{l}"] = rows
        t["cache_rows"] = torch.tensor(r["real"])
        t.update(window_tensors(r))
        t.update(prefixed("grad.", r["grads"]))
        FILES.write(name, t, model_metadata(cfg, opt))
        print(f"    nll {['%.6f' % x for x in r['nll']]}, S {r['S']}, C {r['C']}, rows {r['out']}, "
              f"float32 {single(cfg, opt, params, tokens, schedule, r['grads']):.1e}")


def curve_case(name):
    per_layer = name == "fs_curve_layer"
    # per head: windows and caches grow in both layers, and one span is clamped to 0; per
    # layer: they shrink
    cfg = Config(**dict(BASE, vocab=13, span=70 if per_layer else 134, ramp=4, block=7, blocks=8,
                        span_loss=1e-3 if per_layer else 1e-5)).set_mode(False)
    params = fill_init(cfg, seeded(611 if per_layer else 622), span_init=0.03
                       if per_layer else 0.012)
    if per_layer:
        for l in range(cfg.layers):
            params[f"layers.{l}.attn.span"] = params[f"layers.{l}.attn.span"][:1].clone()
    kind = dict(kind="adagrad", lr=0.07, clip=0.03, warmup=4) if not per_layer else \
        dict(kind="adam", lr=3e-3, clip=1.0, warmup=0)
    return cfg, switches(per_layer=per_layer), params, random_tokens(cfg, seeded(612)), kind


def make_curves():
    for name in ("fs_curve", "fs_curve_layer"):
        cfg, opt, params, tokens, kind = curve_case(name)
        r = run(cfg, opt, params, tokens, optimiser=Optimiser(**kind))
        t = prefixed("param.", params)
        t["tokens"] = tokens
        t["losses"] = torch.tensor(r["nll"], dtype=F64)
        t["spans"] = torch.stack(r["spans"])
        no_near_ties(t["spans"], cfg.span, cfg.ramp)
        for l in range(cfg.layers):
            t[f"span_final.{l}"] = r["spans"][-1][l]
        t.update(window_tensors(r))
        t.update(prefixed("final.", r["final"]))
        meta = model_metadata(cfg, opt)
        meta.update(steps=cfg.blocks, optim=kind["kind"], lr=repr(kind["lr"]),
                    clip=repr(kind["clip"]), warmup=kind["warmup"], beta1="0.9", beta2="0.999",
                    adam_eps="1e-08")
        FILES.write(name, t, meta)
        low = run(cfg, opt, params, tokens, optimiser=Optimiser(**kind), dtype=torch.float32)
        loss = max(abs(a - b) for a, b in zip(low["nll"], r["nll"]))
        final = max(float((low["final"][k].double() - v).abs().max())
                    for k, v in r["final"].items())
        print(f"    losses {['%.4f' % x for x in r['nll']]}, "
              f"z {[s.flatten().tolist() for s in r['spans']][-1]}, S {r['S']}, float32: "
              f"losses {loss:.1e}, final {final:.1e}")


# first_key < 0: zero keys. steep: position logits rise with the distance, so that
# out-of-span keys outweigh the others.
ATTENTION = OrderedDict([
    ("attn_fs_01", dict(B=1, T=7, S=7, H=2, D=3, span=5, z=[0.1, 0.21], max_span=11, ramp=3)),
    ("attn_fs_02",
     dict(B=2, T=11, S=29, H=3, D=5, span=16, z=[0.0, 1.0, 0.5], max_span=16, ramp=4)),
    ("attn_fs_03", dict(B=2, T=11, S=23, H=2, D=4, span=17, z=[1.0, 0.93], max_span=40, ramp=8)),
    ("attn_fs_04",
     dict(B=3, T=13, S=31, H=3, D=4, span=19, z=[0.37], max_span=23, ramp=6, extra_pe=3)),
    ("attn_fs_05",
     dict(B=2, T=19, S=19, H=2, D=5, span=22, z=[0.27], max_span=22, ramp=5, first_key=-22)),
    ("attn_fs_06",
     dict(B=3, T=1, S=37, H=2, D=7, span=31, z=[0.17, 0.61], max_span=33, ramp=7, first_key=9)),
    ("attn_fs_07",
     dict(B=2, T=5, S=41, H=2, D=5, span=37, z=[0.06, 0.31], max_span=40, ramp=4, steep=16.0)),
    ("attn_fs_08",
     dict(B=2, T=13, S=17, H=2, D=5, span=11, z=[0.0], max_span=12, ramp=4, first_key=7)),
    ("attn_frac_01", dict(B=2, T=7, S=37, H=3, D=4, span=31, z=[0.6 / 66, 0.0, 0.3], max_span=66,
                          ramp=1.5, no_renorm=0)),
    ("attn_frac_02", dict(B=2, T=5, S=41, H=3, D=5, span=20, z=[0.0, 0.37, 0.81], max_span=20,
                          ramp=2.7, no_renorm=0)),
    ("attn_frac_03", dict(B=1, T=11, S=43, H=2, D=6, span=43, z=[0.13, 0.71], max_span=43, ramp=7.3,
                          first_key=2, no_renorm=0)),
    ("attn_frac_04", dict(B=2, T=11, S=43, H=3, D=3, span=37, z=[0.13, 0.0, 0.63], max_span=40,
                          ramp=7.3, first_key=2)),
    ("attn_frac_05", dict(B=2, T=7, S=31, H=2, D=5, span=66, z=[0.6 / 66], max_span=66, ramp=1.5)),
])


def attention_case(name):
    c = ATTENTION[name]
    gen = seeded(700 + list(ATTENTION).index(name))
    B, T, S, H, D = (c[k] for k in "BTSHD")
    t = OrderedDict(q=normal(gen, B, T, H * D), k=normal(gen, B, S, H * D),
                    v=normal(gen, B, S, H * D))
    P = c["span"] + c.get("extra_pe", 0)
    t["pe"] = normal(gen, P, D)
    if "steep" in c:
        t["q"].view(B, T, H, D)[..., 0] = 1.0
        delta = P - torch.arange(P, dtype=F64)
        t["pe"][:, 0] = f32(c["steep"] * math.sqrt(D) * delta / delta.max())
    t["z"] = f32(torch.tensor(c["z"], dtype=F64))
    no_near_ties(t["z"], c["max_span"], c["ramp"])
    if name.startswith("attn_frac"):                 # nothing visible is outside the window
        beyond = torch.arange(c["span"] + 1, 200, dtype=F64)
        assert bool((ramp_of(t["z"].max(), beyond, c["max_span"], c["ramp"]) <= 0).all())
    return c, t, normal(gen, B, T, H * D)


def attention_run(c, t, dtype=F64):
    p = leaves(OrderedDict((k, v.to(dtype)) for k, v in t.items()))
    y = attention_alone(p["q"], p["k"], p["v"], c["H"], p["pe"], z=p["z"], span=c["span"],
                        ramp=c["ramp"], max_span=c["max_span"], first_key=c.get("first_key", 0),
                        no_renorm=bool(c.get("no_renorm", 1)))
    return y, p


def make_attention():
    for name in ATTENTION:
        c, t, dy = attention_case(name)
        y, p = attention_run(c, t)
        (y * dy).sum().backward()
        y32, p32 = attention_run(c, t, torch.float32)
        (y32 * dy.float()).sum().backward()
        out = OrderedDict(t)
        out["dy"], out["y"] = dy, y.detach()
        worst = float((y32.double() - y).abs().max())
        for k, leaf in p.items():
            out["d" + k] = leaf.grad
            worst = max(worst, float((p32[k].grad.double() - leaf.grad).abs().max()))
        D = c["D"]
        meta = OrderedDict(batch=c["B"], queries=c["T"], keys=c["S"], heads=c["H"], head_dim=D,
                           pe="shared", pe_rows=t["pe"].shape[0], delta_min=1, span=c["span"],
                           has_u=0, has_vb=0, has_z=1, ramp=c["ramp"], max_span=c["max_span"],
                           pers=0, eps=repr(0.0), not_causal=0, first_key=c.get("first_key", 0),
                           scale=repr(1.0 / math.sqrt(D)), no_renorm=c.get("no_renorm", 1),
                           span_per_layer=int(len(c["z"]) == 1 and c["H"] > 1))
        FILES.write(name, out, meta)
        print(f"    dz {out['dz'].tolist()}, float32 {worst:.1e}")


# -------------------------------------------------- checks

def by_hand(c, t, dy):
    """The backward pass written out with indices; both closed ends of the ramp count."""
    B, T, S, H, D = (c[k] for k in "BTSHD")
    L, R, P, z = c["max_span"], c["ramp"], t["pe"].shape[0], t["z"]
    g = OrderedDict((k, torch.zeros_like(v)) for k, v in t.items())
    for b in range(B):
        for h in range(H):
            cut, hz = slice(h * D, (h + 1) * D), h if z.numel() > 1 else 0
            for i in range(T):
                ds = [x for x in range(1, c["span"] + 1)
                      if c.get("first_key", 0) <= S - T + i - x < S]
                if not ds:
                    continue

                def key(name, j):
                    return t[name][b, j, cut] if j >= 0 else torch.zeros(D, dtype=F64)

                js = [S - T + i - x for x in ds]
                s = [float(t["q"][b, i, cut] @ (key("k", j) + t["pe"][P - x])) / math.sqrt(D)
                     for j, x in zip(js, ds)]
                Zs = sum(math.exp(x - max(s)) for x in s)
                p = [math.exp(x - max(s)) / Zs for x in s]
                u = [(1.0 - x + float(z[hz]) * L) / R + 1.0 for x in ds]
                m = [min(max(x, 0.0), 1.0) for x in u]
                go = [float(dy[b, i, cut] @ key("v", j)) for j in js]
                mean = sum(mm * pp * gg for mm, pp, gg in zip(m, p, go))
                for j, x, pp, mm, uu, gg in zip(js, ds, p, m, u, go):
                    w = pp * (mm * gg - mean) / math.sqrt(D)
                    g["q"][b, i, cut] += w * (key("k", j) + t["pe"][P - x])
                    g["pe"][P - x] += w * t["q"][b, i, cut]
                    if j >= 0:
                        g["k"][b, j, cut] += w * t["q"][b, i, cut]
                        g["v"][b, j, cut] += mm * pp * dy[b, i, cut]
                    if 0.0 <= uu <= 1.0:
                        g["z"][hz] += L / R * pp * gg
    return g


def worst(a, b):
    """Largest difference of the tensors that a and b share by name."""
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def attention_gradients(c, t, dy):
    """y and {name: gradient of sum(dy y)} of an attention case."""
    y, p = attention_run(c, t)
    (y * dy).sum().backward()
    return y, grads_of(p)


def oracle_gradients(c, t, dy, **options):
    """The same by attn_span_oracle.attention_op."""
    p = leaves(t)
    y = oracle.attention_op(p["q"], p["k"], p["v"], c["H"], p["pe"], span=c["span"], **options)
    (y * dy).sum().backward()
    return y, grads_of(p)


def check_attention(ck, gen):
    """The written-out backward pass or attn_span_oracle, and finite differences."""
    for name in ATTENTION:
        c, t, dy = attention_case(name)
        y, grads = attention_gradients(c, t, dy)
        if c.get("no_renorm", 1):
            w = worst(by_hand(c, t, dy), grads)
            ck.expect(w < 1e-12, f"{name}: backward written out, largest difference {w:.1e}")
        else:
            y2, g2 = oracle_gradients(c, t, dy, z=t["z"], ramp=c["ramp"], max_span=c["max_span"],
                                      first_key=c.get("first_key", 0))
            g2.pop("z")
            w = max(float((y - y2).abs().max()), worst(g2, grads))
            ck.expect(w < 1e-12, f"{name}: attn_span_oracle with a fractional ramp (without dz), "
                      f"largest difference {w:.1e}")
        zl = t["z"] * c["max_span"]
        tied = bool(((zl == zl.round()) | (zl + c["ramp"] == (zl + c["ramp"]).round())).any())
        for k in grads:
            if k == "z" and tied:
                continue
            direction = randn(gen, *t[k].shape)
            step = 1e-7 if k == "z" else 1e-6
            numeric = slope(lambda t: (attention_run(c, t)[0] * dy).sum(), t, k, direction, step)
            exact = float((grads[k] * direction).sum())
            ck.expect(abs(numeric - exact) < 1e-7 * max(1.0, abs(exact)),
                      f"{name}: finite difference along {k}: {numeric:.9f} against {exact:.9f}")


def check_special_cases(ck):
    # fairseq's form with m = 1 is plain softmax attention
    c, t, dy = attention_case("attn_fs_03")
    y, grads = attention_gradients(c, t, dy)
    y2, g2 = oracle_gradients(c, t, dy)
    w = max(float((y - y2).abs().max()), worst({k: g2[k] for k in ("q", "k", "v", "pe")}, grads))
    ck.expect(w < 1e-13, f"m = 1 everywhere: plain softmax, largest difference {w:.1e}")
    ck.expect(float(grads["z"].abs().max()) == 0.0, "m = 1 everywhere: dz is 0")
    # one span for all heads is equal spans per head, with dz summed
    c, t, dy = attention_case("attn_fs_04")
    y, grads = attention_gradients(c, t, dy)
    y3, g3 = attention_gradients(c, OrderedDict(t, z=t["z"].repeat(3)), dy)
    ck.close("one span = equal spans: y", y, y3, 1e-15)
    ck.close("one span = equal spans: dz", grads["z"], g3["z"].sum()[None], 1e-13)


def check_windows(ck, gen):
    for L, R, z, expected in [(8192, 32, 0., (32, 64, 128)), (8192, 32, .01, (114, 128, 192)),
                              (8192, 32, .1, (852, 896, 960)), (8192, 32, .5, (4128, 4160, 4224)),
                              (8192, 32, 1., (8192, 8192, 8192)), (256, 32, .3, (109, 128, 192)),
                              (256, 32, .61, (189, 192, 256))]:
        ck.equal(f"cur, S, C of L {L}, z {z}",
                 window_of(L, R, torch.tensor([0., z], dtype=F64)), expected)
    same = cover = real = lost = differ = count = 0
    for n in range(4000):
        L = int(torch.randint(1, 300, (1,), generator=gen))
        z = f32(torch.rand(1, generator=gen, dtype=F64) ** 3)
        R = int(torch.randint(1, 40, (1,), generator=gen))
        cfg = Config(span=L, ramp=R, adapt_span=True)
        same += window_of(L, R, z)[1:] == oracle.working_span(cfg, z)
        R = 1.0 + 12.0 * float(torch.rand(1, generator=gen, dtype=F64))
        cur, S, C = window_of(L, R, z)
        top = [x for x in range(1, L + 1) if float(ramp_of(z, x, L, R)) > 0]
        cover += all(x <= S for x in top)
        lost += any(x > window_of(L, R, z, rounded_down)[1] for x in top)
        differ += window_of(L, R, z, tight)[1:] != (S, C)
        c_real = min(max(math.ceil(float(z) * L) + R, 0), L)
        real += S == L - math.floor(min(L - 1, L - c_real) / 64) * 64
        count += 1
    ck.equal("integer ramps: S and C of attn_span_oracle", same, count)
    ck.equal("fractional ramps: every visible distance is inside S", cover, count)
    ck.equal("fractional ramps: specification's formula with a real R", real, count)
    print(f"      of {count} random fractional cases floor(R) loses a visible distance in {lost}, "
          f"ceil(Z + R) gives another S or C in {differ}")
    z = f32(torch.tensor([0.6 / 66], dtype=F64))
    ck.equal("L 66, R 1.5, Z 0.6: cur, S, C", window_of(66, 1.5, z), (3, 66, 66))
    ck.equal("the same with floor(R)", window_of(66, 1.5, z, rounded_down), (2, 2, 66))
    ck.close("m of distances 1..4",
             torch.clamp(ramp_of(z, torch.arange(1., 5., dtype=F64), 66, 1.5), 0, 1),
             torch.tensor([1, 11 / 15, 1 / 15, 0], dtype=F64), 1e-7)


def check_published(ck):
    """The whole model against the published numbers of the reference, literal zero rows."""
    expected = {"t_f1": ("2.9554158668 2.7342929933 3.2153999854", None),
                "t_f2": ("2.9554278019 2.7344130692 3.2157911670",
                         "3.1883878019 2.9673730692 3.4487511670")}
    for name, (nll, total) in expected.items():
        cfg, opt, params, tokens, _ = model_case(name)
        r = run(cfg, opt, params, tokens)
        ck.printed(f"{name} nll", r["nll"], nll)
        if total:
            ck.printed(f"{name} total", r["total"], total)
        else:
            for key, text in (("key_pe", "4.678744259e-07"), ("in_emb.weight", "4.755973763e-01"),
                              ("layers.1.attn.wk", "1.828191377e-05")):
                ck.printed(f"{name} |g|^2 {key}", [(r["grads"][key] ** 2).sum()], text)
            ck.equal(f"{name} largest span", max(max(x) for x in r["cur"]), 189)


def check_renormalised(ck, gen):
    """The renormalised form with an integer ramp against attn_span_oracle."""
    for literal in (False, True):
        for growing in (False, True):
            cfg = Config(**dict(BASE, vocab=13, span=70, ramp=5, block=6, span_loss=1e-3))
            cfg.set_mode(literal)
            params = fill_random(cfg, gen)
            tokens = random_tokens(cfg, gen)
            plan = None
            if growing:
                plan = [[[0.5 * z, z], [0.1, 0.45]] for z in (0.01, 0.3, 0.9)]
                plan = f32(torch.tensor(plan, dtype=F64))
            a = run(cfg, switches(no_renorm=0, literal=literal), params, tokens, plan)
            b = oracle.run_blocks(cfg, params, tokens, plan)
            w = max(worst(a["grads"], b["grads"]),
                    float((torch.tensor(a["nll"], dtype=F64) - b["nll"]).abs().max()),
                    max(float((x - y).abs().max()) for x, y in zip(a["rows"], b["state"].rows)))
            lengths = [x[2] for x in b["trace"]]
            ck.expect(w < 1e-12 and a["real"] == b["state"].real and a["out"] == lengths,
                      f"renormalised, literal {int(literal)}, growing {int(growing)}: "
                      f"attn_span_oracle, difference {w:.1e}")


def check_fixed_span(ck, gen):
    """Without trimming, fairseq's form with m = 1 equals a fixed span."""
    cfg = Config(**dict(BASE, vocab=13, span=40, ramp=5, block=6, span_loss=0.0)).set_mode(False)
    params = fill_random(cfg, gen, 0.5, [(1.0, 1.0), (1.0, 1.0)])
    tokens = random_tokens(cfg, gen)
    a = run(cfg, switches(), params, tokens)
    plain = OrderedDict((k, v) for k, v in params.items() if not k.endswith("span"))
    b = oracle.run_blocks(replace(cfg, adapt_span=False), plain, tokens)
    w = max(worst(b["grads"], a["grads"]),
            float((torch.tensor(a["nll"], dtype=F64) - b["nll"]).abs().max()))
    ck.expect(w < 1e-12, f"the whole model with m = 1: fixed span, difference {w:.1e}")


def check_differences(ck, gen):
    """Finite differences of the last block's total, with fixed caches."""
    for name in ("fs_head", "fs_layer", "fs_layer_zero", "frac_a", "frac_fs"):
        cfg, opt, params, tokens, _ = model_case(name)
        r = run(cfg, opt, params, tokens)
        before = run(replace(cfg, blocks=cfg.blocks - 1), opt, params, tokens)
        first, M = (cfg.blocks - 1) * cfg.block, cfg.block
        x, y = tokens[:, first:first + M], tokens[:, first + 1:first + M + 1]

        def total(p):
            return model_block(cfg, opt, p, x, y, before["rows"], before["real"])[1]

        for key in ("key_pe", "layers.0.attn.span", "layers.1.attn.span", "layers.1.attn.wk",
                    "layers.0.attn.wq"):
            direction, step = randn(gen, *params[key].shape), 1e-6
            if key.endswith("span"):
                zl, step = params[key] * cfg.span, 1e-7
                direction = torch.where(zl == zl.round(), torch.zeros_like(direction), direction)
            numeric = slope(total, params, key, direction, step)
            exact = float((r["grads"][key] * direction).sum())
            ck.expect(abs(numeric - exact) < 2e-8 * max(1.0, abs(exact)) + 1e-9,
                      f"{name}: finite difference along {key}: {numeric:.10f} against {exact:.10f}")


def check():
    ck = Checker()
    gen = seeded(800)
    check_attention(ck, gen)
    check_special_cases(ck)
    check_windows(ck, gen)
    check_published(ck)
    check_renormalised(ck, gen)
    check_fixed_span(ck, gen)
    check_differences(ck, gen)
    return ck.finish()


def main():
    if "--check" in sys.argv[1:]:
        return check()
    FILES.make(dict(attention=make_attention, models=make_models, curves=make_curves), sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
