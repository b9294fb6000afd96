"""The ``isthmus`` command. Slow imports happen in the command that needs them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from isthmus import __version__
from isthmus.cli import (
    bench,
    chat,
    completion,
    convert,
    data_view,
    doctor,
    evaluate,
    init,
    launch,
    megatron,
    plan,
    prepare,
    report,
    train_verbs,
    tune,
)
from isthmus.cli.config.config_verbs import app as config_app
from isthmus.cli.habits import option_answer
from isthmus.cli.options import ResultOptions, option, spread_data, verb
from isthmus.cli.terminal import show
from isthmus.cli.verb_help import VerbGroup, epilog, next_steps
from isthmus.config.deprecated_names import current_words
from isthmus.config.recipes import RECIPE_SETTINGS
from isthmus.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions(ResultOptions):
    out: Path = option("DIR", "Folder for all output.", Path("isthmus-demo"))
    nproc: int = option("N", "Number of ranks for the training.", 2, min=1)


def demo(options: DemoOptions) -> int:
    """Run everything on this machine without network: build a small model, train it, export it, answer questions."""
    from rich.console import Console

    from isthmus.tools.demo.run_demo import print_summary, run

    # The demo's commands are child processes, which must be stopped first.
    signal.signal(signal.SIGTERM, _terminated)
    # With --json, stdout contains only the result.
    console = Console(stderr=options.json, highlight=False, markup=False, soft_wrap=True)
    status = console.status("")
    with nullcontext() if options.debug else status:  # the commands print for themselves
        result = run(options.out, nproc=options.nproc, debug=options.debug, log=console.print, show=status.update)
    if options.json:
        show(result, as_json=True)
    else:
        print_summary(result)
    return 0


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


app: typer.Typer = typer.Typer(
    name="isthmus",
    help="Train Hugging Face models on Megatron-Core and export Hugging Face models.",
    cls=VerbGroup,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(name: str, function: Callable[..., int], short_help: str, **settings: Any) -> None:
    app.command(name, short_help=short_help, epilog=epilog(name), **settings)(function)


def print_version() -> int:
    """Print the version."""
    print(f"isthmus {__version__}")
    return 0


_add("demo", verb(demo), "Train and export a small model on this machine, without network.")
for recipe, settings in RECIPE_SETTINGS.items():
    _add(recipe, train_verbs.train_verb(recipe), settings.short_help)
_add("launch", verb(launch.launch), "Start a run on many machines: Slurm, Kubernetes, Ray or ssh.")
_add("prepare", verb(prepare.prepare), "Tokenize data once into indexed files for many runs.")
_add("convert", verb(convert.convert), "Convert a model between Hugging Face and Megatron-Core.")
_add("merge", verb(convert.merge), "Merge a LoRA adapter into its base model.")
_add("verify", verb(convert.verify), "Compare two models bit by bit, in any formats.")
_add("doctor", verb(doctor.doctor), "Check whether this machine can train, and what slows it down.")
_add("init", verb(init.init), "Look at data and machine, and write the config of a first run.")
_add("plan", verb(plan.plan), "Print the layouts that fit a model into GPUs, with memory and step time.")
_add("bench", verb(bench.bench), "Measure the training step in a grid of settings.")
_add("report", verb(report.report), "Write curves, data and settings of runs into one HTML file.")
_add("eval", verb(evaluate.evaluate), "Run tasks of lm-evaluation-harness on a model or a checkpoint.")
_add("tune", verb(tune.tune), "Measure the matmuls of a model and layout, for faster runs.")
_add(
    "run",
    verb(megatron.run),
    "Run an unmodified Megatron-LM script on any platform.",
    context_settings={"allow_interspersed_args": False},
)
_add("chat", verb(chat.chat), "Talk to a model in the terminal.")
_add("completion", verb(completion.completion), "Print the script for completion in bash, zsh or fish.")
_add("version", print_version, "Print the version.")
for name, subcommands, short_help in (
    ("data", data_view.app, "Show samples of data files as a run reads them."),
    ("patch", megatron.patch_app, "Fix the async saver of Megatron-LM, for newer torch."),
    ("config", config_app, "Show configs and presets; translate other programs' settings."),
):
    app.add_typer(subcommands, name=name, epilog=epilog(name), short_help=short_help)


def _print_version(value: bool) -> None:
    if value:
        print(f"isthmus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@cache
def _command() -> Any:
    """The tree of verbs and options: typer would build it anew for each call in one process."""
    return typer.main.get_command(app)


def parse_and_run(argv: Sequence[str]) -> int:
    """Does not catch errors."""
    argv = megatron.translate_convert(current_words(argv))
    words = list(argv) if argv[:1] == ["run"] else spread_data(argv)  # a script has its own arguments
    completion.prepare_completion()
    if not words and "_ISTHMUS_COMPLETE" not in os.environ:
        print(next_steps(Path()), flush=True)
        return 0
    try:
        result: Any = _command()(args=words, prog_name="isthmus", standalone_mode=False)
    except Exception as error:
        option = getattr(error, "option_name", None)  # of typer's error for an unknown option
        if option is None or getattr(error, "possibilities", error) is error:
            raise
        answer = option_answer(words[0], option, words)
        if answer is None:
            raise
        raise UsageError(answer) from error
    return int(result or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """See docs/reference/exit-codes.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--debug" not in words:
        # Before torch is imported: its C++ code warns with a stack for every connection that an ended rank closes,
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # and its profiler reports its start.
    from isthmus.cli.process import open_closed_streams, print_deprecations, run_alone, run_rank
    from isthmus.platforms import cpu_threads, rank_env

    open_closed_streams()
    cpu_threads.sleep_while_waiting()
    print_deprecations()

    return (run_alone if rank_env.stop_file() is None else run_rank)(words, parse_and_run)
