#!/usr/bin/env bash
# Tokenizes data for the training scripts in this folder, with the variables of ROCm Megatron-LM's script of the same
# name: DATASET, TOKENIZER_MODEL and DATA_DIR, from the environment or as NAME=VALUE arguments.
for argument in "$@"; do
  case "$argument" in
    DATASET=* | TOKENIZER_MODEL=* | DATA_DIR=*) export "${argument?}" ;;
    *)
      echo "prepare_dataset.sh: $argument is none of DATASET, TOKENIZER_MODEL and DATA_DIR." >&2
      exit 2
      ;;
  esac
done

if [ -z "${TOKENIZER_MODEL:-}" ]; then
  echo "prepare_dataset.sh: TOKENIZER_MODEL is missing. Set it to the folder of the model's tokenizer." >&2
  exit 2
fi
name="${DATASET:-bookcorpus}"
case "$name" in
  wiki)
    source=hf:wikimedia/wikipedia/20231101.en
    echo "prepare_dataset.sh: DATASET=wiki is English Wikipedia of November 2023, $source."
    ;;
  bookcorpus)
    echo "prepare_dataset.sh: BookCorpus was withdrawn by its authors, and the Hub has only a script for it, which is not" \
      "run. Use DATASET=wiki, or DATASET=FILE with a copy of yours (JSON Lines, parquet, text), or DATASET=hf:ORG/NAME." >&2
    exit 2
    ;;
  *)
    source="$name"
    name="$(basename "${name#hf:}")"
    name="${name%%.*}"
    ;;
esac

prefix="${DATA_DIR:-data}/${name}_text_document"
mkdir -p "$(dirname "$prefix")"
"${PYTHON:-python3}" -m isthmus prepare "$source" "$prefix" --tokenizer "$TOKENIZER_MODEL" --kind text || exit
echo "prepare_dataset.sh: train on it with MOCK_DATA=0 DATA_PATH=$prefix TOKENIZER_MODEL=$TOKENIZER_MODEL"
