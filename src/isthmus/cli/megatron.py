"""Programs of Megatron-LM: ``isthmus run`` and ``patch``, and ``isthmus convert`` with the options of its converter.

``isthmus patch`` fixes Megatron-LM's async saver, in its files or when Python imports it.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer

from isthmus.cli.options import DebugOptions, ResultOptions, argument, flag, group, option, verb
from isthmus.cli.terminal import note, say, show
from isthmus.cli.train_verbs import NPROC, start_ranks
from isthmus.config.dialects.scripts.record_script import SHELL_SUFFIXES
from isthmus.errors import CheckFailed, MissingInput, UsageError

patch_app: typer.Typer = group("Fix the async saver of Megatron-LM, for newer torch.")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOptions(DebugOptions):
    script: Path = argument("SCRIPT.py", "A script of a Megatron-LM checkout, or your own.")
    args: list[str] | None = argument("ARGS", "Its arguments, unchanged.", None, show_default=False)
    nproc: int = NPROC()
    platform: str = option("NAME", "auto, cpu, cuda or rocm.", "auto")


def run(options: ScriptOptions) -> int:
    """Run an unmodified script of Megatron-LM on ROCm, CUDA or a CPU, without TransformerEngine and Apex.

    Options of isthmus come before SCRIPT.py. Everything that is done for the script is printed, one line each.
    """
    if options.script.suffix in SHELL_SUFFIXES:
        raise UsageError(
            f"{options.script} is a shell script, and isthmus run takes the Python script that it starts. "
            f"`isthmus config from-megatron --run {options.script}` shows its training run as a config of Isthmus."
        )
    from isthmus.cli import process
    from isthmus.platforms.rank_env import rank

    if (code := start_ranks(options.nproc, debug=options.debug, script=True)) is not None:
        return code
    if process.started_by_isthmus:  # the script decides what a signal does, as under torchrun
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from isthmus.platforms.detect import detect

    with warnings.catch_warnings():  # isthmus.engine hides some of megatron's
        from isthmus.engine.upstream.megatron_script import run_script

    from isthmus.recipes.model.bridge_modules import provide_bridge

    provide_bridge()
    log = partial(print, "isthmus run:", file=sys.stderr, flush=True) if rank() == 0 else lambda line: None
    run_script(options.script, options.args or [], detect(options.platform).name, log)
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverOptions(ResultOptions):
    megatron: Path = option("DIR", "Checkout of Megatron-LM, or a folder that contains megatron/.", MISSING)
    revert: bool = flag("Remove the patch.")
    dry_run: bool = flag("Print the diff and change nothing.")
    check: bool = flag("Change nothing; exit code 1 if the saver has the fault.")


@patch_app.command("checkpoint-saver", short_help="Change the file in a checkout of Megatron-LM.")
@verb
def checkpoint_saver(options: SaverOptions) -> int:
    """Let the async saver of a Megatron-LM checkout (core 0.6 to 0.12, ROCm's fork) work with torch 2.7 and newer.

    Prints the diff. The result works with older torch, too. A second call changes nothing, and a saver without the
    fault stays as it is.
    """
    if options.check and (options.revert or options.dry_run):
        raise UsageError("--check changes nothing and prints no diff. Leave --revert and --dry-run out.")
    from isthmus.engine.upstream.saver_patch import plan_patch, plan_revert

    plan = plan_revert(options.megatron) if options.revert else plan_patch(options.megatron)
    if options.check and plan.changes:
        raise CheckFailed(
            f"{plan.file}: {plan.fault}. Fix it: isthmus patch checkpoint-saver --megatron {options.megatron}"
        )
    if plan.changes and not options.dry_run:
        plan.write()
    diff = plan.diff(options.megatron)
    if diff and not options.json:
        say(diff, end="", exact=True)
    state = ("reverted" if options.revert else "patched") if plan.changes else plan.unchanged
    state = f"would be {state}" if options.dry_run and plan.changes else state
    result = {"file": str(plan.file), "state": state, "fault": plan.fault, "diff": diff if options.json else None}
    show(result, as_json=options.json)
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions(ResultOptions):
    install: bool = flag("Write two files into site-packages, which Python reads at its start.")
    list_: bool = flag("Show the files and whether they exist.", "--list")
    remove: bool = flag("Delete the files.")


@patch_app.command("runtime", short_help="Fix Megatron-LM whenever this Python environment imports it.")
@verb
def runtime(options: RuntimeOptions) -> int:
    """Fix the async saver when any program of this environment imports Megatron-LM, whose files do not change.

    Processes that the saver spawns are fixed too. A saver without the fault stays as it is.
    """
    if options.install + options.list_ + options.remove != 1:
        raise UsageError("choose one of --install, --list and --remove.")
    from isthmus.engine.upstream import startup_hook

    files = startup_hook.hook_files()
    if options.install:
        startup_hook.install(files)
    elif options.remove:
        startup_hook.remove(files)
    state = "installed" if startup_hook.installed(files) else "not installed"
    show({"files": [str(path) for path in files], "state": state}, as_json=options.json)
    return 0


def translate_convert(argv: Sequence[str]) -> list[str]:
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
    command = ["convert", parsed.load_dir, parsed.save_dir, *_convert_options(parsed)]
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


def _convert_options(parsed: argparse.Namespace) -> list[str]:
    to_hf = parsed.saver == "hf"
    options = ["--to", "hf" if to_hf else "torch"]
    for name, ours in _SIZES.items():
        if (size := getattr(parsed, _dest(name))) is None or (to_hf and size == "1"):
            continue
        if to_hf:
            raise UsageError(f"{name} {size}: a Hugging Face folder has no parallel layout. Omit it.")
        options += [ours, size]
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
