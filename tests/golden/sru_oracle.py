#!/usr/bin/env python3
"""Float64 PyTorch oracle of SRU (Lei et al. 2018, arXiv:1709.02755) and SRU++
(2102.12459).

It covers the cell, the attention transform, stacks, language models and training, and is
written from the specification only: the recurrence is a loop over time, attention is a
loop over batch rows and heads with a dense boolean mask, and all gradients come from
autograd. It is not meant to be fast.

    python3 sru_oracle.py --check    compares with the published test numbers; needs PyTorch 2

Notation: B batch rows, T steps, I input features, H hidden units per direction, D
directions, O = D H, k sub-matrices, P projection width, Tm memory rows. Layouts are
batch-first: U (B,T,k,O) is planar, and so are the rows of w3 (i O + s H + j); v (2,O) =
[vf ; vr], bias (2,O) = [bf ; br]; a custom V (B,T,2,O) is added to v.

Functions compute in the dtype of their arguments. The golden vectors are float64; the
same code in float32 shows the size of rounding errors.
"""
import math
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

sys.dont_write_bytecode = True
from common import (F64, Checker, f32, global_norm, gradients, integers, layer_norm, leaf, leaves,
                    parameters_in, prefixed, randn, seeded)

LITERAL_MASK = -10000.0


# -------------------------------------------------- 1. recurrence

def cell(U, xr, v, bias, c0, H, D, V=None, m=None, pad=None, tanh=False, skip=True, alpha=1.0):
    """The recurrence of one layer (1709.02755, section 2): h (B,T,O), c_last (B,O). xr is
    read only with k = 3 and skip."""
    B, T, k, O = U.shape
    assert O == D * H
    c_last, h = [], []
    for s in range(D):
        own = slice(s * H, s * H + H)
        c = c0[:, own]
        out = [None] * T
        for t in (range(T) if s == 0 else reversed(range(T))):
            u = U[:, t, :, own]
            vf, vr = v[0, own], v[1, own]
            if V is not None:
                vf, vr = vf + V[:, t, 0, own], vr + V[:, t, 1, own]
            f = torch.sigmoid(u[:, 1] + vf * c + bias[0, own])
            # the previous state, not the new one
            r = torch.sigmoid(u[:, 2] + vr * c + bias[1, own])
            new = f * c + (1 - f) * u[:, 0]
            g = torch.tanh(new) if tanh else new
            if not skip:
                xt = torch.zeros_like(g)
            elif k == 4:
                xt = u[:, 3]
            else:
                xt = alpha * xr[:, t, own]
            keep = r if m is None else r * m[:, own]
            y = xt + (g - xt) * keep
            if pad is not None:
                p = pad[:, t].bool()[:, None]
                new = torch.where(p, c, new)
                y = torch.where(p, torch.zeros_like(y), y)
            c, out[t] = new, y
        c_last.append(c)
        h.append(torch.stack(out, 1))
    return torch.cat(h, 2), torch.cat(c_last, 1)


def cell_backward(U, xr, v, bias, c0, H, D, G, Glast, V=None, m=None, pad=None, tanh=False,
                  skip=True, alpha=1.0):
    """The backward pass of appendix 1.5, element by element: a check of autograd and of
    the formulas."""
    B, T, k, O = U.shape
    dU, dxr = torch.zeros_like(U), torch.zeros(B, T, O, dtype=U.dtype)
    dV = torch.zeros(B, T, 2, O, dtype=U.dtype)
    db = torch.zeros(2, O, dtype=U.dtype)
    dc0 = torch.zeros_like(c0)
    largest = 0.0
    for b in range(B):
        for o in range(O):
            order = list(range(T)) if o < H else list(range(T - 1, -1, -1))
            mm = 1.0 if m is None else float(m[b, o])
            steps, c = [], float(c0[b, o])
            for t in order:
                if pad is not None and int(pad[b, t]):
                    steps.append(None)
                    continue
                u = [float(z) for z in U[b, t, :, o]]
                vf, vr = (float(v[g, o]) + (0.0 if V is None else float(V[b, t, g, o]))
                          for g in (0, 1))
                f = 1 / (1 + math.exp(-(u[1] + vf * c + float(bias[0, o]))))
                r = 1 / (1 + math.exp(-(u[2] + vr * c + float(bias[1, o]))))
                steps.append((u, vf, vr, f, r, c))
                c = u[0] + (c - u[0]) * f
                steps[-1] += (c,)
            e = float(Glast[b, o])
            for t, step in zip(reversed(order), reversed(steps)):
                if step is None:
                    continue
                u, vf, vr, f, r, cp, c = step
                g, slope = (math.tanh(c), 1 - math.tanh(c) ** 2) if tanh else (c, 1.0)
                xt = 0.0
                if skip:
                    xt = u[3] if k == 4 else alpha * float(xr[b, t, o])
                gh = float(G[b, t, o])
                dzr = gh * (g - xt) * mm * r * (1 - r)
                a = gh * mm * r * slope + e
                dzf = a * (cp - u[0]) * f * (1 - f)
                dU[b, t, 0, o], dU[b, t, 1, o], dU[b, t, 2, o] = a * (1 - f), dzf, dzr
                if skip and k == 4:
                    dU[b, t, 3, o] = gh * (1 - r * mm)
                elif skip:
                    dxr[b, t, o] = alpha * gh * (1 - r * mm)
                dV[b, t, 0, o], dV[b, t, 1, o] = dzf * cp, dzr * cp
                db[0, o] += dzf
                db[1, o] += dzr
                largest = max(largest, abs(f + vf * (cp - u[0]) * f * (1 - f)))
                e = a * f + dzf * vf + dzr * vr
            dc0[b, o] = e
    return dict(dU=dU, dxr=dxr, dV=dV, dv=dV.sum((0, 1)), dbias=db, dc0=dc0, largest_J=largest)


