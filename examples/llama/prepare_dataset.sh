#!/usr/bin/env bash
# Downloads and tokenizes data for the training scripts, with the variables of ROCm Megatron-LM's script of the same
# name: DATASET, TOKENIZER_MODEL and DATA_DIR, from the environment or as NAME=VALUE arguments.
#
# DATASET is wiki, bookcorpus, fineweb, slimpajama or alpaca_zh; or a file, a folder or hf:ORG/NAME. Files in DATA_DIR
# with the name of the data set (bookcorpus.jsonl, or a folder bookcorpus) are used instead of a download.
set -u
shopt -s nullglob
for argument in "$@"; do
  case "$argument" in
    DATASET=* | TOKENIZER_MODEL=* | DATA_DIR=*) export "${argument?}" ;;
    *)
      echo "prepare_dataset.sh: $argument is none of DATASET, TOKENIZER_MODEL and DATA_DIR." >&2
      exit 2
      ;;
  esac
done

name="${DATASET:-bookcorpus}"
data="${DATA_DIR:-data}"
kind=text
# Per data set: files of earlier downloads, and the data set on the Hub.
files=("$data/$name" "$data/$name".*)
case "$name" in
  wiki) hub=hf:wikimedia/wikipedia/20231101.en ;;
  fineweb) hub=hf:HuggingFaceFW/fineweb/sample-10BT ;;
  bookcorpus)
    files+=("$data"/bookcorpus_megatron.json)
    # Its authors withdrew it; this is a copy of somebody else.
    hub=hf:rojagtap/bookcorpus
    ;;
  slimpajama)
    files+=("$data"/SlimPajama.json*)
    hub=hf:DKYoon/SlimPajama-6B
    ;;
  alpaca_zh)
    files+=("$data"/alpaca_zh-train.json*)
    hub=hf:shibing624/alpaca-zh
    kind=chat
    ;;
  *)
    files=()
    hub="$name"
    name="$(basename "${name#hf:}")"
    name="${name%%.*}"
    ;;
esac
sources=()
for file in "${files[@]}"; do
  [ -e "$file" ] && sources+=("$file")
done
[ "${#sources[@]}" -gt 0 ] || sources=("$hub")

# The paths that the training scripts read without DATA_PATH.
case "$name" in
  bookcorpus) prefix="$data/bookcorpus_text_sentence" ;;
  slimpajama) prefix="$data/mmap_deepseekv2_datasets_text_document" ;;
  *) prefix="$data/${name}_${kind}_document" ;;
esac

# The default of train_llama3.sh: a folder with the files, else the Hub.
tokenizer="${TOKENIZER_MODEL:-meta-llama/Llama-3.1-8B}"
[ -z "${TOKENIZER_MODEL:-}" ] && [ -d "$data/tokenizer_llama3" ] && tokenizer="$data/tokenizer_llama3"

echo "prepare_dataset.sh: DATASET=$name from ${sources[*]} with the tokenizer $tokenizer"
mkdir -p "$data"
"${PYTHON:-python3}" -m isthmus prepare "${sources[@]}" "$prefix" --tokenizer "$tokenizer" --kind "$kind" || exit
if [ "$kind" = chat ]; then
  echo "prepare_dataset.sh: fine-tune on it with isthmus sft --data $prefix"
else
  echo "prepare_dataset.sh: train on it with MOCK_DATA=0 DATA_PATH=$prefix TOKENIZER_MODEL=$tokenizer"
fi
