#!/usr/bin/env python3
"""Writes the golden vectors of the adaptive-span model, which README.md describes.

    python3 make_golden.py              all files, into this directory
    python3 make_golden.py --out DIR    into another directory
    python3 make_golden.py models ops   a part: models attention curves optimisers ops
"""
import math
import sys
from collections import OrderedDict

import torch
import torch.nn.functional as F

sys.dont_write_bytecode = True
from attn_span_oracle import (LITERAL_EPS, T_ADAGRAD_P, T_ADAGRAD_Q, T_EXPECT, Config, Optimiser,
                              attention_op, fill_init, fill_random, random_tokens, run_blocks,
                              t_case, train)
from common import F64, GoldenFiles, f32, grads_of, leaf, leaves, normal, prefixed, seeded

FILES = GoldenFiles(limit=500_000)


def no_near_ties(z, L):
    """A ramp end that nearly hits an integer distance would make dz depend on rounding;
    exact hits are fine."""
    zl = (z * L).flatten()
    off = (zl - zl.round()).abs()
    assert bool(((off == 0) | (off > 1e-5)).all()), zl


# -------------------------------------------------- whole model

def write_model(name, cfg, params, tokens, z_schedule=None):
    r = run_blocks(cfg, params, tokens, z_schedule)
    t = prefixed("param.", params)
    t["tokens"] = tokens
    if z_schedule is not None:
        t["z_schedule"] = z_schedule
        no_near_ties(z_schedule, cfg.span)
    for l in range(cfg.layers if cfg.adapt_span else 0):
        no_near_ties(params[f"layers.{l}.attn.span"], cfg.span)
    t["nll"], t["total"], t["logits"] = r["nll"], r["total"], r["logits"]
    for l, rows in enumerate(r["state"].rows):
        t[f"cache.{l}"] = rows
    t["cache_rows"] = torch.tensor(r["state"].real)
    t.update(prefixed("grad.", r["grads"]))
    FILES.write(name, t, cfg.metadata())


def make_models():
    for name in T_EXPECT:
        for prefix, literal in (("t_", True), ("fix_", False)):
            cfg, params, tokens = t_case(name)
            cfg.set_mode(literal)
            write_model(prefix + name, cfg, params, tokens)

    def pair(names, seed, spans=None, steep=1.0, **fields):
        for name, literal in zip(names, (False, True)):
            cfg = Config(**fields).set_mode(literal)
            gen = seeded(seed)
            params = fill_random(cfg, gen, 0.5, spans)
            params["key_pe"] = steep * params["key_pe"]
            write_model(name, cfg, params, random_tokens(cfg, gen))

    pair(("odd1", "odd2"), 103, vocab=31, dim=15, heads=3, layers=3, inner=17, batch=3, block=5,
         span=37, ramp=7, adapt_span=True, span_loss=2e-3)
    pair(("odd3", "odd4"), 102, vocab=23, dim=14, heads=2, layers=2, inner=9, batch=1, block=11,
         span=67, ramp=5, adapt_span=True, pers=3, span_loss=1e-3)
    pair(("odd5", "odd6"), 103, vocab=37, dim=12, heads=4, layers=2, inner=7, batch=3, block=7,
         span=19, ramp=4, adapt_span=True, adapt_io=True, tied=False, divval=3, cutoffs=[7, 20],
         forward_columns=True, span_loss=1e-3)
    pair(("odd7", "odd8"), 104, vocab=41, dim=10, heads=1, layers=2, inner=13, batch=2, block=1,
         span=9, adapt_io=True, tied=True, divval=2, cutoffs=[5, 11, 30], blocks=4, pers=1)
    # Position logits so steep that out-of-span keys outweigh the others, and the literal
    # eps matters (quirk Q1).
    pair(("sharp_fix", "sharp"), 105, spans=[(0.02, 0.11), (0.0, 0.5)], steep=12.0, vocab=17, dim=8,
         heads=2, layers=2, inner=12, batch=2, block=12, span=130, ramp=6, adapt_span=True,
         span_loss=1e-3)
    pair(("blocklong_fix", "blocklong"), 106, vocab=19, dim=8, heads=2, layers=2, inner=11, batch=2,
                  block=21, span=16)
    for name, literal in (("growth_fix", False), ("growth", True)):
        cfg = Config(vocab=13, dim=8, heads=2, layers=2, inner=12, batch=2, block=8, blocks=5,
                     span=128, ramp=8, adapt_span=True, span_loss=1e-3).set_mode(literal)
        gen = seeded(107)
        params = fill_random(cfg, gen)
        schedule = torch.tensor([[[0.5 * z, z], [0.1, 0.45]] for z in (0.0, 0.3, 0.9, 1.0, 0.0)],
                                dtype=F64)
        for l in range(2):
            params[f"layers.{l}.attn.span"] = schedule[0, l].clone()
        write_model(name, cfg, params, random_tokens(cfg, gen), schedule)