def run_cell(t, meta):
    """Results h, c_last and gradients of a sru_cell file with tensors t."""
    H, D = int(meta["H"]), int(meta["D"])
    skip = bool(int(meta["skip"]))
    x = leaves(OrderedDict((n, t[n]) for n in ("U", "xr", "v", "bias", "V", "c0") if n in t))
    h, c = cell(x["U"], x.get("xr"), x["v"], x["bias"], x["c0"], H, D, V=x.get("V"), m=t.get("m"),
                pad=t.get("pad"), tanh=bool(int(meta["tanh"])), skip=skip,
                alpha=float(meta["alpha"]))
    loss = (t["G"] * h).sum() + (t["Glast"] * c).sum()
    r = OrderedDict(h=h.detach(), c_last=c.detach())
    r.update(prefixed("d", gradients(loss, x)))
    return r


# -------------------------------------------------- published numbers: the cell

def sn(a, b, *shape):
    """sin(a i + b) of the flat index i, in the given shape."""
    i = torch.arange(int(np.prod(shape)), dtype=F64)
    return torch.sin(a * i + b).reshape(shape)


def planar(x, D, H, k):
    """Time-major with (D,H,k) fastest -> (B,T,k,O)."""
    L, B = x.shape[:2]
    return x.reshape(L, B, D * H, k).permute(1, 0, 3, 2).contiguous()


def from_planar(x):
    """(B,T,k,O) -> flat, in the order of the published numbers."""
    return x.permute(1, 0, 3, 2).reshape(-1)


def from_batch_first(x):
    return x.transpose(0, 1).reshape(-1)


def appendix_cells():
    """The three cases of appendix 1.11 in this layout: {name: (tensors, metadata)}."""
    out = OrderedDict()
    for name, L, B, H, D, k, tanh, skip, custom, alpha in (
            ("a", 3, 1, 2, 1, 3, 0, 1, 0, 1.7),
            ("b", 3, 2, 1, 2, 4, 1, 1, 0, 1.0),
            ("c", 3, 1, 1, 2, 3, 0, 0, 1, 1.0)):
        O = D * H
        t = OrderedDict()
        t["U"] = planar(sn(.7, .3, L, B, O * k), D, H, k)
        if k == 3 and skip:
            t["xr"] = sn(1.1, .5, L, B, O).transpose(0, 1).contiguous()
        t["v"] = torch.zeros(2, O, dtype=F64) if custom else .5 * sn(.9, .1, 2, O)
        t["bias"] = .3 * sn(1.3, -.4, 2, O)
        if custom:
            t["V"] = planar(.5 * sn(.37, .2, L, B, O * 2), D, H, 2)
        t["c0"] = .4 * sn(.8, .6, B, O)
        if name == "a":
            t["m"] = (1 + .5 * torch.sin(2 * torch.arange(B * O, dtype=F64))).reshape(B, O)
        if name == "b":
            t["pad"] = torch.tensor([[0, 0], [0, 1], [1, 1]], dtype=torch.int32).t().contiguous()
        t["G"] = sn(.45, .25, L, B, O).transpose(0, 1).contiguous()
        t["Glast"] = sn(.95, .15, B, O)
        meta = OrderedDict(B=B, T=L, H=H, D=D, k=k, tanh=tanh, skip=skip, alpha=repr(alpha))
        out[name] = (t, meta)
    return out


def numbers(text):
    return [float(x) for x in text.split()]


CELL_EXPECT = {
    "a": dict(
        h="0.365896053 1.103440077 0.045554196 0.544602301 -1.094807974 -0.441036741",
        c_last="0.049609114 -0.417302644",
        dU="""
            0.090475563 -0.004261354 -0.023037973 0.692191915 -0.118541699 -0.252284352
            0.594623417 0.197794661 -0.312934775 0.369319359 0.055887305 0.435884128
            0.236999765 -0.145366203 0.339745400 0.758074306 0.427276140 0.012102453""",
        dxr="0.087201442 0.549141731 0.781197767 -0.092408051 1.003833611 0.418467650",
        dv="0.141919273 0.179223866 -0.302041713 0.125932510",
        dbias="0.048167103 0.364621745 0.003772652 0.195702229",
        dc0="0.177745606 0.985249176"),
    "b": dict(
        h="0.333007461 -0.571389929 0.229854737 -0.559583299 0.011523229 -0.078549758 0 0 0 0 0 0",
        c_last="-0.441236802 0.276128887 0.011382027 0.317003599",
        dU="""
            0.103825042 -0.004890108 -0.017566254 0.051294966 0.564955590 0.132509330
            0.146615159 0.469822912 0.714235547 0.275165452 -0.154866655 0.203905121
            0.187903461 -0.065008139 0.283363001 0.672507488 0.391737193 0.170098311
            -0.251655004 0.296889509 0.204509740 -0.089801463 0.170055562 0.303911104
            0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0""",
        dv="0.130139588 0.033503334 -0.116567428 0.163323885",
        dbias="0.440373656 -0.022300272 -0.424087913 0.600033722",
        dc0="0.208168873 0.575779699 0.822354004 0.269608543"),
    "c": dict(
        h="0.194881371 0.044504767 -0.305415093 -0.206354001 0.021884954 -0.188835622",
        c_last="0.050428125 0.149890507",
        dU="""
            0.137817995 -0.006514579 0.010365223 0.499262789 -0.262398879 0.020157975
            0.499107772 0.179759226 -0.140862231 0.338386401 -0.206944577 -0.064396819
            0.278803833 -0.170778808 0.010991983 0.659544066 0.285853619 -0.074035931""",
        dV="""
            -0.001471363 0.002341058 0.078725321 -0.006047827 0.044625365 -0.034969157
            0.113307388 0.035258887 0.105433538 -0.006786109 0.112677749 -0.029183475""",
        dbias="0.002465838 -0.183489837 -0.119505025 -0.118274776",
        dc0="0.293059843 0.238703032"),
}


def published_order(key, value):
    if key in ("dU", "dV"):
        return from_planar(value)
    if key in ("h", "dxr"):
        return from_batch_first(value)
    return value.reshape(-1)


def check_cells(report):
    for name, (t, meta) in appendix_cells().items():
        got = run_cell(t, meta)
        for key, text in CELL_EXPECT[name].items():
            want = torch.tensor(numbers(text), dtype=F64)
            report(f"1.11 {name} {key}", published_order(key, got[key]), want, 6e-10)


