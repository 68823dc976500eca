#!/bin/sh
# curve_sru.sh [--record] [--quick] [--steps N] [--every N] [model options] - does SRU++ learn as PyTorch's does? Trains a small model
# with the library and with bench/peers/sru_torch.py, from the same parameters on the same bytes, and prints a table of their losses.
# Demanded: over the first 100 steps (or all, if there are fewer) no loss differs by more than 1e-3; otherwise the exit code is 1.
# After that rounding has its way with single losses, so means of 100 are compared. --record writes the table to bench/results/ as well.
#
#     DATA=FILE sh bench/curve_sru.sh --record           2,000 steps; DATA a file (an enwik8, say), whose bytes are the text
#     sh bench/curve_sru.sh --quick                      120 steps on examples/demo_data.sh's text
#     sh bench/curve_sru.sh --hid-sz 512 --n-proj 128    another model: options of sru_torch.py that bench_sru.c --worker has too
#
# The two go on at the same time, each with its share of the cores: losses are compared here, not times.
# Environment: CC (cc), CFLAGS (-O3), DATA, PYTHON (a python3 with torch).
set -eu
cd "$(dirname "$0")/.."
name=sru title=SRU++ peer=sru_torch.py note=" (attention weight 0, as it is initialised)"
model="--nlayers 4 --hid-sz 256 --n-proj 64 --nheads 1 --block-sz 128 --batch-sz 8 --optim adamw"
model="$model --lr 0.001 --weight-decay 0.1 --clip 1"
. bench/curve_peer.sh
