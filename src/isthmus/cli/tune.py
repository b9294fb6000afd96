"""``isthmus tune``."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.cli_args import config_and_overrides
from isthmus.cli.options import Debug, Json
from isthmus.cli.train_verbs import Model, Words
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.tools.tune.choose import TuneResult

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The file for tune.file. Default: tune.json, or tune.csv for AMD GPUs.", show_default=False
    ),
]


def tune(words: Words = None, model: Model = None, out: Out = None, debug: Debug = False, json: Json = False) -> int:
    """Measure the matmuls of a model and layout on this device, and write the fastest choice for runs: tune.file."""
    from isthmus.platforms.rank_env import is_one_of_several_ranks
    from isthmus.tools.tune.run_tune import config_to_tune, tune_run

    if is_one_of_several_ranks():
        raise UsageError("isthmus tune measures one rank of the layout on one device. Start it once, without torchrun.")
    file, overrides = config_and_overrides(words or [])
    config = config_to_tune(file, overrides, model)
    found, path = tune_run(config, out, lambda line: print(line, file=sys.stderr, flush=True))
    if json:
        print(json_module.dumps(found.as_dict() | {"file": str(path)}), flush=True)
    else:
        _print(found, path)
    return 0


def _print(found: TuneResult, path: Path) -> None:
    rows = [("matmul", "M x K x N", "ms", "TFLOP/s", "gain", "choice")]
    for row in found.rows:
        values = row.as_dict()
        rows.append((
            f"{row.matmul.weight} {row.matmul.part}", "{m} x {k} x {n}".format_map(values),
            f"{row.default_ms:.3g} -> {row.ms:.3g}", f"{values['default_tflops']:.3g} -> {values['tflops']:.3g}",
            f"{row.gain:.2f}", row.chosen,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(map(str.ljust, cells, widths)).rstrip())
    before, after = found.total_ms(tuned=False), found.total_ms(tuned=True)
    print(f"all matmuls: {before:.4g} -> {after:.4g} ms, {before / after:.2f} times as fast")
    if found.threads is not None:
        print(f"threads: {found.threads} ({found.default_threads} by default)")
    for note in found.notes:
        print(f"note: {note}")
    print(f"use it: tune.file={path}")
