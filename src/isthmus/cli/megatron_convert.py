"""``isthmus convert`` with the options of Megatron-LM's ``tools/checkpoint/convert.py``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from isthmus.cli.terminal import note
from isthmus.errors import MissingInput, UsageError

_HF_LOADERS = ("hf", "llama_mistral", "llama2_hf", "mixtral_hf", "qwen2_hf", "qwen3_hf", "gemma_hf")
_MEGATRON = ("mcore", "core", "megatron", "legacy")
_SIZES = {
    "--target-tensor-parallel-size": "--tp",
    "--target-pipeline-parallel-size": "--pp",
    "--target-expert-parallel-size": "--ep",
    "--target-expert-tensor-parallel-size": "--etp",
}
_DETECTED = ("--model-size", "--loader-transformer-impl", "--position-embedding-type", "--tokenizer-model")
"""Read from the model's folder or args instead."""
_UNUSED = ("--vocab-file", "--megatron-path", "--max-queue-size", "--make-vocab-size-divisible-by")
"""Options without use, lacking Megatron-LM's model and queue."""


def translate(argv: Sequence[str]) -> list[str]:
    """Words of ``isthmus``, with ``convert --loader ...`` replaced by the options of ``isthmus convert``.

    Prints the command that is run. Raises UsageError for what it cannot do.
    """
    words = list(argv)
    option_names = {word.partition("=")[0] for word in words}
    if words[:1] != ["convert"] or not option_names & {"--loader", "--saver", "--load-dir", "--save-dir"}:
        return words
    parsed, remaining = _parser().parse_known_args(words[1:])
    if unknown := [word for word in remaining if word not in ("--json", "--debug")]:
        raise UsageError(
            f"convert: {' '.join(unknown)} is not an option of Megatron-LM's tools/checkpoint/convert.py that Isthmus "
            "knows. Use the options of isthmus convert, see isthmus convert --help."
        )
    _check(parsed)
    command = ["convert", parsed.load_dir, parsed.save_dir, *_options(parsed)]
    unused = [name for name in (*_DETECTED, *_UNUSED) if getattr(parsed, _dest(name)) is not None]
    remarks = [f"not needed: {', '.join(unused)}"] if unused else []
    if parsed.sequence_parallel:
        remarks.append("--sequence-parallel changes no file: it is an option of training")
    if parsed.no_checking:
        remarks.append("--no-checking has no effect: args and tensors are always checked")
    if parsed.saver in ("megatron", "legacy"):
        remarks.append(f"--saver {parsed.saver} writes the names of Megatron-Core, like --saver mcore")
    note("  # ".join([f"isthmus {shlex.join(command)}", *remarks]))
    return [*command, *remaining]


def _options(parsed: argparse.Namespace) -> list[str]:
    to_hf = parsed.saver == "hf"
    options = ["--to", "hf" if to_hf else "torch"]
    for name, option in _SIZES.items():
        if (size := getattr(parsed, _dest(name))) is None or (to_hf and size == "1"):
            continue
        if to_hf:
            raise UsageError(f"{name} {size}: a Hugging Face folder has no parallel layout. Omit it.")
        options += [option, size]
    if parsed.saver_transformer_impl == "local" and not to_hf:
        options += ["--spelling", "local"]
    if parsed.true_vocab_size is not None and parsed.loader in _MEGATRON:
        options += ["--vocab-size", parsed.true_vocab_size]
    if parsed.dtype is not None:
        options += ["--dtype", parsed.dtype]
    return options


def _check(parsed: argparse.Namespace) -> None:
    """The loader must fit the folder, and all else that Isthmus does not do is refused."""
    if parsed.model_type != "GPT":
        raise UsageError(f"--model-type {parsed.model_type}: only decoder-only models (GPT) are supported.")
    if parsed.checkpoint_type == "meta":
        raise UsageError(
            "--checkpoint-type meta: consolidated.*.pth files are not read. Give the model's Hugging Face folder, and "
            "--checkpoint-type hf."
        )
    if parsed.saver not in (*_MEGATRON, "hf"):
        raise UsageError(f"--saver {parsed.saver} is not known. Use mcore (Megatron-Core) or hf (Hugging Face).")
    if parsed.loader not in (*_MEGATRON, *_HF_LOADERS):
        raise UsageError(f"--loader {parsed.loader} is not known. Use hf, or mcore for a Megatron checkpoint.")
    folder, from_hf = Path(parsed.load_dir), parsed.loader in _HF_LOADERS
    if not folder.is_dir():
        raise MissingInput(f"--load-dir {folder} is not a folder.")
    if from_hf != (folder / "config.json").is_file():
        problem = "has no config.json" if from_hf else "is a Hugging Face folder"
        raise UsageError(f"--load-dir {folder} {problem}. Use --loader {'mcore' if from_hf else 'hf'} for it.")
    sizes = (parsed.target_tensor_parallel_size, parsed.target_pipeline_parallel_size)
    if not from_hf and parsed.saver != "hf" and None in sizes:
        raise UsageError(
            "--saver mcore: give --target-tensor-parallel-size and --target-pipeline-parallel-size; sizes are not "
            "taken from the source."
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"convert: {message}.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(allow_abbrev=False, add_help=False)
    for name in ("--load-dir", "--save-dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--model-type", default="GPT")
    parser.add_argument("--loader", default="megatron")
    parser.add_argument("--saver", default="megatron")
    parser.add_argument("--checkpoint-type", choices=("hf", "meta"))
    parser.add_argument("--saver-transformer-impl", choices=("local", "transformer_engine"))
    parser.add_argument("--true-vocab-size")
    dtypes = {"bf16": "bf16", "fp16": "fp16", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    parser.add_argument("--params-dtype", dest="dtype", type=lambda word: dtypes.get(word, word))
    for name in ("--bf16", "--fp16"):
        parser.add_argument(name, dest="dtype", action="store_const", const=name.removeprefix("--"))
    for name in ("--no-checking", "--sequence-parallel"):
        parser.add_argument(name, action="store_true")
    for name in (*_SIZES, *_DETECTED, *_UNUSED):
        parser.add_argument(name)
    return parser


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