# -------------------------------------------------- attention alone

ATTENTION = [
    # name, B, T, S, H, D, then the options
    dict(B=2, T=7, S=20, H=2, D=5, pe="shared", delta_min=1, span=13, first_key=0),
    dict(B=1, T=65, S=100, H=2, D=16, pe="shared", delta_min=1, span=60, z=[0.31, 0.85],
         max_span=70, ramp=9, first_key=0),
    dict(B=2, T=33, S=50, H=3, D=5, pe="shared", delta_min=1, span=48, z=[0.0, 1.0, 0.4],
         max_span=48, ramp=8, first_key=-48, eps=LITERAL_EPS),
    dict(B=2, T=7, S=30, H=2, D=16, pe="head", delta_min=0, span=36, u=True, vb=True, first_key=-3),
    dict(B=1, T=1, S=40, H=2, D=5, pe="shared", delta_min=1, span=37, z=[0.21, 0.73], max_span=40,
         ramp=5, npers=3, first_key=0),
    dict(B=2, T=33, S=33, H=3, D=5, pe="shared", delta_min=1, span=20, z=[0.05, 0.5, 0.93],
         max_span=21, ramp=6, npers=4, first_key=-20, eps=LITERAL_EPS),
    dict(B=1, T=7, S=200, H=1, D=16, pe="none", not_causal=True),
    dict(B=2, T=33, S=41, H=2, D=5, pe="none", delta_min=1, span=17, first_key=14),
    dict(B=1, T=65, S=65, H=1, D=1, pe="shared", delta_min=0, span=64, first_key=0, scale="1/D"),
    dict(B=2, T=7, S=9, H=3, D=5, pe="head", delta_min=0, span=6, z=[0.06, 0.11, 0.83], max_span=20,
         ramp=3, first_key=4, u=True, scale="1/D"),
    dict(B=1, T=65, S=70, H=2, D=5, pe="shared", delta_min=1, span=69, extra_pe=5, npers=2,
         first_key=9, vb=True),
    # out-of-span logits far above the others: the eps term decides the row sums
    dict(B=2, T=7, S=60, H=2, D=5, pe="shared", delta_min=1, span=50, z=[0.11, 0.23], max_span=50,
         ramp=4, first_key=0, eps=LITERAL_EPS, steep=16.0),
    dict(B=2, T=33, S=33, H=2, D=16, pe="shared", delta_min=1, span=40, z=[0.16, 0.61], max_span=40,
         ramp=8, first_key=6, extra_pe=3),
    dict(B=1, T=7, S=12, H=2, D=5, pe="none", not_causal=True, npers=2, first_key=5, u=True,
         scale="1/D"),
]