# -------------------------------------------------- 2. transforms

def allowed_keys(Tq, Tm, causal, window):
    """(Tq,Tm+Tq), True where a query sees a key: row Tm + t against column, both counted
    from the oldest memory row."""
    row = torch.arange(Tm, Tm + Tq)[:, None]
    col = torch.arange(Tm + Tq)[None, :]
    ok = torch.ones(Tq, Tm + Tq, dtype=torch.bool)
    if causal:
        ok &= col <= row
    if window:
        ok &= row - col <= window
    return ok


def attention(q, K, V, heads, ok, key_pad, literal_mask=False):
    """q (B,Tq,P), K and V (B,Tk,P), ok (Tq,Tk), key_pad (B,Tk) or None -> (B,Tq,P). A
    query without keys gives 0."""
    B, Tq, P = q.shape
    e = P // heads
    rows = []
    for b in range(B):
        parts = []
        for a in range(heads):
            own = slice(a * e, a * e + e)
            S = (q[b, :, own] / math.sqrt(e)) @ K[b, :, own].t()
            see = torch.ones_like(ok) if key_pad is None else (
                ~key_pad[b].bool())[None, :].expand_as(ok)
            if literal_mask:
                assert bool(see.any())
                S = S + LITERAL_MASK * (~ok).to(S.dtype)
            else:
                see = see & ok
            some = see.any(1, keepdim=True)
            S = torch.where(some, S.masked_fill(~see, -math.inf), torch.zeros_like(S))
            parts.append((torch.softmax(S, 1) * some) @ V[b, :, own])
        rows.append(torch.cat(parts, 1))
    return torch.stack(rows)


def key_padding(B, Tq, Tm, pad, memory_pad):
    if pad is None and memory_pad is None:
        return None
    new = torch.zeros(B, Tq, dtype=torch.int32) if pad is None else pad
    old = torch.zeros(B, Tm, dtype=torch.int32) if memory_pad is None else memory_pad
    return torch.cat([old, new], 1)


def planes(y, w, k):
    """y w^T with planar rows: (B,T,k,O)."""
    U = y @ w.t()
    return U.reshape(U.shape[0], U.shape[1], k, -1)


def attention_transform(x, memory, w1, w2, w3, alpha, k, heads, norm, gain, shift, causal, window,
                        pad=None, memory_pad=None, literal_mask=False):
    """SRU++'s transform of x (B,Tq,I) and memory (B,Tm,I): U (B,Tq,k,O) (2102.12459,
    section 3)."""
    B, Tq, _ = x.shape
    Tm = 0 if memory is None else memory.shape[1]
    P = w1.shape[0]
    z = (x if memory is None else torch.cat([memory, x], 1)) @ w1.t()
    res = z[:, Tm:]
    if norm == "pre":
        z = layer_norm(z, gain, shift)
    kv = z @ w2.t()
    o = attention(z[:, Tm:], kv[..., :P], kv[..., P:], heads, allowed_keys(Tq, Tm, causal, window),
                  key_padding(B, Tq, Tm, pad, memory_pad), literal_mask)
    y = alpha * o + res
    if norm == "post":
        y = layer_norm(y, gain, shift)
    return planes(y, w3, k)


def projected_transform(x, w1, w3, k, norm, gain, shift):
    """The transform without attention: U = w3 norm(w1 x), (B,T,k,O)."""
    z = x @ w1.t()
    if norm != "none":
        z = layer_norm(z, gain, shift)
    return planes(z, w3, k)


TRANSFORM_LEAVES = ("x", "w1", "w2", "w3", "alpha", "gain", "shift")


def run_transform(t, meta):
    """Results U and the gradients of sum(G U) of a sru_attn file; memory is a
    constant."""
    k = int(meta["k"])
    v = leaves(OrderedDict((n, t[n]) for n in TRANSFORM_LEAVES if n in t))
    gain, shift = v.get("gain"), v.get("shift")
    if int(meta["attention"]):
        U = attention_transform(v["x"], t.get("memory"), v["w1"], v["w2"], v["w3"], v["alpha"], k,
                                int(meta["heads"]), meta["norm"], gain, shift, int(meta["causal"]),
                                int(meta["window"]), t.get("pad"), t.get("memory_pad"),
                                bool(int(meta.get("literal_mask", 0))))
    else:
        U = projected_transform(v["x"], v["w1"], v["w3"], k, meta["norm"], gain, shift)
    r = OrderedDict(U=U.detach())
    r.update(prefixed("d", gradients((t["G"] * U).sum(), v)))
    return r


# -------------------------------------------------- published numbers: attention

def planar_rows(w, k):
    """Row o k + i of (O k,P) becomes row i O + o."""
    return w.reshape(-1, k, w.shape[1]).transpose(0, 1).reshape(w.shape).contiguous()


def published_rows(w, k):
    """The inverse of planar_rows."""
    return w.reshape(k, -1, w.shape[1]).transpose(0, 1).reshape(w.shape)


def appendix_transforms():
    """The two cases of appendix 2.9: {name: (tensors, metadata)}. O k = 6 is read as k =
    3, H = 2, one direction."""
    out = OrderedDict()
    i = torch.arange(4, dtype=F64)
    for norm in ("post", "pre"):
        t = OrderedDict()
        t["x"] = sn(1.1, .5, 3, 1, 3).transpose(0, 1).contiguous()
        t["memory"] = sn(.8, .4, 2, 1, 3).transpose(0, 1).contiguous()
        t["w1"] = sn(.6, .2, 4, 3)
        t["w2"] = sn(.7, .2, 8, 4)
        t["w3"] = planar_rows(sn(.8, .2, 6, 4), 3)
        t["alpha"] = torch.tensor([.5], dtype=F64)
        t["gain"], t["shift"] = 1 + .2 * torch.sin(i), .1 * torch.cos(i)
        t["G"] = planar(sn(.45, .25, 3, 1, 6), 1, 2, 3)
        out[norm] = (t, transform_meta(t, heads=2, norm=norm, causal=1, window=0, attention=1, k=3,
                                       H=2, D=1))
    return out


