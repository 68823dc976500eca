#!/usr/bin/env python3
r"""A training step of the Compressive Transformer language model in PyTorch (1.13 or newer), a
benchmark contender and a reference for training curves: eager or compiled, float32,
float64 or bfloat16 autocast.

Pre-norm; residual and gru gates; learned positions and those of Transformer-XL; strided
convolution with the attention loss, or no compressed memory; memories carried over.
Written as a careful PyTorch user would: all tensors are (time, batch, width), so that
heads are views and the memory grows along its first dimension; one matmul for keys and
values of all heads; the memory is projected separately (no gradient for its rows); the
position term is one matmul and a view without a copy, to which baddbmm adds the content
term; scaled_dot_product_attention, if available, for the attention of the compression
loss; the optimiser is foreach or fused. The layers, each with its compression, and the
loss are compiled separately, with constant shapes.

    compressive_torch.py --nlayers 4 --hid-sz 256 --nheads 4 --block-sz 128 --batch-sz 8 \
        --mem 128 --cmem 32 --data FILE --steps 10 --warmup 4 --threads 2 [--load FILE] \
        [--dtype bf16] [--compile]

Protocol, options of data and optimiser, --train, --curve, --probe and --load are those of
sru_torch.py, which must be in the same directory. --compile needs --warmup 4 or more,
because first the memory and then the compressed memory are empty. The reported loss is
the mean nll; the loss of the compression is minimised with it.

    compressive_torch.py ... --generate N       N tokens of one stream per line on stdin
    compressive_torch.py --check [--compile]    compares this model with
                                                compressive_oracle.py in float64

Generation does not cache keys and values, like the published implementation: each token
runs the forward pass of its whole segment. One stream, memories filled by --prompt
segments of the text, whose next bytes are fed. The N positions are evenly spaced over one
segment, (2 i + 1) S / 2 N, so that their mean is that of a segment. The reply has the keys
of training; loss_step1 is the nll at the first position, loss_last the mean over all.

Parameters (--load; without it initialised from --seed): in_emb.weight, out_emb.weight and
.bias, key_pe (S + M + C,d) and of every layer attn.norm, attn.query (d,d), attn.kv (2d,d)
keys first, attn.out, with xl attn.pos (d,d), attn.u and attn.v (heads,d/heads),
compress.weight (d,r d) and .bias, ff.norm, ff.fc1, ff.fc2, and for gru attn.gate and
ff.gate: weight_ih, weight_hh, bias_ih, bias_hh.
"""
import contextlib
import itertools
import json
import math
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from sru_torch import (SDPA, Trainer, autocast, golden_oracle, load_bytes, parser, prepare,
                       relative_difference, serve, shared_options)


def sinusoids(rows, D):
    """(rows,D): distances rows-1 .. 0"""
    dist = torch.arange(rows - 1, -1, -1, dtype=torch.float64)[:, None]
    f = 10000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    return torch.cat((torch.sin(dist * f), torch.cos(dist * f)), 1)


class Gate(nn.Module):
    """PyTorch's GRU cell, the stream as its state"""

    def __init__(self, D):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(3 * D, D))
        self.weight_hh = nn.Parameter(torch.empty(3 * D, D))
        self.bias_ih = nn.Parameter(torch.zeros(3 * D))
        self.bias_hh = nn.Parameter(torch.zeros(3 * D))
        for w in (self.weight_ih, self.weight_hh):
            nn.init.uniform_(w, -D ** -0.5, D ** -0.5)

    def forward(self, y, x):
        a, b = F.linear(y, self.weight_ih, self.bias_ih), F.linear(x, self.weight_hh, self.bias_hh)
        D = x.shape[-1]
        r, z = torch.sigmoid(a[..., :2 * D] + b[..., :2 * D]).chunk(2, -1)
        n = torch.tanh(torch.addcmul(a[..., 2 * D:], r, b[..., 2 * D:]))
        return torch.lerp(n.to(x.dtype), x, z.to(x.dtype))


