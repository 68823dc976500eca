#!/bin/sh
# curve_sru.sh [options] [model options] - does SRU++ learn as its PyTorch
# version does? Trains a small model with the library and with bench/peers/sru_torch.py,
# from the same parameters on the same bytes, and prints a table of their losses.
#
#     DATA=FILE sh bench/trainers/curve_sru.sh --record  2,000 steps on the bytes of a file
#     sh bench/trainers/curve_sru.sh --quick             120 steps, text of examples/demo_data.sh
#     sh bench/trainers/curve_sru.sh --hid-sz 512 --n-proj 128
#         another model: options of both sru_torch.py and bench_sru.c --worker
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
name=sru title=SRU++ peer=sru_torch.py note=" (attention weight 0, as it is initialised)"
model="--nlayers 4 --hid-sz 256 --n-proj 64 --nheads 1 --block-sz 128 --batch-sz 8 --optim adamw"
model="$model --lr 0.001 --weight-decay 0.1 --clip 1"
. bench/trainers/curve_peer.sh