def transform_meta(t, heads, norm, causal, window, attention, k, H, D, literal_mask=0):
    B, Tq, I = t["x"].shape
    return OrderedDict(B=B, T=Tq, memory_rows=t["memory"].shape[1] if "memory" in t else 0, I=I,
                       P=t["w1"].shape[0], heads=heads, norm=norm, causal=int(causal),
                       window=window, attention=int(attention), k=k, H=H, D=D,
                       literal_mask=int(literal_mask))


TRANSFORM_EXPECT = {
    "post": dict(
        U="""
            -0.686781228 0.590533136 -0.492271061 0.392330122 -0.291051160 0.188779584
            0.794829901 -0.702144581 0.607064634 -0.509914323 0.411024976 -0.310733850
            -0.395433823 0.295139700 -0.193839018 0.091877259 0.010397843 -0.112637484""",
        dx="""
            -0.132166458 -0.020392691 0.098504830 0.455610400 -0.021675822 -0.491390055
            -0.404471867 0.198736828 0.732521032""",
        dalpha="-0.186778974",
        dgain="-0.276695400 -1.794247743 2.299169065 0.025831086",
        dshift="-0.188851165 -0.444458918 -0.430463855 -0.155355194",
        dw1="-0.005688257", dw2="-0.426820974", dw3="2.081998769"),
    "pre": dict(
        U="""
            -0.772078072 0.659446107 -0.544565136 0.427826953 -0.309629688 0.190376447
            0.814732294 -0.682595610 0.548130968 -0.411796955 0.274058529 -0.135385440
            -0.535279887 0.430207109 -0.323667132 0.216023304 -0.107642741 -0.001104933""",
        dx="""
            -0.073931632 -0.019821838 0.041212294 0.223545904 -0.100324765 -0.389149108
            -0.217834192 0.210441461 0.565203856""",
        dalpha="0.504043585",
        dw1="-6.499584927", dw2="-0.515321794", dw3="2.928147921"),
}


def checksum(w):
    return (w.reshape(-1) * torch.cos(.1 * torch.arange(w.numel(), dtype=F64))).sum().reshape(1)


def check_transforms(report):
    for name, (t, meta) in appendix_transforms().items():
        got = run_transform(t, meta)
        for key, text in TRANSFORM_EXPECT[name].items():
            value = got[key]
            if key == "U":
                value = from_planar(value)
            elif key == "dx":
                value = from_batch_first(value)
            elif key == "dw3":
                value = checksum(published_rows(value, 3))
            elif key in ("dw1", "dw2"):
                value = checksum(value)
            report(f"2.9 {name} {key}", value.reshape(-1),
                   torch.tensor(numbers(text), dtype=F64), 6e-10)


# -------------------------------------------------- 3. stacks

@dataclass
class Stack:
    input: int = 6
    hidden: int = 6             # per direction
    layers: int = 2
    bidirectional: int = 0
    proj: str = "0"             # one width for all layers, or one per layer; SRU++ requires it
    # 1: SRU++; the two rules below choose the layers that attend
    attention: int = 0
    heads: int = 1
    attn_every: int = 1
    attn_last: int = -1
    attn_norm: int = 1
    attn_pre: int = 0
    norm: str = "none"          # LayerNorm of the cell
    skip: int = 1
    tanh: int = 0
    rescale: int = 0
    highway_bias: float = 0.0
    input_first: int = 0
    causal: int = 1
    window: int = 0
    literal_norm: int = 0
    zero_pads: int = 0
    v1: int = 0

    @property
    def D(self):
        return 2 if self.bidirectional else 1

    @property
    def O(self):
        return self.D * self.hidden

    @property
    def maps_input(self):
        return bool(self.input_first) and self.input != self.O

    def width_in(self, l):
        return self.input if l == 0 and not self.maps_input else self.O

    def k(self, l):
        return 4 if self.skip and self.width_in(l) != self.O else 3

    def width_proj(self, l):
        p = integers(self.proj)
        return p[0] if len(p) == 1 else p[l]

    def attends(self, l):
        if not self.attention:
            return False
        if self.attn_last >= 0:
            return self.layers - l <= self.attn_last
        return (l + 1) % self.attn_every == 0

    @property
    def alpha(self):
        return math.sqrt(1 + 2 * math.exp(self.highway_bias)) if self.rescale and self.skip else 1.0

    def metadata(self):
        out = OrderedDict(self.__dict__)
        out["highway_bias"] = repr(float(self.highway_bias))
        out["attn_norm"] = int(bool(self.attention and self.attn_norm))
        return out

    @classmethod
    def from_metadata(cls, meta):
        kinds = cls.__dataclass_fields__
        return cls(**{n: type(kinds[n].default)(meta[n]) for n in kinds if n in meta})


def stack_shapes(cfg):
    """[(name, shape, kind)] of every parameter."""
    out = []
    if cfg.maps_input:
        out.append(("input.weight", (cfg.O, cfg.input), "linear"))
    for l in range(cfg.layers):
        p, I, P, k = f"layers.{l}.", cfg.width_in(l), cfg.width_proj(l), cfg.k(l)
        if P:
            out.append((p + "w1", (P, I), "linear"))
        if cfg.attends(l):
            out += [(p + "w2", (2 * P, P), "linear"), (p + "alpha", (1,), "alpha")]
        out.append((p + "w3", (k * cfg.O, P or I), "linear"))
        if cfg.attention and cfg.attn_norm:
            out += [(p + "attn_norm.weight", (P,), "gain"), (p + "attn_norm.bias", (P,), "shift")]
        if cfg.norm != "none":
            n = I if cfg.norm == "pre" else cfg.O
            out += [(p + "norm.weight", (n,), "gain"), (p + "norm.bias", (n,), "shift")]
        out += [(p + "v", (2, cfg.O), "v1" if cfg.v1 else "v"), (p + "bias", (2, cfg.O), "bias")]
    return out


