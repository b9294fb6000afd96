#!/usr/bin/env bash
# Downloads and tokenizes data for train_deepseekv2.sh: DATASET=slimpajama (default) to pretrain, or DATASET=alpaca_zh.
# Variables and files as in examples/llama/prepare_dataset.sh; defaults are those of train_deepseekv2.sh.
export DATASET="${DATASET:-slimpajama}" DATA_DIR="${DATA_DIR:-deepseek-datasets}"
export TOKENIZER_MODEL="${TOKENIZER_MODEL:-deepseek-ai/DeepSeek-V2-Lite}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../llama/prepare_dataset.sh" "$@"
