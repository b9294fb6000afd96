#!/usr/bin/env bash
# Tokenizes chats for train-dense.sh with the model's tokenizer and chat template. The first argument is the folder of
# the model's scripts; the variables are DATASET, HF_MODEL_DIR, DATA_DIR and SEQ_LENGTH, from the environment or as
# NAME=VALUE arguments.
model="$1"
shift
for argument in "$@"; do
  case "$argument" in
    DATASET=* | HF_MODEL_DIR=* | DATA_DIR=* | SEQ_LENGTH=*) export "${argument?}" ;;
    *)
      echo "02-generate.sh: $argument is none of DATASET, HF_MODEL_DIR, DATA_DIR and SEQ_LENGTH." >&2
      exit 2
      ;;
  esac
done
if [ -z "${DATASET:-}" ]; then
  echo "02-generate.sh: DATASET is missing. Set it to a file of chats (JSON Lines, parquet) or to hf:ORG/NAME." >&2
  exit 2
fi
case "$model" in
  qwen3-0.6b) published=Qwen/Qwen3-0.6B ;;
  *) published=meta-llama/Llama-3.2-1B-Instruct ;;
esac
prefix="${DATA_DIR:-$model/data}/sft"
mkdir -p "$(dirname "$prefix")"
exec "${PYTHON:-python3}" -m isthmus prepare "$DATASET" "$prefix" --kind chat \
  --tokenizer "${HF_MODEL_DIR:-$published}" ${SEQ_LENGTH:+--seq-length "$SEQ_LENGTH"}