def fill(shapes, gen, highway_bias=0.0):
    """Random parameters of sizes that matter, by kind."""
    params = OrderedDict()
    for name, shape, kind in shapes:
        z = randn(gen, *shape)
        if kind == "linear":
            z = z / math.sqrt(shape[1])
        elif kind == "alpha":
            z = 0.3 + 0.4 * torch.rand(*shape, generator=gen, dtype=F64)
        elif kind == "gain":
            z = 1 + 0.2 * z
        elif kind == "shift":
            z = 0.2 * z
        elif kind == "v":
            z = 2 * torch.rand(*shape, generator=gen, dtype=F64) - 1
        elif kind == "v1":
            z = 0 * z
        elif kind == "bias":
            z = 0.3 * z
            z[1] += highway_bias
        elif kind == "table":
            z = 0.8 * z
        elif kind == "small":
            z = 0.1 * z
        else:
            raise ValueError(kind)
        params[name] = f32(z)
    return params


def stack_layer(cfg, p, l, x, c0, pad, memory, memory_pad):
    """One layer: x (B,T,I) -> h (B,T,O), c_last (B,O)."""

    def g(name):
        return p.get(f"layers.{l}.{name}")

    k = cfg.k(l)
    raw = x
    if cfg.norm == "pre":
        x = layer_norm(x, g("norm.weight"), g("norm.bias"))
        if memory is not None and not cfg.literal_norm:
            memory = layer_norm(memory, g("norm.weight"), g("norm.bias"))
    norm = "none"
    if cfg.attention and cfg.attn_norm:
        norm = "pre" if cfg.attn_pre else "post"
    if cfg.attends(l):
        U = attention_transform(x, memory, g("w1"), g("w2"), g("w3"), g("alpha"), k, cfg.heads,
                                norm, g("attn_norm.weight"), g("attn_norm.bias"), cfg.causal,
                                cfg.window, pad, memory_pad)
    elif cfg.width_proj(l):
        U = projected_transform(x, g("w1"), g("w3"), k, norm, g("attn_norm.weight"),
                                g("attn_norm.bias"))
    else:
        U = planes(x, g("w3"), k)
    h, c = cell(U, raw if k == 3 and cfg.skip else None, g("v"), g("bias"), c0, cfg.hidden, cfg.D,
                pad=pad, tanh=bool(cfg.tanh), skip=bool(cfg.skip), alpha=cfg.alpha)
    if cfg.norm == "post":
        h = layer_norm(h, g("norm.weight"), g("norm.bias"))
        if cfg.zero_pads and pad is not None:
            h = torch.where(pad.bool()[..., None], torch.zeros_like(h), h)
    return h, c


def stack_segment(cfg, p, x, c0, pad=None, memory=None, memory_pad=None):
    """One segment: h (B,T,O), c (L,B,O), and the raw inputs of layers with attention, the
    next segment's memory."""
    if cfg.maps_input:
        x = x @ p["input.weight"].t()
    c, kept = [], []
    for l in range(cfg.layers):
        kept.append(x if cfg.attends(l) else None)
        x, last = stack_layer(cfg, p, l, x, c0[l], pad, memory[l] if memory else None, memory_pad)
        c.append(last)
    return x, torch.stack(c), kept


def detached(memory):
    return [None if m is None else m.detach() for m in memory]


def lengths(meta):
    return integers(meta["segments"])


def trained_leaves(cfg, p):
    """Leaves of all parameters, except for v of version 1, which is zero and frozen."""
    return OrderedDict((n, v if cfg.v1 and n.endswith(".v") else leaf(v)) for n, v in p.items())


def trained(p):
    """The parameters that require a gradient."""
    return OrderedDict((n, v) for n, v in p.items() if v.requires_grad)


def run_stack(t, meta):
    """Results of a sru_stack file: all segments with fixed parameters, gradients of the
    last one."""
    cfg, T = Stack.from_metadata(meta), lengths(meta)
    x, pad, p = t["x"], t.get("pad"), parameters_in(t)
    c = t["c0"] if "c0" in t else torch.zeros(cfg.layers, x.shape[0], cfg.O, dtype=x.dtype)
    memory, memory_pad, at, h = None, None, 0, []
    for s, n in enumerate(T):
        part, part_pad = x[:, at:at + n], None if pad is None else pad[:, at:at + n]
        last = s == len(T) - 1
        if last:
            q = OrderedDict(x=leaf(part), c0=leaf(c))
            q.update(prefixed("param.", trained_leaves(cfg, p)))
            y, new, kept = stack_segment(cfg, parameters_in(q), q["x"], q["c0"], part_pad, memory,
                                         memory_pad)
            loss = (t["G"] * y).sum() + (t["Glast"] * new).sum()
            grads = gradients(loss, trained(q))
        else:
            with torch.no_grad():
                y, new, kept = stack_segment(cfg, p, part, c, part_pad, memory, memory_pad)
        c, memory, memory_pad, at = new.detach(), detached(kept), part_pad, at + n
        h.append(y.detach())
    r = OrderedDict(h=torch.cat(h, 1), c_last=c)
    for l, m in enumerate(memory):
        if m is not None:
            r[f"memory.{l}"] = m
    r.update(prefixed("grad.", grads))
    return r


def stack_loss(t, meta):
    """The last segment's loss as a function of its arguments, with the state before it
    held fixed."""
    cfg, T = Stack.from_metadata(meta), lengths(meta)
    x, pad, p = t["x"], t.get("pad"), parameters_in(t)
    c = t["c0"] if "c0" in t else torch.zeros(cfg.layers, x.shape[0], cfg.O, dtype=x.dtype)
    memory, memory_pad, at = None, None, 0
    with torch.no_grad():
        for n in T[:-1]:
            part_pad = None if pad is None else pad[:, at:at + n]
            _, c, memory = stack_segment(cfg, p, x[:, at:at + n], c, part_pad, memory, memory_pad)
            memory_pad, at = part_pad, at + n
        args = OrderedDict([("grad.x", x[:, at:].clone()), ("grad.c0", c.clone())])
        args.update(("grad.param." + n, v.clone()) for n, v in p.items())

        def loss(a):
            q = {n[11:]: v for n, v in a.items() if n.startswith("grad.param.")}
            with torch.no_grad():
                y, new, _ = stack_segment(cfg, q, a["grad.x"], a["grad.c0"], None
                                          if pad is None else pad[:, at:], memory, memory_pad)
            return float((t["G"] * y).sum() + (t["Glast"] * new).sum())
    return args, loss


