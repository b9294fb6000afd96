#!/usr/bin/env bash
# Fine-tunes on what generate.sh wrote. The first argument is the folder of the model's scripts; the variables are
# listed in docs/how-to/migrate-from-rocm-megatron-lm.md, from the environment or as NAME=VALUE arguments.
# Training reads Hugging Face weights in any layout. A Megatron checkpoint in INIT_CHECKPOINT or BASE_CKPT_DIR is first
# converted to a Hugging Face folder next to it.
model="$1"
python="${PYTHON:-python3}"
words=()
for argument in "${@:2}"; do
  case "$argument" in
    INIT_CHECKPOINT=* | BASE_CKPT_DIR=* | HF_MODEL_DIR=*) export "${argument?}" ;;
    *) words+=("$argument") ;;
  esac
done
for checkpoint in "${INIT_CHECKPOINT:-}" "${BASE_CKPT_DIR:-}"; do
  if [ -e "$checkpoint/latest_checkpointed_iteration.txt" ]; then
    folder="${checkpoint%/}-hf"
    if [ ! -e "$folder" ]; then
      "$python" -m isthmus convert "$checkpoint" "$folder" --to hf ${HF_MODEL_DIR:+--hf-like "$HF_MODEL_DIR"} || exit
    fi
    export HF_MODEL_DIR="$folder"
    unset INIT_CHECKPOINT BASE_CKPT_DIR
    break
  fi
done
exec "$python" -m isthmus config from-env "$model" --run -- "${words[@]}"