def make_attention():
    for n, c in enumerate(ATTENTION):
        gen = seeded(200 + n)
        B, T, S, H, D = (c[k] for k in "BTSHD")
        t = OrderedDict(q=normal(gen, B, T, H * D), k=normal(gen, B, S, H * D),
                        v=normal(gen, B, S, H * D))
        dmin, span = c.get("delta_min", 1), c.get("span", 0)
        if c["pe"] != "none":
            P = span + 1 - dmin + c.get("extra_pe", 0)
            t["pe"] = normal(gen, P, D if c["pe"] == "shared" else H * D)
            if "steep" in c:
                # the first feature is constant in q, and rises with the distance in the
                # table
                t["q"].view(B, T, H, D)[..., 0] = 1.0
                delta = P - 1 + dmin - torch.arange(P, dtype=F64)
                t["pe"][:, 0] = f32(c["steep"] * math.sqrt(D) * delta / delta.max())
        if c.get("u"):
            t["u"] = normal(gen, H, D)
        if c.get("vb"):
            t["vb"] = normal(gen, H, D)
        if "z" in c:
            t["z"] = f32(torch.tensor(c["z"], dtype=F64))
            no_near_ties(t["z"], c["max_span"])
        if c.get("npers"):
            t["pk"] = normal(gen, H, c["npers"], D, scale=1 / math.sqrt(D))
            t["pv"] = normal(gen, H, c["npers"], D, scale=1 / math.sqrt(c["npers"]))
        dy = normal(gen, B, T, H * D)
        scale = 1.0 / D if c.get("scale") == "1/D" else 1.0 / math.sqrt(D)
        p = leaves(t)
        y = attention_op(p["q"], p["k"], p["v"], H, p.get("pe"), p.get("u"), p.get("vb"),
                         p.get("z"), p.get("pk"), p.get("pv"), dmin, span, c.get("ramp", 32),
                         c.get("max_span"), c.get("eps", 0.0), c.get("not_causal", False),
                         c.get("first_key", 0), scale)
        (y * dy).sum().backward()
        t["dy"], t["y"] = dy, y.detach()
        t.update(prefixed("d", grads_of(p)))
        meta = OrderedDict(batch=B, queries=T, keys=S, heads=H, head_dim=D, pe=c["pe"],
                           pe_rows=t["pe"].shape[0] if "pe" in t else 0, delta_min=dmin, span=span,
                           has_u=int("u" in t), has_vb=int("vb" in t), has_z=int("z" in t),
                           ramp=c.get("ramp", 0), max_span=c.get("max_span", 0),
                           pers=c.get("npers", 0), eps=repr(float(c.get("eps", 0.0))),
                           not_causal=int(c.get("not_causal", False)),
                           first_key=c.get("first_key", 0), scale=repr(scale))
        FILES.write(f"attn_{n + 1:02d}", t, meta)


# -------------------------------------------------- training curves

def markov_tokens(vocab, rows, length, seed):
    """Tokens (rows,length): every symbol has three likely successors (0.6, 0.25, 0.1),
    else uniform."""
    gen = seeded(seed)
    successors = torch.stack([torch.randperm(vocab, generator=gen)[:3] for _ in range(vocab)])
    out = torch.zeros(rows, length, dtype=torch.long)
    for b in range(rows):
        x = int(torch.randint(0, vocab, (1,), generator=gen))
        for i in range(length):
            out[b, i] = x
            r = float(torch.rand(1, generator=gen, dtype=F64))
            if r < 0.95:
                x = int(successors[x, int(r >= 0.6) + int(r >= 0.85)])
            else:
                x = int(torch.randint(0, vocab, (1,), generator=gen))
    return out


