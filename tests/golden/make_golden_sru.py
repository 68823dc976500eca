#!/usr/bin/env python3
"""Writes the golden vectors of SRU and SRU++, which README_sru.md describes.

    python3 make_golden_sru.py              all files, into this directory
    python3 make_golden_sru.py cell lm      some families: cell attn stack lm curve optim
    python3 make_golden_sru.py --out DIR    into another directory
"""
import math
import sys
from collections import OrderedDict

import torch

sys.dont_write_bytecode = True
import sru_oracle as so
from common import (F64, GoldenFiles, f32, in_float32, largest, normal, prefixed, relative_errors,
                    seeded, steps_of, uniform)

FILES = GoldenFiles("sru_", limit=150_000)
TOLERANCE = 4e-6        # limit of the float32 difference, relative to the largest entry of a tensor


def write(name, inputs, meta, run, tolerance=TOLERANCE):
    """Writes the inputs and the results run(inputs, meta), and compares the results with
    those in float32."""
    results = run(inputs, meta)
    worst, where = largest(relative_errors(results, run(in_float32(inputs), meta)))
    if tolerance:
        assert worst < tolerance, (name, worst, where)
        FILES.worst = max(FILES.worst, worst)
    FILES.write_results(name, inputs, results, meta, worst, where)
    return results


# -------------------------------------------------- cell

