"""``isthmus demo``."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from isthmus.cli.run_recipe import Debug, Json, show

if TYPE_CHECKING:
    from isthmus.demo.run_demo import DemoResult


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for everything it makes.")] = Path("isthmus-demo"),
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")] = 2,
    debug: Debug = False,
    json: Json = False,
) -> int:
    """Make a tiny model, pretrain and fine-tune it on this machine, export it and let it answer. No network."""
    from isthmus.demo.run_demo import run

    # The commands of the demo are child processes; they are terminated on SIGTERM.
    signal.signal(signal.SIGTERM, _exit)
    # With --json, stdout contains the result only.
    log = partial(print, file=sys.stderr if json else sys.stdout, flush=True)
    result = run(out, nproc=nproc, debug=debug, log=log)
    if json:
        show(result, as_json=True)
    else:
        _print_summary(result)
    return 0


def _print_summary(result: DemoResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Results")
    for column in ("", "before", "after", "chance"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("pretraining: validation loss", *(f"{loss:.3f}" for loss in result.pretrain_loss), "")
    table.add_row("fine-tuning: held-out loss", *(f"{loss:.3f}" for loss in result.sft_loss), "")
    for topic, scores in result.exact_match.items():
        table.add_row(f"held-out exact match: {topic}", *(f"{score:.0%}" for score in scores.values()))
    console = Console(highlight=False)
    console.print(table)
    for question, answer, expected in result.examples:
        mark = "correct" if answer == expected else f"expected: {expected}"
        console.print(f"  Q: {question}\n  A: {answer}   ({mark})", markup=False)
    console.print(
        f"\nLogits of the export, transformers against Megatron-Core: largest difference {result.logits_difference:.1e}"
        f"\nStopped and resumed at step {result.resumed_at_step}; {result.tokens_per_s:,.0f} tokens/s; "
        f"{result.time_s:.0f} s in total\nModel: {result.model}\nRun:   {result.run}"
        f"\nNext:  isthmus sft --model {result.model} --data YOUR.jsonl --out runs/first --nproc 2 parallel.tp=2",
        markup=False,
        soft_wrap=True,
    )


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