def make_curves():
    steps = 50
    base = dict(vocab=29, dim=16, heads=2, layers=2, inner=32, span=64, ramp=8, batch=4, block=16,
                adapt_span=True, span_loss=1e-3)
    adagrad = dict(kind="adagrad", lr=0.07, clip=0.03, warmup=10)
    adam = dict(kind="adam", lr=3e-3, clip=1.0, warmup=0)
    for name, literal, optim, extra in (
            ("curve", False, adagrad, {}), ("curve_ref", True, adagrad, {}),
            ("curve_adam", False, adam,
             dict(pers=4, adapt_io=True, tied=True, divval=2, cutoffs=[10, 20]))):
        cfg = Config(**base, **extra).set_mode(literal)
        cfg.blocks = steps
        params = fill_init(cfg, seeded(301), span_init=0.3)
        tokens = markov_tokens(cfg.vocab, cfg.batch, 51 * cfg.block + 1, 302)
        final, losses, spans = train(cfg, params, tokens, steps, Optimiser(**optim))
        no_near_ties(spans, cfg.span)
        t = prefixed("param.", params)
        t["tokens"], t["losses"], t["spans"] = tokens, losses, spans
        for l in range(cfg.layers):
            t[f"span_final.{l}"] = spans[-1, l]
        t.update(prefixed("final.", final))
        meta = cfg.metadata()
        meta.update(steps=steps, optim=optim["kind"], lr=repr(optim["lr"]),
                    clip=repr(optim["clip"]), warmup=optim["warmup"], beta1="0.9", beta2="0.999",
                    adam_eps="1e-08")
        FILES.write(name, t, meta)
        print(f"    loss {losses[0]:.4f} -> {losses[-1]:.4f}, z {spans[-1].flatten().tolist()}")


# -------------------------------------------------- optimisers

OPTIMISERS = OrderedDict([
    ("sgd", dict(kind="sgd", lr=0.1, momentum=0.9)),
    ("sgd_clip", dict(kind="sgd", lr=0.1, momentum=0.9, clip=0.5)),
    ("adam", dict(kind="adam", lr=0.01)),
    ("adam_clip", dict(kind="adam", lr=0.01, clip=0.5)),
    ("adamw", dict(kind="adamw", lr=0.01, weight_decay=0.01)),
    ("adamw_clip", dict(kind="adamw", lr=0.01, weight_decay=0.01, clip=0.5)),
    ("adagrad", dict(kind="adagrad", lr=0.07)),
    ("adagrad_clip", dict(kind="adagrad", lr=0.07, clip=0.5)),
    ("adagrad_warm", dict(kind="adagrad", lr=0.07, clip=0.03, warmup=4)),
])


def make_optimisers():
    gen = seeded(401)
    steps = 6
    t = OrderedDict()
    start = {"p0": normal(gen, 3, 5), "p1": normal(gen, 7)}
    # gradients of varying size, so that a clip of 0.5 acts in some steps only
    size = [0.05, 1.0, 0.1, 0.3, 2.0, 0.02]
    grads = {k: torch.stack([normal(gen, *v.shape, scale=size[n]) for n in range(steps)])
             for k, v in start.items()}
    for k in start:
        t[k + ".init"], t[k + ".grad"] = start[k], grads[k]
    meta = OrderedDict(steps=steps)
    for name, options in OPTIMISERS.items():
        params = OrderedDict((k, v.clone()) for k, v in start.items())
        opt, trace = Optimiser(**options), {k: [] for k in start}
        for n in range(steps):
            opt.step(params, {k: grads[k][n] for k in start})
            for k in start:
                trace[k].append(params[k].clone())
        for k in start:
            t[f"{name}.{k}"] = torch.stack(trace[k])
        full = dict(lr=0.0, clip=0.0, warmup=0, momentum=0.0, weight_decay=0.0, beta1=0.9,
                    beta2=0.999, eps=1e-8)
        if options["kind"] == "adagrad":
            full["eps"] = 1e-10
        full.update({k: v for k, v in options.items() if k != "kind"})
        meta[name + ".kind"] = options["kind"]
        for k, v in full.items():
            meta[f"{name}.{k}"] = repr(v)
    # the specification's own sequence: lr 0.07, clip 0.03, warm-up 4
    params = OrderedDict(p=torch.tensor([1., -2., .5], dtype=F64), q=torch.tensor([.1], dtype=F64))
    opt, trace = Optimiser("adagrad", 0.07, clip=0.03, warmup=4), {"p": [], "q": []}
    t["spec.p.init"], t["spec.q.init"] = params["p"].clone(), params["q"].clone()
    t["spec.p.grad"] = torch.tensor(T_ADAGRAD_P, dtype=F64)
    t["spec.q.grad"] = torch.tensor(T_ADAGRAD_Q, dtype=F64)[:, None]
    for n in range(5):
        opt.step(params, {"p": t["spec.p.grad"][n], "q": t["spec.q.grad"][n]})
        for k in trace:
            trace[k].append(params[k].clone())
    for k in trace:
        t["spec." + k] = torch.stack(trace[k])
    # global norm clip alone: gradients after clipping to 0.5, and the norm before
    clipped = {k: [] for k in start}
    norms = []
    for n in range(steps):
        moved = [leaf(v) for v in start.values()]
        for p, k in zip(moved, start):
            p.grad = grads[k][n].clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(moved, 0.5)))
        for p, k in zip(moved, start):
            clipped[k].append(p.grad.clone())
    t["clip.norm"] = torch.tensor(norms, dtype=F64)
    for k in start:
        t["clip." + k] = torch.stack(clipped[k])
    meta["clip.max_norm"] = "0.5"
    FILES.write("optim", t, meta)