def pad_pattern(kind, B, T, gen):
    pad = torch.zeros(B, T, dtype=torch.int32)
    if "front" in kind:
        pad[0, :max(1, T // 3)] = 1
    if "middle" in kind:
        pad[B - 1, T // 3:T // 3 + max(1, T // 4)] = 1
    if "tail" in kind:
        pad[B // 2, T - max(1, T // 3):] = 1
    if "row" in kind:
        pad[0, :] = 1
    if "random" in kind:
        pad |= (torch.rand(B, T, generator=gen) < 0.25).to(torch.int32)
    return pad


def cell_inputs(gen, B, T, H, D=1, k=3, skip=1, V=0, p=0.0, pad="", v_scale=1.0, vf_zero=0,
                u_scale=1.0, bias_r=-0.5):
    O = D * H
    t = OrderedDict()
    t["U"] = normal(gen, B, T, k, O, scale=u_scale)
    if k == 3 and skip:
        t["xr"] = normal(gen, B, T, O)
    t["v"] = uniform(gen, 2, O, low=-v_scale, high=v_scale)
    if vf_zero:
        t["v"][0] = 0
    t["bias"] = f32(normal(gen, 2, O, scale=0.3) + torch.tensor([[0.0], [bias_r]], dtype=F64))
    if V:
        t["V"] = normal(gen, B, T, 2, O, scale=0.5)
    t["c0"] = normal(gen, B, O, scale=0.7)
    if p:
        t["m"] = f32((torch.rand(B, O, generator=gen) >= p).to(F64) / (1 - p))
    if pad:
        t["pad"] = pad_pattern(pad, B, T, gen)
    t["G"] = normal(gen, B, T, O)
    t["Glast"] = normal(gen, B, O)
    return t


def cell_meta(t, H, D, k, tanh, skip, alpha):
    B, T = t["U"].shape[:2]
    return OrderedDict(B=B, T=T, H=H, D=D, k=k, tanh=int(tanh), skip=int(skip),
                       alpha=repr(float(alpha)))


CELLS = [
    dict(B=2, T=1, H=3),
    dict(B=1, T=1, H=1, D=2, k=4, tanh=1),
    dict(B=3, T=2, H=7, alpha=1.7),
    dict(B=2, T=17, H=17, p=0.2, alpha=1.25),
    dict(B=2, T=17, H=7, D=2, pad="middle"),
    dict(B=2, T=17, H=7, D=2, k=4, pad="front"),
    dict(B=3, T=17, H=3, tanh=1, pad="row"),
    dict(B=3, T=17, H=3, D=2, k=4, tanh=1, p=0.5, pad="front,tail"),
    dict(B=2, T=17, H=5, skip=0),
    dict(B=2, T=9, H=7, D=2, skip=0, tanh=1, p=0.25, pad="random"),
    dict(B=1, T=70, H=7),
    dict(B=1, T=70, H=3, D=2, k=4, p=0.5, pad="middle"),
    dict(B=2, T=70, H=1, D=2, pad="row,random", alpha=1.5),
    dict(B=2, T=17, H=7, V=1),
    dict(B=2, T=17, H=3, D=2, k=4, V=1, p=0.2, pad="front,middle"),
    dict(B=1, T=70, H=5, V=1, skip=0, tanh=1),
    dict(B=2, T=8, H=33, alpha=1.1),
    dict(B=1, T=9, H=33, k=4, p=0.5),
    dict(B=2, T=2, H=33, D=2, k=4, tanh=1, pad="tail"),
    dict(B=3, T=34, H=7, v_scale=0.0),
    dict(B=2, T=20, H=4, v_scale=5.0, u_scale=2.0),
    dict(B=5, T=17, H=3, D=2, V=1, p=0.3, tanh=1, pad="row,middle,tail,random", alpha=1.7),
    dict(B=2, T=40, H=3, D=2, k=4, vf_zero=1, p=0.5, pad="front,middle"),
]


def make_cells():
    for name, case in so.appendix_cells().items():
        write("cell_" + name, case[0], case[1], so.run_cell)
    for i, case in enumerate(CELLS):
        case = dict(case)
        tanh, alpha = case.pop("tanh", 0), case.pop("alpha", 1.0)
        gen = seeded(1000 + i)
        t = cell_inputs(gen, **case)
        H, D, k, skip = case["H"], case.get("D", 1), case.get("k", 3), case.get("skip", 1)
        meta = cell_meta(t, H, D, k, tanh, skip, float(torch.tensor(alpha, dtype=torch.float32)))
        write(f"cell_{i + 1:02d}", t, meta, so.run_cell)
        if case.get("v_scale", 1.0) > 2:
            back = so.cell_backward(t["U"], t.get("xr"), t["v"], t["bias"], t["c0"], H, D, t["G"],
                                    t["Glast"])
            print(f"                   largest |J| {back['largest_J']:.2f}")
            assert back["largest_J"] > 1.5


# -------------------------------------------------- attention transform

def attn_inputs(gen, B, T, I, P, O, k, Tm=0, attention=1, norm="none", pad="", memory_pad=""):
    t = OrderedDict()
    t["x"] = normal(gen, B, T, I)
    if Tm:
        t["memory"] = normal(gen, B, Tm, I)
    t["w1"] = normal(gen, P, I, scale=1 / math.sqrt(I))
    if attention:
        t["w2"] = normal(gen, 2 * P, P, scale=1 / math.sqrt(P))
    t["w3"] = normal(gen, k * O, P, scale=1 / math.sqrt(P))
    if attention:
        t["alpha"] = uniform(gen, 1, low=0.3, high=0.7)
    if norm != "none":
        t["gain"] = f32(1 + normal(gen, P, scale=0.2))
        t["shift"] = normal(gen, P, scale=0.2)
    if pad:
        t["pad"] = pad_pattern(pad, B, T, gen)
    if memory_pad:
        t["memory_pad"] = pad_pattern(memory_pad, B, Tm, gen)
    t["G"] = normal(gen, B, T, k, O)
    return t


ATTENTIONS = [
    dict(B=2, T=5, I=6, P=4, H=6),
    dict(B=2, T=6, Tm=6, I=6, P=4, H=6, heads=2, norm="post"),
    dict(B=3, T=5, Tm=7, I=7, P=9, H=5, heads=3, norm="pre"),
    dict(B=3, T=7, Tm=5, I=6, P=6, H=3, D=2, heads=2, norm="post", causal=0, pad="tail,middle",
         memory_pad="front"),
    dict(B=2, T=8, I=6, P=4, H=6, heads=2, norm="post", pad="front"),
    dict(B=3, T=6, Tm=5, I=5, P=6, H=5, heads=3, norm="pre", window=2, pad="front",
         memory_pad="row,tail"),
    dict(B=2, T=5, Tm=9, I=5, P=8, H=4, k=4, heads=2, norm="post", window=4),
    dict(B=3, T=1, Tm=6, I=6, P=6, H=6, heads=2, norm="post"),
    dict(B=2, T=1, I=6, P=4, H=6),
    dict(B=2, T=5, I=9, P=4, H=5, k=4, attention=0),
    dict(B=2, T=5, I=6, P=7, H=3, D=2, attention=0, norm="post"),
    dict(B=2, T=9, Tm=4, I=6, P=4, H=3, D=2, causal=0, norm="pre"),
    dict(B=1, T=17, Tm=20, I=11, P=7, H=11, norm="post", window=20),
    dict(B=2, T=5, Tm=3, I=6, P=6, H=6, heads=3, pad="row", memory_pad="row"),
    dict(B=2, T=6, Tm=7, I=6, P=6, H=6, heads=2, norm="post", memory_pad="random,front"),
    dict(B=3, T=6, Tm=5, I=5, P=6, H=5, heads=2, norm="post", window=5, pad="tail",
         memory_pad="front", literal_mask=1),
    dict(B=3, T=8, I=6, P=4, H=6, heads=2, norm="post", pad="front,tail", literal_mask=1, leaks=1),
    dict(B=2, T=9, Tm=40, I=5, P=6, H=5, heads=3, norm="post", window=33, memory_pad="random"),
]


def make_attn():
    for name, (t, meta) in so.appendix_transforms().items():
        write("attn_" + name, t, meta, so.run_transform)
    for i, case in enumerate(ATTENTIONS):
        case = dict(dict(D=1, k=3, heads=1, norm="none", causal=1, window=0, attention=1,
                         literal_mask=0, leaks=0), **case)
        gen = seeded(2000 + i)
        opts = {n: case.pop(n) for n in ("H", "D", "k", "heads", "norm", "causal", "window",
                                         "attention", "literal_mask")}
        leaks = case.pop("leaks")
        t = attn_inputs(gen, O=opts["H"] * opts["D"], k=opts["k"], attention=opts["attention"],
                        norm=opts["norm"], **case)
        # where the literal mask exposes the future, adding -10000 costs float32 three
        # digits
        r = write(f"attn_{i + 1:02d}", t, so.transform_meta(t, **opts), so.run_transform, None
                  if leaks else TOLERANCE)
        if opts["literal_mask"]:
            other = so.run_transform(t, so.transform_meta(t, **dict(opts, literal_mask=0)))
            gap = float((other["U"] - r["U"]).abs().max())
            print(f"                   boolean mask differs by {gap:.1e}")
            assert (gap > 0.01) == bool(leaks) and (leaks or gap == 0)


# -------------------------------------------------- stacks

def P(**fields):
    """Options of an SRU++ stack."""
    return dict(attention=1, highway_bias=-1.0, **fields)


STACKS = [      # (configuration, segments, options: B, c0, pad)
    (dict(input=6, hidden=6, layers=1), "9", dict(c0=1)),
    (dict(input=5, hidden=4, layers=2, bidirectional=1), "5,5,3", dict(c0=1)),
    (dict(input=5, hidden=7, layers=3, input_first=1), "6,4", dict(pad="random")),
    (dict(input=6, hidden=6, layers=2, proj="4"), "7", dict()),
    (dict(input=5, hidden=9, layers=3, proj="8,0,6"), "4,5", dict(c0=1)),
    (dict(input=8, hidden=4, layers=2, bidirectional=1, norm="pre"), "5,5", dict(pad="front,tail")),
    (dict(input=5, hidden=6, layers=2, norm="post"), "5,6", dict(pad="middle,tail")),
    (dict(input=5, hidden=3, layers=3, bidirectional=1, norm="post", zero_pads=1), "5,6",
     dict(pad="random")),
    (dict(input=7, hidden=7, layers=3, rescale=1, highway_bias=-2.0), "12", dict(c0=1)),
    (dict(input=4, hidden=7, layers=2, rescale=1, highway_bias=-1.0, tanh=1), "5,1", dict()),
    (dict(input=5, hidden=3, layers=2, bidirectional=1, skip=0, rescale=1, highway_bias=-1.0), "8",
     dict(c0=1, pad="tail")),
    (dict(input=6, hidden=6, layers=3, tanh=1), "4,4,4", dict(pad="row", B=3)),
    (dict(input=4, hidden=7, layers=2, v1=1), "6,5", dict(c0=1)),
    (dict(input=5, hidden=4, layers=3, bidirectional=1, input_first=1, proj="5", norm="pre",
          rescale=1, tanh=1, highway_bias=-1.0), "6,7", dict(c0=1, pad="random")),
    (P(input=6, hidden=6, layers=2, proj="4"), "5,5,3", dict(c0=1)),
    (P(input=6, hidden=6, layers=4, proj="4", attn_every=2), "5,1,4", dict()),
    (P(input=6, hidden=6, layers=3, proj="5", attn_last=1), "4,6", dict(c0=1)),
    (P(input=6, hidden=6, layers=2, proj="4", norm="pre"), "5,5,3", dict(c0=1)),
    (P(input=6, hidden=6, layers=2, proj="4", norm="pre", literal_norm=1), "5,5,3", dict(c0=1)),
    (P(input=6, hidden=6, layers=2, proj="6", heads=2, norm="post"), "5,6",
     dict(pad="front,tail", B=3)),
    (P(input=7, hidden=7, layers=2, proj="6", heads=3, attn_norm=0), "6,3", dict()),
    (P(input=6, hidden=6, layers=3, proj="6", heads=2, attn_pre=1, attn_every=2), "5,4",
     dict(c0=1)),
    (P(input=6, hidden=3, layers=2, proj="4", bidirectional=1, causal=0), "6,5",
     dict(pad="tail,random", B=3)),
    (P(input=5, hidden=5, layers=2, proj="4", window=5), "9,9,4", dict()),
    (P(input=4, hidden=7, layers=2, proj="4", rescale=1), "5,4", dict(c0=1)),
    (P(input=4, hidden=6, layers=2, proj="4,6", input_first=1, norm="pre", heads=2, window=3,
       rescale=1), "4,5", dict(pad="front,middle")),
    (P(input=5, hidden=4, layers=3, proj="4", bidirectional=1, causal=0, norm="post", zero_pads=1,
       attn_last=2), "4,3,4", dict(pad="random,row")),
]


def stack_inputs(cfg, gen, segments, B=2, c0=0, pad="", shared=None):
    total, last = sum(segments), segments[-1]
    t = prefixed("param.", so.fill(so.stack_shapes(cfg), gen, cfg.highway_bias))
    t["x"] = normal(gen, B, total, cfg.input)
    if pad:
        t["pad"] = pad_pattern(pad, B, total, gen)
    if c0:
        t["c0"] = normal(gen, cfg.layers, B, cfg.O, scale=0.7)
    t["G"] = normal(gen, B, last, cfg.O)
    t["Glast"] = normal(gen, cfg.layers, B, cfg.O)
    return t


def make_stacks():
    for i, (fields, segments, options) in enumerate(STACKS):
        cfg = so.Stack(**fields)
        # the literal case has the inputs of the previous one
        seed = 3000 + i - (1 if cfg.literal_norm else 0)
        meta = cfg.metadata()
        meta["segments"] = segments
        t = stack_inputs(cfg, seeded(seed), so.lengths(meta), **options)
        write(f"stack_{i + 1:02d}", t, meta, so.run_stack)


# -------------------------------------------------- language models

LMS = [
    (dict(vocab=29, dim=12, layers=3, proj="6", attention=1, highway_bias=-2.0), "6,6,4", 1),
    (dict(vocab=29, dim=12, layers=3, proj="6", attention=1, highway_bias=-2.0, window=6),
     "6,6,4", 1),
    (dict(vocab=23, dim=9, emb=5, layers=3, highway_bias=-3.0), "7,7,5", 2),
    (dict(vocab=31, dim=9, layers=2, tied=1, v1=1, highway_bias=-3.0), "8,8", 3),
    (dict(vocab=50, dim=10, layers=2, proj="6", heads=2, attention=1, highway_bias=-2.0, tied=1,
          cutoffs="11,30", n_e=12, div_val=2), "7,7,4", 4),
    (dict(vocab=53, dim=12, layers=2, proj="4", attention=1, highway_bias=-2.0, tied=1,
          cutoffs="13,20,37", n_e=8, div_val=2, separate_projs=1, window=8), "6,9", 5),
    (dict(vocab=19, dim=10, layers=4, proj="5", attention=1, attn_every=2, highway_bias=-2.0),
     "6,5,6", 46),
    (dict(vocab=21, dim=8, emb=6, layers=3, proj="4", attention=1, attn_last=2, norm="pre",
          rescale=1, highway_bias=-1.0), "5,5,5", 27),
]


def make_lms():
    for i, (fields, segments, seed) in enumerate(LMS):
        cfg = so.LM(**fields).finish()
        gen = seeded(4000 + seed)
        meta = cfg.metadata()
        meta["segments"] = segments
        t = prefixed("param.", so.fill(so.lm_shapes(cfg), gen, cfg.highway_bias))
        total = sum(so.lengths(meta))
        t["tokens"] = torch.randint(0, cfg.vocab, (cfg.batch, total + 1),
                                    generator=gen).to(torch.int32)
        write(f"lm_{i + 1:02d}", t, meta, so.run_lm)


# -------------------------------------------------- training, optimisers

def make_curves():
    steps, T = 30, 12
    for kind, lr in (("radam", 0.1), ("adamw", 0.01)):
        cfg = so.LM(vocab=17, dim=24, layers=2, proj="8", attention=1, highway_bias=-2.0,
                    batch=3).finish()
        gen = seeded(5000)
        meta = cfg.metadata()
        meta.update(steps=steps, block=T, optim=kind, lr=repr(lr), clip="1.0", weight_decay="0.1",
                    beta1="0.9", beta2="0.999", eps="1e-08", warmup=5, max_iter=30)
        t = prefixed("param.", so.fill(so.lm_shapes(cfg), gen, cfg.highway_bias))
        t["param.out_emb.weight"] *= 2          # so that the clip acts in some updates
        t["tokens"] = steps_of(1, 4, 3, steps * T + 1, 17, gen)
        r = write("curve_" + kind, t, meta, so.run_curve)
        print("                   loss", " ".join(f"{x:.3f}" for x in r["loss"][::5].tolist()),
              f"{float(r['loss'][-1]):.3f}", "norm",
              f"{float(r['norm'].min()):.2f}..{float(r['norm'].max()):.2f},",
              int((r["norm"] > 1).sum()), "clipped")
        assert 0 < int((r["norm"] > 1).sum()) < steps


def make_optim():
    gen = seeded(6000)
    shapes, steps = ((3, 5), (7,), (2, 1, 4)), 12
    t, meta = OrderedDict(), OrderedDict(steps=steps, beta1="0.9", beta2="0.999", eps="1e-08")
    for i, shape in enumerate(shapes):
        t[f"p{i}.init"] = normal(gen, *shape)
        t[f"p{i}.grad"] = normal(gen, steps, *shape, scale=0.5)
    variants = OrderedDict(radam=("radam", 0.1), radam_skip=("radam_skip", 0.1),
                           radam_nodecay=("radam", 0.0), adamw=("adamw", 0.1))
    for v, (kind, wd) in variants.items():
        meta[v + ".kind"], meta[v + ".lr"], meta[v + ".weight_decay"] = kind, "0.05", repr(wd)

    def run(t, meta):
        r = OrderedDict()
        for v in variants:
            opt = so.Optimiser(meta[v + ".kind"],
                               {f"p{i}": t[f"p{i}.init"] for i in range(len(shapes))},
                               float(meta[v + ".weight_decay"]))
            for n in range(steps):
                opt.step({f"p{i}": t[f"p{i}.grad"][n] for i in range(len(shapes))},
                         float(meta[v + ".lr"]))
                for i in range(len(shapes)):
                    r.setdefault(f"{v}.p{i}", []).append(opt.p[f"p{i}"])
        r = OrderedDict((k, torch.stack(x)) for k, x in r.items())
        dtype = t["p0.init"].dtype
        for name, zero in (("cosine.plus1", False), ("cosine.zero", True)):
            r[name] = torch.tensor([so.cosine(n, 0.3, 10, 40, zero) for n in range(41)],
                                   dtype=dtype)
        r["noam"] = torch.tensor([so.noam(n, 3.0, 64, 10) for n in range(1, 41)], dtype=dtype)
        return r
    meta.update([("cosine.lr", "0.3"), ("cosine.warmup", 10), ("cosine.max_iter", 40),
                 ("noam.lr", "3.0"), ("noam.dim", 64), ("noam.warmup", 10)])
    write("optim", t, meta, run)


if __name__ == "__main__":
    FILES.make(OrderedDict(cell=make_cells, attn=make_attn, stack=make_stacks, lm=make_lms,
                           curve=make_curves, optim=make_optim), sys.argv[1:])
