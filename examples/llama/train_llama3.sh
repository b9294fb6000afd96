#!/usr/bin/env bash
# Accepts the variables of ROCm Megatron-LM's script of the same name, from the environment or as NAME=VALUE arguments.
# docs/how-to/migrate-from-rocm-megatron-lm.md lists the resulting settings; DRY_RUN=1 prints them.

# Log file. Empty: the path of the original script. ROCm's validation suite inserts a path here.
TRAIN_LOG=${TRAIN_LOG:-}

export TRAIN_LOG
exec "${PYTHON:-python3}" -m isthmus config from-env llama3 --run -- "$@"
