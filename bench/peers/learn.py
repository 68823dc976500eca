#!/usr/bin/env python3
"""Trains a peer of bench/learn.sh in PyTorch (1.13 or newer) on a CPU for a number of
processor seconds, then evaluates it on the whole held-out text.

    learn.py --peer lstm --train train.txt --valid valid.txt --seconds 60 [--seed 1]

It prints the processor seconds of the training, the number of iterations, the number of
parameters, the loss in nats per byte and the processor seconds of the evaluation,
separated by tabs.

Peers:
  nanogpt-cpu, nanogpt-gpu   a GPT with the two recipes that nanoGPT's README publishes for
                             tinyshakespeare (learn_gpt.py)
  lstm                       an LSTM about as large as the library's models (learn_lstm.py)

A peer has `warmup`, `peak` and `low`, which define its schedule: the learning rate rises
for the fraction `warmup` of the run to `peak`, then falls as a cosine to `low`. The
fraction is that of the processor seconds, or with --iterations that of the iterations.
Only the training loop counts: neither the start of the program nor the evaluation does.

With --nanogpt-eval, the mean loss of random blocks of the training length follows. This
is what nanoGPT reports; its README states 1.88 for

    learn.py --peer nanogpt-cpu --iterations 2000 --nanogpt-eval --train .. --valid ..

It is an estimate: the mean of 20 batches of 12 blocks there, of 200 here.
"""
import argparse
import math
import sys
import time

import torch

from learn_gpt import Gpt
from learn_lstm import Lstm

PEERS = {
    "nanogpt-cpu": lambda text, vocab: Gpt(
        text, vocab, layers=4, heads=4, width=128, block=64, batch=12, dropout=0.0,
        warmup=100 / 2000),
    "nanogpt-gpu": lambda text, vocab: Gpt(
        text, vocab, layers=6, heads=6, width=384, block=256, batch=64, dropout=0.2,
        warmup=100 / 5000),
    "lstm": Lstm,
}


def read(*files):
    """Returns the texts as tensors of token ids, one per byte value that occurs in them,
    and the number of these values."""
    texts = [torch.frombuffer(bytearray(open(f, "rb").read()), dtype=torch.uint8) for f in files]
    used = torch.cat([text.unique() for text in texts]).unique()
    ids = torch.zeros(256, dtype=torch.uint8)
    ids[used.long()] = torch.arange(len(used), dtype=torch.uint8)
    return [ids[text.long()] for text in texts], len(used)


def learning_rate(peer, progress):
    if progress < peer.warmup:
        return peer.peak * max(progress / peer.warmup, 0.01)
    fraction = (progress - peer.warmup) / (1 - peer.warmup)
    return peer.low + 0.5 * (peer.peak - peer.low) * (1 + math.cos(math.pi * min(fraction, 1)))


def train(peer, seconds, iterations):
    """Trains for a number of iterations, or if it is 0, for the number of iterations that
    comes closest to `seconds`. Returns the processor seconds and the iterations."""
    peer.model.train()
    start = time.process_time()
    used = done = 0
    while True:
        mean = used / done if done else 0
        if done and (done == iterations if iterations else used + mean / 2 > seconds):
            return used, done
        progress = (done + 1) / iterations if iterations else (used + mean) / seconds
        for group in peer.optimiser.param_groups:
            group["lr"] = learning_rate(peer, progress)
        peer.optimiser.zero_grad(set_to_none=True)
        peer.training_loss().backward()
        torch.nn.utils.clip_grad_norm_(peer.model.parameters(), 1.0)
        peer.optimiser.step()
        done += 1
        used = time.process_time() - start


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    parser.add_argument("--train", required=True, help="the training text")
    parser.add_argument("--valid", required=True, help="the held-out text")
    parser.add_argument("--seconds", type=float, default=0, help="processor seconds of training")
    parser.add_argument("--iterations", type=int, default=0, help="instead of --seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nanogpt-eval", action="store_true")
    options = parser.parse_args()
    if (options.seconds > 0) == (options.iterations > 0):
        parser.error("expected --seconds or --iterations, above 0")

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    (text, held_out), vocab = read(options.train, options.valid)
    peer = PEERS[options.peer](text, vocab)
    if options.nanogpt_eval and not hasattr(peer, "random_blocks"):
        parser.error("--nanogpt-eval: only for the peers nanogpt-cpu and nanogpt-gpu")
    used, done = train(peer, options.seconds, options.iterations)

    peer.model.eval()
    start = time.process_time()
    with torch.no_grad():
        loss = peer.evaluate(held_out)
    result = [f"{used:.2f}", done, sum(p.numel() for p in peer.model.parameters()), f"{loss:.5f}",
              f"{time.process_time() - start:.2f}"]
    if options.nanogpt_eval:
        with torch.no_grad():
            result.append(f"{peer.random_blocks(held_out, 200):.5f}")
    print(*result, sep="\t")


if __name__ == "__main__":
    sys.exit(main())
