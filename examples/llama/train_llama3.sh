#!/usr/bin/env bash
# The variables of ROCm Megatron-LM's script of this name, from the environment or as NAME=VALUE behind it; what they
# become is in docs/how-to/migrate-from-rocm-megatron-lm.md. DRY_RUN=1 shows it.

# Empty: where that script has it. ROCm's validation suite puts a path here.
TRAIN_LOG=${TRAIN_LOG:-}

export TRAIN_LOG
exec "${PYTHON:-python3}" -m isthmus config from-env llama3 --run -- "$@"
