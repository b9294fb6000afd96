"""The ``isthmus`` command. Slow imports happen in the command that needs them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from isthmus import __version__
from isthmus.cli import (
    bench,
    chat,
    convert,
    data_view,
    doctor,
    evaluate,
    patch,
    plan,
    prepare,
    report,
    script,
    train_verbs,
    tune,
    verify,
)
from isthmus.cli.cli_args import spread_data
from isthmus.cli.config.config_verbs import app as config_app
from isthmus.cli.options import Debug, Json, verb
from isthmus.cli.terminal import show
from isthmus.config.recipes import RECIPE_SETTINGS


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for all output.")] = Path("isthmus-demo")
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks for the training.")] = 2
    debug: Debug = False
    json: Json = False


def demo(options: DemoOptions) -> int:
    """Run everything on this machine without network: build a small model, train it, export it, answer questions."""
    from isthmus.tools.demo.run_demo import print_summary, run

    # The demo's commands are child processes, which must be stopped first.
    signal.signal(signal.SIGTERM, _terminated)
    # With --json, stdout contains only the result.
    log = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    result = run(options.out, nproc=options.nproc, debug=options.debug, log=log)
    if options.json:
        show(result, as_json=True)
    else:
        print_summary(result)
    return 0


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


app = typer.Typer(
    name="isthmus",
    help="Train Hugging Face models on Megatron-Core and export Hugging Face models.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", short_help="Train and export a small model on this machine, without network.")(verb(demo))
for recipe, settings in RECIPE_SETTINGS.items():
    app.command(recipe, short_help=settings.short_help)(train_verbs.train_verb(recipe))
app.command("prepare", short_help="Tokenize data once into indexed files for many runs.")(verb(prepare.prepare))
app.command("convert", short_help="Convert a model between Hugging Face and Megatron-Core.")(verb(convert.convert))
app.command("merge", short_help="Merge a LoRA adapter into its base model.")(verb(convert.merge))
app.command("verify", short_help="Compare two models bit by bit, in any formats.")(verb(verify.verify))
app.command("doctor", short_help="Check whether this machine can train, and what slows it down.")(verb(doctor.doctor))
app.command("plan", short_help="Print the layouts that fit a model into GPUs, with memory and step time.")(
    verb(plan.plan)
)
app.command("bench", short_help="Measure the training step in a grid of settings.")(verb(bench.bench))
app.command("report", short_help="Write curves, data and settings of runs into one HTML file.")(verb(report.report))
app.command("eval", short_help="Run tasks of lm-evaluation-harness on a model or a checkpoint.")(
    verb(evaluate.evaluate)
)
app.command("tune", short_help="Measure the matmuls of a model and layout, for faster runs.")(verb(tune.tune))
app.command(
    "run",
    short_help="Run an unmodified Megatron-LM script on any platform.",
    context_settings={"allow_interspersed_args": False},
)(verb(script.run))
app.command("chat", short_help="Talk to a model in the terminal.")(verb(chat.chat))
app.add_typer(data_view.app, name="data", short_help="Show samples of data files as a run reads them.")
app.add_typer(patch.app, name="patch", short_help="Fix the async saver of Megatron-LM, for newer torch.")
app.add_typer(config_app, name="config", short_help="Show configs and presets; translate other programs' settings.")


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


def parse_and_run(argv: Sequence[str]) -> int:
    """Does not catch errors."""
    if argv[:1] == ["convert"]:
        from isthmus.cli.megatron_convert import translate

        argv = translate(argv)
    words = list(argv) if argv[:1] == ["run"] else spread_data(argv)  # a script has its own arguments
    result: Any = app(args=words or ["--help"], prog_name="isthmus", standalone_mode=False)
    return int(result or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """See docs/reference/exit-codes.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--debug" not in words:
        # Before torch is imported: its C++ code warns with a stack for every connection that an ended rank closes,
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # and its profiler reports its start.
    from isthmus.cli.exit import open_closed_streams
    from isthmus.cli.process import run_alone, run_rank
    from isthmus.platforms import cpu_threads, rank_env

    open_closed_streams()
    cpu_threads.sleep_while_waiting()

    return (run_alone if rank_env.stop_file() is None else run_rank)(words, parse_and_run)
