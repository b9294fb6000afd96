"""The ``isthmus`` command. What costs time to import is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from isthmus import __version__
from isthmus.cli import config, convert, demo, dpo, prepare, pretrain, sft, verify
from isthmus.cli.cli_args import spread_data

app = typer.Typer(
    name="isthmus",
    help="Train Hugging Face models on Megatron-Core and get Hugging Face models back.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", short_help="Show the whole way on this machine, without network.")(demo.demo)
app.command("sft", short_help="Fine-tune a model on chats.")(sft.sft)
app.command("dpo", short_help="Train a model on pairs of answers.")(dpo.dpo)
app.command("pretrain", short_help="Train a model on text.")(pretrain.pretrain)
app.command("prepare", short_help="Tokenize data once, into files that any run can read.")(prepare.prepare)
app.command("convert", short_help="Convert a model between Hugging Face and Megatron-Core.")(convert.convert)
app.command("verify", short_help="Compare two models bit by bit, in whichever formats.")(verify.verify)
app.add_typer(config.app, name="config", short_help="Look at the settings of a run.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"isthmus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def parse_and_run(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` names, without catching anything."""
    result: Any = app(args=spread_data(argv) or ["--help"], prog_name="isthmus", standalone_mode=False)
    return int(result or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; see docs/reference/exit-codes.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--debug" not in words:
        # torch's C++ warns, with a stack, of every connection that a lost peer closes. Before torch is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # and its profiler says that it starts
    from isthmus.launch.first_failure import reports_folder

    if reports_folder() is not None:
        from isthmus.cli.rank import run_rank

        return run_rank(words, parse_and_run)
    from isthmus.cli.alone import run_alone

    return run_alone(words, parse_and_run)
