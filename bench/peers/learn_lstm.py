"""An LSTM as a peer of learn.py. Truncated backpropagation: 16 streams of the text, 64
tokens per step, and the state is carried from one step to the next. AdamW.

After 221,000 tokens of tinyshakespeare, 16 streams (216 steps) reach 1.99 nats on the
first 20,000 held-out bytes, and 32 streams (108 steps) 2.12.
"""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, vocab, embedding, width, dropout):
        super().__init__()
        self.tokens = nn.Embedding(vocab, embedding)
        self.lstm = nn.LSTM(embedding, width)
        self.drop = nn.Dropout(dropout)
        self.output = nn.Linear(width, vocab)
        # a forget gate that is open at first, as is usual
        gates = self.lstm.bias_ih_l0
        with torch.no_grad():
            gates[width:2 * width] += 1

    def forward(self, tokens, state):
        """Returns the logits (T,B,V) of the tokens (T,B), and the new state."""
        x, state = self.lstm(self.drop(self.tokens(tokens)), state)
        return self.output(self.drop(x)), state


class Lstm:
    peak, low, warmup = 4e-3, 0.0, 0.02
    batch, steps = 16, 64

    def __init__(self, text, vocab):
        # The seed also determines where the streams begin.
        text = text.roll(-int(torch.randint(len(text), ())))
        self.text, self.at, self.state = self.streams(text, self.batch), 0, None
        self.model = Model(vocab, embedding=128, width=384, dropout=0.1)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=self.peak,
                                           weight_decay=0.01, foreach=True)

    @staticmethod
    def streams(text, n):
        """Returns the text as n equal streams (T,n)."""
        return text[:len(text) // n * n].view(n, -1).t().contiguous()

    def loss(self, part, state, reduction):
        logits, state = self.model(part[:-1], state)
        loss = F.cross_entropy(logits.flatten(0, 1), part[1:].flatten(), reduction=reduction)
        return loss, tuple(s.detach() for s in state)

    def training_loss(self):
        if self.at + self.steps + 1 > len(self.text):
            self.at, self.state = 0, None
        part = self.text[self.at:self.at + self.steps + 1].long()
        self.at += self.steps
        loss, self.state = self.loss(part, self.state, "mean")
        return loss

    def evaluate(self, text):
        """The mean loss of four streams, like those of the trainers."""
        text, state, total = self.streams(text, 4), None, 0.0
        for at in range(0, len(text) - 1, 256):
            loss, state = self.loss(text[at:at + 257].long(), state, "sum")
            total += loss.item()
        return total / ((len(text) - 1) * text.shape[1])
