#!/bin/bash
# Run this on each machine: `NODE_RANK=0 ./torchrun.sh` on the first, `NODE_RANK=1 ./torchrun.sh` on the second.
set -euo pipefail

: "${NODE_RANK:?index of this machine, from 0}"
: "${MASTER_ADDR:=node0}" # name or address of the first machine
: "${MASTER_PORT:=29500}"

exec torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  -m isthmus sft sft.yaml