# -------------------------------------------------- 4. language models

@dataclass
class LM(Stack):
    vocab: int = 17
    dim: int = 12
    emb: int = 0                # 0: dim
    tied: int = 0
    cutoffs: str = ""
    n_e: int = 0
    div_val: int = 1
    separate_projs: int = 0
    batch: int = 2

    def finish(self):
        self.hidden, self.input = self.dim, self.emb or self.dim
        return self

    def ends(self):
        return [0] + integers(self.cutoffs) + [self.vocab]

    def metadata(self):
        out = super().metadata()
        del out["input"], out["hidden"]
        return out

    @classmethod
    def from_metadata(cls, meta):
        return super().from_metadata(meta).finish()


def lm_shapes(cfg):
    d = cfg.dim
    if cfg.cutoffs:
        ends = cfg.ends()
        size = [b - a for a, b in zip(ends, ends[1:])]
        width = [cfg.n_e // cfg.div_val ** i for i in range(len(size))]
        idx = range(len(size))
        out = [(f"out_emb.tables.{i}", (size[i], width[i]), "table") for i in idx]
        out += [(f"out_emb.projs.{i}", (d, width[i]), "linear") for i in idx]
        out += [(f"out_emb.biases.{i}", (size[i],), "small") for i in idx]
        out += [("out_emb.cluster.weight", (len(size) - 1, width[0]), "table"),
                ("out_emb.cluster.bias", (len(size) - 1,), "small")]
        if cfg.separate_projs:
            out += [(f"in_emb.projs.{i}", (d, width[i]), "linear") for i in idx]
    else:
        out = [("in_emb.weight", (cfg.vocab, cfg.emb or d), "table")]
        if not cfg.tied:
            out.append(("out_emb.weight", (cfg.vocab, d), "linear"))
        out.append(("out_emb.bias", (cfg.vocab,), "small"))
    return out + stack_shapes(cfg)


def embed(cfg, p, ids):
    if not cfg.cutoffs:
        return p["in_emb.weight"][ids]
    ends = cfg.ends()
    where = "in_emb" if cfg.separate_projs else "out_emb"
    rows = []
    for y in ids.reshape(-1).tolist():
        i = max(j for j in range(len(ends) - 1) if ends[j] <= y)
        rows.append(p[f"{where}.projs.{i}"] @ p[f"out_emb.tables.{i}"][y - ends[i]])
    return torch.stack(rows).reshape(*ids.shape, cfg.dim)


def log_probs(cfg, p, h):
    if not cfg.cutoffs:
        w = p["in_emb.weight"] if cfg.tied else p["out_emb.weight"]
        return torch.log_softmax(h @ w.t() + p["out_emb.bias"], -1)
    K = len(cfg.ends()) - 2
    first = h @ p["out_emb.projs.0"]
    head = torch.cat([first @ p["out_emb.tables.0"].t() + p["out_emb.biases.0"],
                      first @ p["out_emb.cluster.weight"].t() + p["out_emb.cluster.bias"]], -1)
    head = torch.log_softmax(head, -1)
    rows = head.shape[-1]
    parts = [head[..., :rows - K]]
    for i in range(1, K + 1):
        tail = h @ p[f"out_emb.projs.{i}"] @ p[f"out_emb.tables.{i}"].t() + p[f"out_emb.biases.{i}"]
        # cluster i has the i-th column from the end
        parts.append(head[..., rows - i, None] + torch.log_softmax(tail, -1))
    return torch.cat(parts, -1)


def lm_segment(cfg, p, ids, targets, c, memory):
    h, c, kept = stack_segment(cfg, p, embed(cfg, p, ids), c, None, memory, None)
    logp = log_probs(cfg, p, h)
    nll = -logp.gather(-1, targets[..., None]).mean()
    return nll, logp, c.detach(), detached(kept)


def run_lm(t, meta):
    cfg, T = LM.from_metadata(meta), lengths(meta)
    p, ids = parameters_in(t), t["tokens"].long()
    dtype = next(iter(p.values())).dtype
    c, memory, at, nll = torch.zeros(cfg.layers, ids.shape[0], cfg.O, dtype=dtype), None, 0, []
    for s, n in enumerate(T):
        q = trained_leaves(cfg, p)
        loss, logp, c, memory = lm_segment(cfg, q, ids[:, at:at + n], ids[:, at + 1:at + n + 1],
                                           c, memory)
        nll.append(loss.detach())
        at += n
    r = OrderedDict(nll=torch.stack(nll), logits=logp.detach())
    for l in range(cfg.layers):
        r[f"c.{l}"] = c[l]
        if memory[l] is not None:
            r[f"memory.{l}"] = memory[l]
    r.update(prefixed("grad.", gradients(loss, trained(q))))
    return r


# -------------------------------------------------- 5. optimisers, schedules

def radam_rho(t, beta2=0.999):
    limit = 2 / (1 - beta2) - 1
    return limit, limit - 2 * t * beta2 ** t / (1 - beta2 ** t)


class Optimiser:
    """radam (un-normalised while rho < 5), radam_skip (no update then; 1908.03265), adamw
    (1711.05101). Decay is decoupled."""

    def __init__(self, kind, params, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8):
        self.kind = kind
        self.wd = weight_decay
        self.b1 = beta1
        self.b2 = beta2
        self.eps = eps
        self.t = 0
        self.p = params
        self.m = {n: torch.zeros_like(v) for n, v in params.items()}
        self.s = {n: torch.zeros_like(v) for n, v in params.items()}

    def step(self, grads, lr):
        self.t += 1
        t = self.t
        c1, c2 = 1 - self.b1 ** t, 1 - self.b2 ** t
        for n, g in grads.items():
            p = self.p[n]
            self.m[n] = self.b1 * self.m[n] + (1 - self.b1) * g
            self.s[n] = self.b2 * self.s[n] + (1 - self.b2) * g * g
            m, root = self.m[n], torch.sqrt(self.s[n])
            if self.kind == "adamw":
                p = p - lr * self.wd * p
                p = p - lr * (m / c1) / (root / math.sqrt(c2) + self.eps)
            else:
                limit, rho = radam_rho(t, self.b2)
                if rho >= 5:
                    p = p - lr * self.wd * p
                    rt = math.sqrt(c2 * (rho - 4) * (rho - 2) * limit
                                   / ((limit - 4) * (limit - 2) * rho)) / c1
                    p = p - lr * rt * m / (root + self.eps)
                elif self.kind == "radam":
                    p = p - lr * self.wd * p
                    p = p - lr * m / c1
            self.p[n] = p


def cosine(n, base, W, T, first_zero=False):
    """Recursive cosine schedule after a linear warm-up; n counts updates from 0."""

    def warm(n):
        return base * (n if first_zero else n + 1) / W

    if n < W:
        return warm(n)
    return warm(W - 1) * (1 + math.cos(math.pi * n / T)) / (1 + math.cos(math.pi * (W - 1) / T))


def noam(n, lr, d, W):
    """Schedule of Vaswani et al. 2017 (1706.03762, section 5.3)."""
    return lr / math.sqrt(d) * min(n ** -0.5, n * W ** -1.5)


def run_curve(t, meta):
    """Training: one update per segment, state and memory carried, gradients clipped by
    their global norm."""
    cfg = LM.from_metadata(meta)
    steps, T, clip = int(meta["steps"]), int(meta["block"]), float(meta["clip"])
    p, ids = parameters_in(t), t["tokens"].long()
    dtype = next(iter(p.values())).dtype
    opt = Optimiser(meta["optim"], p, float(meta["weight_decay"]), float(meta["beta1"]),
                    float(meta["beta2"]), float(meta["eps"]))
    c, memory = torch.zeros(cfg.layers, ids.shape[0], cfg.O, dtype=dtype), None
    losses, rates, norms = [], [], []
    for n in range(steps):
        at = n * T
        q = trained_leaves(cfg, opt.p)
        loss, _, c, memory = lm_segment(cfg, q, ids[:, at:at + T], ids[:, at + 1:at + T + 1],
                                        c, memory)
        grads = gradients(loss, q)
        norm = global_norm(grads)
        factor = min(1.0, clip / (float(norm) + 1e-6))
        lr = cosine(n, float(meta["lr"]), int(meta["warmup"]), int(meta["max_iter"]))
        opt.step(OrderedDict((k, g * factor) for k, g in grads.items()), lr)
        losses.append(loss.detach())
        rates.append(lr)
        norms.append(norm)
    r = OrderedDict(loss=torch.stack(losses), lr=torch.tensor(rates, dtype=dtype),
                    norm=torch.stack(norms))
    r.update(prefixed("final.", opt.p))
    return r


# -------------------------------------------------- checks

def check_schedules(report):

    def one(x):
        return torch.tensor([x], dtype=F64)

    for n, rate in ((16000, 2.99999852e-4), (200000, 1.50593664e-4), (300000, 4.41078630e-5)):
        report(f"2.7 lr({n}) relative", one(cosine(n, 3e-4, 16000, 400000) / rate), one(1.0), 6e-9)
    step, lr = one(0.0), cosine(15999, 3e-4, 16000, 400000)
    for n in range(16000, 400001):
        if n in (200000, 300000):
            step = torch.maximum(step, one(abs(lr / cosine(n - 1, 3e-4, 16000, 400000) - 1)))
        lr *= (1 + math.cos(math.pi * n / 4e5)) / (1 + math.cos(math.pi * (n - 1) / 4e5))
    report("2.7 step-by-step recursion", step, one(0.0), 1e-9)
    report("2.7 first rate, n/W", one(cosine(0, 3e-4, 16000, 400000, True)), one(0.0), 0)
    report("2.7 first normalised RAdam step",
           one(float(next(t for t in range(1, 99) if radam_rho(t)[1] >= 5))), one(6.0), 0)
    report("2.7 rho_inf", one(radam_rho(1)[0]), one(1999.0), 1e-9)


def check_optimisers(report):
    gen = seeded(5)
    start = randn(gen, 7)
    grads = randn(gen, 40, 7)
    for kind in ("radam", "adamw"):
        p = leaf(start)
        ours = Optimiser(kind, {"p": start.clone()}, 0.1)
        if kind == "radam":
            theirs = torch.optim.RAdam([p], lr=.02, weight_decay=.1, decoupled_weight_decay=True)
        else:
            theirs = torch.optim.AdamW([p], lr=.02, weight_decay=.1)
        worst = torch.zeros(1, dtype=F64)
        for g in grads:
            p.grad = g.clone()
            theirs.step()
            ours.step({"p": g}, 0.02)
            worst = torch.maximum(worst, (p.detach() - ours.p["p"]).abs().max().reshape(1))
        report(f"{kind} against torch.optim, 40 steps", worst, torch.zeros(1, dtype=F64), 1e-13)


def check_adjoint(report):
    """The backward pass of appendix 1.5 against autograd, for every combination of
    options."""
    gen = seeded(11)
    worst, count = torch.zeros(1, dtype=F64), 0
    for bits in range(64):
        tanh, D, custom, masked, padded, four = (bits >> i & 1 for i in range(6))
        D += 1
        for skip in ((1,) if four else (0, 1)):
            B, T, H, k = 2, 5, 2, 4 if four else 3
            O = D * H
            t = OrderedDict(U=randn(gen, B, T, k, O), v=randn(gen, 2, O), bias=randn(gen, 2, O),
                            c0=randn(gen, B, O), G=randn(gen, B, T, O), Glast=randn(gen, B, O))
            if k == 3 and skip:
                t["xr"] = randn(gen, B, T, O)
            if custom:
                t["V"] = randn(gen, B, T, 2, O)
            if masked:
                t["m"] = (torch.rand(B, O, generator=gen) < .7).to(F64) / .7
            if padded:
                t["pad"] = (torch.rand(B, T, generator=gen) < .4).to(torch.int32)
            got = run_cell(t, dict(H=H, D=D, k=k, tanh=tanh, skip=skip, alpha=1.3))
            want = cell_backward(t["U"], t.get("xr"), t["v"], t["bias"], t["c0"], H, D, t["G"],
                                 t["Glast"], V=t.get("V"), m=t.get("m"), pad=t.get("pad"),
                                 tanh=bool(tanh), skip=bool(skip), alpha=1.3)
            for key in got:
                if key in want:
                    worst = torch.maximum(worst, (got[key] - want[key]).abs().max().reshape(1))
            count += 1
    report(f"1.5 adjoint walk, {count} combinations", worst, torch.zeros(1, dtype=F64), 1e-12)


def check_sdpa(report):
    gen = seeded(12)
    q, K, V = (randn(gen, 2, n, 6) for n in (4, 9, 9))
    ok = allowed_keys(4, 5, 1, 3)
    pad = torch.zeros(2, 9, dtype=torch.int32)
    pad[0, 4] = pad[1, 7] = 1

    def split(z):
        return z.reshape(2, z.shape[1], 3, 2).transpose(1, 2)

    mask = ok[None, None] & ~pad.bool()[:, None, None, :]
    want = F.scaled_dot_product_attention(split(q), split(K), split(V),
                                          attn_mask=mask).transpose(1, 2).reshape(2, 4, 6)
    report("attention against torch", attention(q, K, V, 3, ok, pad), want, 1e-14)
    x = randn(gen, 2, 5)
    g, s = randn(gen, 5), randn(gen, 5)
    report("layer norm against torch", layer_norm(x, g, s), F.layer_norm(x, (5,), g, s), 1e-14)


def check_segments(report):
    """Two segments with carried state and memory equal one pass (2.9); under cell
    pre-norm this requires the fix of Q12."""
    for norm, literal in (("none", 0), ("pre", 0), ("post", 0)):
        cfg = Stack(input=6, hidden=6, layers=3, proj="4", attention=1, heads=2, norm=norm,
                    literal_norm=literal)
        gen = seeded(13)
        p = fill(stack_shapes(cfg), gen)
        x, c0 = randn(gen, 2, 10, 6), randn(gen, 3, 2, 6)
        whole, c, _ = stack_segment(cfg, p, x, c0)
        one, mid, memory = stack_segment(cfg, p, x[:, :5], c0)
        two, last, _ = stack_segment(cfg, p, x[:, 5:], mid, None, memory)
        report(f"segments equal one pass, cell norm {norm}", torch.cat([one, two], 1), whole, 1e-13)
        report(f"  states, cell norm {norm}", last, c, 1e-13)
    cfg = replace(cfg, norm="pre", literal_norm=1)
    far = (stack_segment(cfg, p, x[:, 5:], mid, None, memory)[0]
           - stack_segment(cfg, p, x, c0)[0][:, 5:]).abs().max()
    report("  the literal form differs (> 0.01)", (far < 0.01).to(F64).reshape(1),
           torch.zeros(1, dtype=F64), 0)


def check_lm(report):
    """Adaptive probabilities sum to 1; the reversed direction is the time-reversed
    one."""
    cfg = LM(vocab=23, dim=6, layers=1, proj="4", attention=1, cutoffs="7,15", n_e=8,
             div_val=2).finish()
    gen = seeded(14)
    p = fill(lm_shapes(cfg), gen)
    total = log_probs(cfg, p, randn(gen, 3, 6)).exp().sum(-1)
    report("adaptive probabilities sum to 1", total, torch.ones_like(total), 1e-14)
    U, xr = randn(gen, 2, 7, 3, 3), randn(gen, 2, 7, 3)
    v, b, c0 = (randn(gen, 2, 3) for _ in range(3))
    both, c = cell(torch.cat([U, U.flip(1)], 3), torch.cat([xr, xr.flip(1)], 2),
                   torch.cat([v, v], 1), torch.cat([b, b], 1), torch.cat([c0, c0], 1), 3, 2)
    report("reverse direction is the mirrored one", both[..., 3:], both[..., :3].flip(1), 1e-15)


def check_differences(report):
    """Central differences of the last segment's loss of two stacks, for every entry of
    every argument."""
    for name, cfg, T, with_pad in (
            ("SRU, bidirectional k 4 then 3",
             Stack(input=3, hidden=2, layers=2, bidirectional=1, norm="post", rescale=1, tanh=1,
                   highway_bias=-.5, proj="2,0"), "3,4", 1),
            ("SRU++, pre-norm, window", Stack(input=4, hidden=4, layers=2, proj="4", attention=1,
                                              heads=2, norm="pre", window=3, highway_bias=-1.0),
             "3,4", 0)):
        gen = seeded(15)
        t = prefixed("param.", fill(stack_shapes(cfg), gen, cfg.highway_bias))
        meta = dict(cfg.metadata(), segments=T)
        last = lengths(meta)[-1]
        t["x"] = randn(gen, 2, sum(lengths(meta)), cfg.input)
        t["c0"] = randn(gen, cfg.layers, 2, cfg.O)
        if with_pad:
            t["pad"] = torch.zeros(2, sum(lengths(meta)), dtype=torch.int32)
            t["pad"][0, -1] = t["pad"][1, 3] = 1
        t["G"] = randn(gen, 2, last, cfg.O)
        t["Glast"] = randn(gen, cfg.layers, 2, cfg.O)
        got = run_stack(t, meta)
        args, loss = stack_loss(t, meta)
        step, worst, entries = 1e-5, 0.0, 0
        for key, value in args.items():
            flat = value.view(-1)
            for i in range(flat.numel()):
                keep = float(flat[i])
                flat[i] = keep + step
                up = loss(args)
                flat[i] = keep - step
                down = loss(args)
                flat[i] = keep
                worst = max(worst, abs((up - down) / (2 * step) - float(got[key].reshape(-1)[i])))
                entries += 1
        report(f"differences, {name} ({entries})", torch.tensor([worst], dtype=F64),
               torch.zeros(1, dtype=F64), 2e-8)


def main():
    if sys.argv[1:] != ["--check"]:
        print(__doc__)
        return 2
    checker = Checker()
    for check in (check_cells, check_transforms, check_schedules, check_optimisers, check_adjoint,
                  check_sdpa, check_segments, check_lm, check_differences):
        check(checker.close)
    return checker.finish()


if __name__ == "__main__":
    sys.exit(main())
