"""The Transformer of GPT-2 as a peer of learn.py, with the hyperparameters that nanoGPT's
README publishes for its characters of Shakespeare.

Model: layer normalisation before each sublayer and at the end, learned positions, GELU,
one matrix for embedding and output. No biases. Initial values are N(0, 0.02), and smaller
by sqrt(2 layers) for the matrices that write to the residual stream.
Recipe: AdamW with betas 0.9 and 0.99, weight decay 0.1 of all matrices, learning rate
1e-3 to 1e-4, blocks from random positions of the text.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


class Layer(nn.Module):
    def __init__(self, heads, width, block, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.inner = nn.Linear(width, 4 * width, bias=False)
        self.outer = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)
        future = torch.full((block, block), -math.inf).triu(1)
        self.register_buffer("future", future, persistent=False)

    def attention(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if hasattr(F, "scaled_dot_product_attention"):      # PyTorch 2
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            scores = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
            y = self.drop((scores + self.future[:t, :t]).softmax(-1)) @ v
        return self.attended(y.transpose(1, 2).reshape(b, t, c))

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.outer(F.gelu(self.inner(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, vocab, layers, heads, width, block, dropout):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(heads, width, block, dropout) for _ in range(layers))
        self.norm = Norm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("attended.weight", "outer.weight"))
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens):
        """Returns the logits (B,T,V) of the tokens (B,T)."""
        x = self.drop(self.tokens(tokens) + self.positions.weight[:tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Gpt:
    peak, low = 1e-3, 1e-4

    def __init__(self, text, vocab, layers, heads, width, block, batch, dropout, warmup):
        self.text, self.block, self.batch, self.warmup = text, block, batch, warmup
        self.model = Model(vocab, layers, heads, width, block, dropout)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}],
            lr=self.peak, betas=(0.9, 0.99), foreach=True)

    def random_loss(self, text):
        """The mean loss of a batch of blocks from random positions."""
        at = torch.randint(len(text) - self.block, (self.batch, 1)) + torch.arange(self.block + 1)
        tokens = text[at].long()
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_loss(self):
        return self.random_loss(self.text)

    def random_blocks(self, text, batches):
        return sum(self.random_loss(text).item() for _ in range(batches)) / batches

    def evaluate(self, text):
        """The mean loss of all tokens but the first. Windows of the training length begin
        every half of a window. Each scores the tokens that the previous one did not, so
        all tokens but those of the first window have at least half a window of context."""
        count, stride = len(text) - 1, self.block // 2
        starts = list(range(0, count - self.block, stride)) + [count - self.block]
        total, scored = 0.0, 0
        for i in range(0, len(starts), 32):
            some = torch.tensor(starts[i:i + 32])
            tokens = text[some[:, None] + torch.arange(self.block + 1)].long()
            loss = F.cross_entropy(self.model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:],
                                   reduction="none")
            for start, row in zip(some.tolist(), loss):
                total += row[scored - start:].double().sum().item()
                scored = start + self.block
        assert scored == count
        return total / count
