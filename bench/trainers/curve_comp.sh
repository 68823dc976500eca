#!/bin/sh
# curve_comp.sh [options] [model options] - does the Compressive Transformer learn as its
# PyTorch version does? Trains a small model with the library and with
# bench/peers/compressive_torch.py, from the same parameters on the same bytes, and prints
# a table of their losses.
#
#     DATA=FILE sh bench/trainers/curve_comp.sh --record  2,000 steps on the bytes of a file
#     sh bench/trainers/curve_comp.sh --quick             120 steps, text of examples/demo_data.sh
#     sh bench/trainers/curve_comp.sh --gate gru --positions xl
#         another model: options of both compressive_torch.py and bench_comp.c --worker
#
#     --steps N, --every N    length of a run; a row of the table every N steps
#     --record                also write the table to bench/results/
#
# Exit code 1 if any loss of the first 100 steps differs by more than 1e-3. Later,
# rounding dominates single losses, so means of 100 steps are compared. The two runs are
# concurrent, each with its share of the cores: only losses are compared, not times.
# Environment: CC (cc), CFLAGS (-O3), DATA, PYTHON (a python3 with torch).
set -eu
cd "$(dirname "$0")/../.."
name=comp title="the Compressive Transformer" peer=compressive_torch.py \
    note=" (positions 0, as they are initialised)"
model="--nlayers 4 --hid-sz 256 --nheads 4 --block-sz 128 --batch-sz 8 --mem 128 --cmem 32"
model="$model --ratio 4 --optim adamw --lr 0.001 --weight-decay 0 --clip 0.5"
. bench/trainers/curve_peer.sh
