#!/bin/bash
# Run it on every machine: `NODE_RANK=0 ./torchrun.sh` on the first, `NODE_RANK=1 ./torchrun.sh` on the second.
set -euo pipefail

: "${NODE_RANK:?the number of this machine, from 0}"
: "${MASTER_ADDR:=node0}" # the first machine, by a name or an address that the others reach
: "${MASTER_PORT:=29500}"

exec torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  -m isthmus sft sft.yaml