class Residual(nn.Module):
    def forward(self, y, x):
        return x + y


class Layer(nn.Module):
    def __init__(self, a, remembers):
        super().__init__()
        D, H = a.hid_sz, a.nheads
        self.D, self.H, self.S, self.r = D, H, a.block_sz, a.ratio
        self.bf16, self.sdpa = a.dtype == "bf16", a.attention == "sdpa"
        self.M, self.C = (a.mem, a.cmem) if remembers else (0, 0)
        self.xl = a.positions == "xl"
        self.norm_a, self.norm_f = nn.LayerNorm(D), nn.LayerNorm(D)
        # kv: rows (head, key or value, channel)
        self.query, self.kv = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D, bias=False)
        self.out, self.fc1, self.fc2 = nn.Linear(D, D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.gate_a, self.gate_f = (Gate(D) if a.gate == "gru" else Residual() for _ in range(2))
        if self.xl:
            self.pos = nn.Linear(D, D, bias=False)
            self.u = nn.Parameter(torch.zeros(H, D // H))
            self.v = nn.Parameter(torch.zeros(H, D // H))
        if self.C:
            # of r rows in one: the strided convolution
            self.compress = nn.Linear(a.ratio * D, D)

    def heads(self, y):
        """(K,B,..) -> (B H,K,..), a view"""
        return y.view(y.shape[0], y.shape[1] * self.H, -1).transpose(0, 1)

    def attend(self, q, kv, table, mask):
        """q (T,B,D), kv (K,B,2D), table: sines or (P,D); -> (T,B,D)"""
        (T, B, D), K, H = q.shape, kv.shape[0], self.H
        hd = D // H
        k, v = self.heads(kv).split(hd, -1)
        rows = table[table.shape[0] - K:]
        if self.xl:
            rows = self.pos(rows)
            qk, qp = (q.view(T, B, H, hd) + w.to(q.dtype) for w in (self.u, self.v))
            qk, qp = self.heads(qk), self.heads(qp)
        else:
            qk = qp = self.heads(q)
        # One more column than keys: read with a stride shorter by one, row t of the following
        # begins one column later for each t
        rows = F.pad(rows.to(q.dtype), (0, 0, 0, 1))
        rows = self.heads(rows[:, None].expand(K + 1, B, D).contiguous())
        s = torch.bmm(qp, rows.transpose(1, 2)).flatten(1)
        s = s.narrow(1, T - 1, T * K).view(B * H, T, K)
        s = torch.baddbmm(s, qk, k.transpose(1, 2), beta=hd ** -0.5, alpha=hd ** -0.5).add_(mask)
        p = torch.softmax(s, -1).to(v.dtype)
        return torch.bmm(p, v).transpose(0, 1).reshape(T, B, D)

    def plain(self, q, kv):
        """Attention without positions and mask, heads apart: q (T,B,D), kv (K,B,2D) -> (B
        H,T,hd)"""
        q, (k, v) = self.heads(q), self.heads(kv).split(self.D // self.H, -1)
        if self.sdpa:
            return F.scaled_dot_product_attention(q, k, v)
        s = torch.bmm(q, k.transpose(1, 2)).mul_((self.D // self.H) ** -0.5)
        return torch.bmm(torch.softmax(s, -1).to(v.dtype), v)

    def forward(self, x, m, c, table, mask):
        """x (T,B,D), memory m (n,B,D) and compressed memory c, or None -> x, m, c, the loss
        of the compression or None"""
        T, B, D = x.shape
        h, aux = self.norm_a(x), None
        if self.bf16:
            h = h.to(torch.bfloat16)
        q, kv = self.query(h), self.kv(h)
        n, e = 0 if m is None else m.shape[0], 0
        if m is not None or c is not None:
            kv = torch.cat((self.kv(m if c is None else c if m is None else torch.cat((c, m))), kv))
        x = self.gate_a(self.out(self.attend(q, kv, table, mask)), x)
        x = self.gate_f(self.fc2(F.gelu(self.fc1(self.norm_f(x)))), x)
        if self.M + self.C and T == self.S:
            h = h.detach()
            m, e = h if m is None else torch.cat((m, h)), max(0, n + T - self.M)
            old, m = m[:e], m[e:] if self.M else None
            if e and self.C:
                G = -(-e // self.r)
                pad = F.pad(old, (0, 0, 0, 0, 0, G * self.r - e)) if e % self.r else old
                pad = pad.view(G, self.r, B, D).transpose(1, 2)
                new = self.compress(pad.reshape(G, B, self.r * D))
                if self.training:
                    q, at = q.detach(), 0 if c is None else c.shape[0]
                    with torch.no_grad():
                        target = self.plain(q, kv[at:at + e])
                    got = self.plain(q, F.linear(new, self.kv.weight.detach()))
                    aux = F.mse_loss(got, target)
                new = new.detach()
                c = (new if c is None else torch.cat((c, new)))[-self.C:]
        return x, m, c, aux


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a, D = a, a.hid_sz
        memory = []
        if a.memory_layers == "all":
            memory = list(range(1, a.nlayers + 1))
        elif a.memory_layers != "none":
            memory = [int(v) for v in a.memory_layers.split(",") if v]
        self.in_emb = nn.Embedding(a.vocab, D)
        self.layers = nn.ModuleList(Layer(a, l + 1 in memory) for l in range(a.nlayers))
        self.out_emb = nn.Linear(D, a.vocab)
        self.rows = a.block_sz + (a.mem + a.cmem if len(memory) else 0)
        if a.positions == "xl":
            self.register_buffer("sines", sinusoids(self.rows, D), persistent=False)
        else:
            self.key_pe = nn.Parameter(torch.zeros(self.rows, D))
        self.A, self.masks = sum(1 for layer in self.layers if layer.C), {}

    def initial(self):
        return [(None, None)] * len(self.layers)

    def mask(self, T, K, like):
        if (T, K) not in self.masks:
            self.masks[T, K] = like.new_full((T, K), -math.inf).triu_(K - T + 1)
        return self.masks[T, K]

    def hidden(self, x, memories):
        """x (T,B) -> last hidden states, memories, the sum of the compression's losses"""
        h, new, aux = self.in_emb(x), [], 0.0
        table = self.sines if self.a.positions == "xl" else self.key_pe
        kind = torch.empty(0, dtype=torch.bfloat16) if self.a.dtype == "bf16" else h
        for layer, (m, c) in zip(self.layers, memories):
            K = sum(t.shape[0] for t in (m, c, x) if t is not None)
            h, m, c, loss = layer(h, m, c, table, self.mask(x.shape[0], K, kind))
            new.append((m, c))
            if loss is not None:
                aux = aux + loss
        return h, new, aux

    def loss(self, h, y):
        logits = self.out_emb(h).to(self.in_emb.weight.dtype)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def forward(self, x, y, memories):
        h, memories, aux = self.hidden(x, memories)
        nll = self.loss(h, y)
        return nll, nll + self.a.aux_weight / max(self.A, 1) * aux, memories


NAMES = {"norm_a": "attn.norm", "norm_f": "ff.norm", "query": "attn.query", "kv": "attn.kv",
         "out": "attn.out", "pos": "attn.pos", "u": "attn.u", "v": "attn.v",
         "gate_a": "attn.gate", "gate_f": "ff.gate", "fc1": "ff.fc1", "fc2": "ff.fc2"}


def file_name(name):
    """layers.3.gate_a.bias_ih -> layers.3.attn.gate.bias_ih"""
    part = name.split(".")
    if part[0] == "layers":
        part[2] = NAMES.get(part[2], part[2])
    return ".".join(part)


class CompressiveTrainer(Trainer):
    def create(self):
        torch.set_default_dtype(torch.float64 if self.a.dtype == "f64" else torch.float32)
        return Model(self.a)

    # shapes are those of an empty, a filling and a full memory, in layers with and
    # without one
    def compile(self):
        for name in ("cache_size_limit", "recompile_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 64)
        for layer in self.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        self.model.loss = torch.compile(self.model.loss, dynamic=False)

    def restart(self):
        self.position, self.memories = 0, self.model.initial()

    def forward(self, x, y):
        nll, total, self.memories = self.model(x, y, self.memories)
        return nll, total

    def by_head(self, w):       # (2D,D), keys first -> rows (head, key or value, channel)
        D, H = self.a.hid_sz, self.a.nheads
        return w.view(2, H, D // H, D).transpose(0, 1).reshape(2 * D, D)

    def load(self, tensors):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                t = tensors[file_name(name)]
                p.copy_(self.by_head(t) if name.endswith(".kv.weight") else t.reshape(p.shape))


class Generator:
    """One stream without a cache"""

    def __init__(self, a, data):
        self.trainer = CompressiveTrainer(a, data)
        self.a, self.model = a, self.trainer.model.eval()
        S, text = a.block_sz, data.flatten()
        if len(text) <= (a.prompt + 1) * S:
            raise SystemExit("too few bytes for this prompt")
        self.memories = self.model.initial()
        with self.quietly():
            for k in range(a.prompt):
                x = text[k * S:(k + 1) * S, None].long()
                self.memories = self.model.hidden(x, self.memories)[1]
        self.text = text[a.prompt * S:(a.prompt + 1) * S + 1, None].long()

    @contextlib.contextmanager
    def quietly(self):
        with torch.no_grad(), autocast(torch.device("cpu"), self.a.dtype):
            yield

    def step(self):
        pass

    def synchronise(self):
        pass

    def round(self, n):
        S, losses, start = self.a.block_sz, [], time.monotonic()
        with self.quietly():
            for i in range(n):
                at = (2 * i + 1) * S // (2 * n)
                h = self.model.hidden(self.text[:at + 1], self.memories)[0]
                losses.append(float(self.model.loss(h[-1:], self.text[at + 1])))
        seconds = time.monotonic() - start
        return dict(self.trainer.reply(seconds), tokens_per_s=n / seconds, loss_step1=losses[0],
                    loss_first=losses[0], loss_last=sum(losses) / n)


def check(a):
    """Six segments of tiny models in float64, all variants, compared with the oracle: losses,
    memories, and the gradient of every parameter of the sum of all losses. Fails if one
    differs by more than 1e-10 of the largest element of its tensor, or of 1."""
    oracle, off = golden_oracle("compressive_oracle"), relative_difference
    vars(a).update(nlayers=3, hid_sz=8, nheads=2, batch_sz=2, vocab=11, aux_weight=0.7,
                   dtype="f64", load=None)
    worst, runs, compiled = 0.0, 0, a.compile

    sizes = ((4, 4, 2, 2, "all"), (4, 6, 3, 3, "1,3"), (5, 3, 4, 2, "2,3"), (3, 5, 0, 4, "all"),
             (4, 0, 3, 2, "3"), (4, 4, 2, 2, "none"))
    attentions = ("matmul", "sdpa") if SDPA else ("matmul",)
    for (S, M, C, r, layers), gate, positions, attention in itertools.product(
            sizes, ("residual", "gru"), ("learned", "xl"), attentions):
        vars(a).update(block_sz=S, mem=M, cmem=C, ratio=r, memory_layers=layers, gate=gate,
                       positions=positions, attention=attention, compile=compiled and runs == 4)
        cfg = oracle.Config(vocab=11, dim=8, layers=3, heads=2, segment=S, mem=M, cmem=C, ratio=r,
                            memory_layers="" if layers == "none" else layers, gate=gate,
                            positions=positions, aux_weight=0.7).checked()
        p = {k: v.requires_grad_() for k, v in oracle.random_parameters(cfg, runs).items()}
        tokens = oracle.random_tokens(cfg, 2, 6 * S + 1, 100 + runs)
        trainer = CompressiveTrainer(a, tokens)
        moved = {k: v.detach() for k, v in p.items()}
        if positions == "learned":      # as the library stores them
            moved["key_pe"] = moved["key_pe"].transpose(0, 1).reshape(-1, 8)[-trainer.model.rows:]
        for k in moved:
            if k.endswith("compress.weight"):
                moved[k] = moved[k].transpose(1, 2).reshape(8, r * 8)
        trainer.load(moved)
        model, total, expected = oracle.Model(cfg, p, 2), 0.0, 0.0
        for at in range(0, 6 * S, S):
            ids, y = tokens[:, at:at + S], tokens[:, at + 1:at + S + 1]
            logits, _, _, aux = model.segment(ids, None, None, True)
            nll = oracle.nll(logits, y)
            expected = expected + nll + aux
            got, both = trainer.forward(ids.t().long(), y.t().long())
            total = total + both
            worst = max(worst, off(got.detach(), nll.detach()),
                        off(total.detach(), expected.detach()))
        expected.backward()
        total.backward()
        for l, (m, c) in enumerate(trainer.memories):
            if l in cfg.memory:
                mem, _, cmem, _ = model.memories(l)
                for mine, theirs in ((m, mem), (c, cmem)):
                    assert (0 if mine is None else mine.shape[0]) == theirs.shape[1]
                    if mine is not None:
                        worst = max(worst, off(mine.transpose(0, 1), theirs))
        for name, q in trainer.model.named_parameters():
            g = p[file_name(name)].grad
            g = torch.zeros_like(p[file_name(name)]) if g is None else g
            if name == "key_pe":
                g = g.transpose(0, 1).reshape(-1, 8)[-trainer.model.rows:]
            elif name.endswith(".kv.weight"):
                g = trainer.by_head(g)
            elif name.endswith("compress.weight"):
                g = g.transpose(1, 2)
            mine = torch.zeros_like(q) if q.grad is None else q.grad
            worst = max(worst, off(mine, g.reshape(q.shape)))
        runs += 1
    print(json.dumps({"runs": runs, "largest_difference": worst, "loss_last": float(got)}))
    return 0 if worst < 1e-10 else 1


def options():
    p = parser(__doc__)
    p.add_argument("--nlayers", type=int, default=4)
    p.add_argument("--hid-sz", type=int, default=256)
    p.add_argument("--nheads", type=int, default=4)
    p.add_argument("--block-sz", type=int, default=128, help="S: segment")
    p.add_argument("--batch-sz", type=int, default=8)
    p.add_argument("--mem", type=int, default=128, help="M: rows of memory")
    p.add_argument("--cmem", type=int, default=32, help="C: rows of compressed memory; 0: none")
    p.add_argument("--ratio", type=int, default=4)
    p.add_argument("--memory-layers", default="all", help="as 6,7,8, or: all, none")
    p.add_argument("--gate", choices=("residual", "gru"), default="residual")
    p.add_argument("--positions", choices=("learned", "xl"), default="learned")
    p.add_argument("--aux-weight", type=float, default=1.0)
    p.add_argument("--vocab", type=int, default=256)
    shared_options(p, "adamw")
    p.add_argument("--attention", choices=("matmul", "sdpa"), default="sdpa" if SDPA else "matmul",
                   help="of the compression's loss")
    p.add_argument("--generate", type=int, metavar="N",
                   help="generation in place of training, N tokens per round")
    p.add_argument("--prompt", type=int, default=3, help="generation: segments of the prompt")
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
    if a.generate:
        a.steps, a.batch_sz = a.generate, 1
        return serve(Generator(a, load_bytes(a)), a)
    return serve(CompressiveTrainer(a, load_bytes(a)), a)


if __name__ == "__main__":
    sys.exit(main())