# -------------------------------------------------- elementary ops

def make_ops():
    gen = seeded(501)
    t = OrderedDict()

    def op(name, fn, **inputs):
        """Stores inputs, result and gradients; integer inputs are stored only."""
        p = OrderedDict((k, leaf(v) if v.is_floating_point() else v) for k, v in inputs.items())
        y = fn(**p)
        for k, v in inputs.items():
            t[f"{name}.{k}"] = v
        t[f"{name}.y"] = y.detach().reshape(-1) if y.dim() == 0 else y.detach()
        if y.dim() == 0:
            y.backward()
        else:
            dy = normal(gen, *y.shape)
            t[f"{name}.dy"] = dy
            y.backward(dy)
        for k, v in p.items():
            if v.is_floating_point():
                t[f"{name}.d{k}"] = v.grad

    def x(*shape, scale=1.0):
        return normal(gen, *shape, scale=scale)

    op("layernorm", lambda x, w, b: F.layer_norm(x, (13,), w, b, 1e-5), x=x(7, 13),
       w=1 + x(13, scale=0.25), b=x(13))
    op("layernorm_plain", lambda x: F.layer_norm(x, (9,), None, None, 1e-5), x=x(5, 9))
    op("softmax", lambda x: torch.softmax(x, -1), x=x(5, 17, scale=3.0))
    op("log_softmax", lambda x: torch.log_softmax(x, -1), x=x(5, 17, scale=3.0))
    wide = torch.cat([x(4, 19, scale=2.0), torch.linspace(-9, 9, 19, dtype=F64)[None]])
    op("gelu", lambda x: F.gelu(x), x=wide)
    op("tanh", lambda x: torch.tanh(x), x=wide)
    op("sigmoid", lambda x: torch.sigmoid(x), x=wide)
    op("relu", lambda x: torch.relu(x), x=wide)
    op("silu", lambda x: F.silu(x), x=wide)
    labels = torch.randint(0, 23, (11,), generator=gen)
    op("cross_entropy", lambda x, target: F.cross_entropy(x, target), x=x(11, 23, scale=2.0),
       target=labels)
    op("mse", lambda x, target: ((x - target) ** 2).mean(), x=x(6, 7), target=x(6, 7))
    op("linear", lambda x, w, b: F.linear(x, w, b), x=x(9, 13), w=x(17, 13), b=x(17))
    op("linear_nobias", lambda x, w: F.linear(x, w), x=x(3, 5, 11), w=x(7, 11))
    op("embedding", lambda ids, w: F.embedding(ids, w),
       ids=torch.randint(0, 11, (3, 8), generator=gen), w=x(11, 5))
    FILES.write("ops", t, OrderedDict(layernorm_eps="1e-5", gelu="erf", layout="w is (out,in); "
                                      "y = x w^T + b"))


if __name__ == "__main__":
    FILES.make(dict(models=make_models, attention=make_attention, curves=make_curves,
                    optimisers=make_optimisers, ops=make_ops), sys.argv[1:])
    assert FILES.bytes < 3_000_000
