#!/bin/sh
# curve_comp.sh [--record] [--quick] [--steps N] [--every N] [model options] - does the Compressive Transformer learn as PyTorch's does?
# Trains a small model with the library and with bench/peers/compressive_torch.py, from the same parameters on the same bytes, and prints a
# table of their losses. Demanded: over the first 100 steps (or all, if there are fewer) no loss differs by more than 1e-3; otherwise the
# exit code is 1. After that rounding has its way with single losses, so means of 100 are compared. --record writes the table to
# bench/results/ as well.
#
#     DATA=FILE sh bench/curve_comp.sh --record          2,000 steps; DATA a file (books, say), whose bytes are the text
#     sh bench/curve_comp.sh --quick                     120 steps on examples/demo_data.sh's text
#     sh bench/curve_comp.sh --gate gru --positions xl   another model: options of compressive_torch.py that bench_comp.c --worker has too
#
# The two go on at the same time, each with its share of the cores: losses are compared here, not times.
# Environment: CC (cc), CFLAGS (-O3), DATA, PYTHON (a python3 with torch).
set -eu
cd "$(dirname "$0")/.."
name=comp title="the Compressive Transformer" peer=compressive_torch.py \
    note=" (positions 0, as they are initialised)"
model="--nlayers 4 --hid-sz 256 --nheads 4 --block-sz 128 --batch-sz 8 --mem 128 --cmem 32"
model="$model --ratio 4 --optim adamw --lr 0.001 --weight-decay 0 --clip 0.5"
. bench/curve_peer.sh
