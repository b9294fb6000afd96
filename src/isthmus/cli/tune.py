"""``isthmus tune``."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.cli_args import config_and_overrides
from isthmus.cli.options import Debug, Json
from isthmus.cli.terminal import note, say
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    words: Words = None
    model: Model = None
    out: Out = None
    debug: Debug = False
    json: Json = False


def tune(options: TuneOptions) -> int:
    """Measure the matmuls of a model and layout on this device, and write the fastest choice for runs: tune.file."""
    from isthmus.platforms.rank_env import is_one_of_several_ranks
    from isthmus.tools.tune.run_tune import config_to_tune, tune_run

    if is_one_of_several_ranks():
        raise UsageError("isthmus tune measures one rank of the layout on one device. Start it once, without torchrun.")
    file, overrides = config_and_overrides(options.words or [])
    config = config_to_tune(file, overrides, options.model)
    result, path = tune_run(config, options.out, note)
    if options.json:
        print(json_module.dumps(result.as_dict() | {"file": str(path)}), flush=True)
    else:
        _print(result, path)
    return 0


def _print(result: TuneResult, path: Path) -> None:
    rows = [("matmul", "M x K x N", "ms", "TFLOP/s", "gain", "choice")]
    for row in result.rows:
        values = row.as_dict()
        name, shape = f"{row.matmul.weight} {row.matmul.part}", "{m} x {k} x {n}".format_map(values)
        ms = f"{row.default_ms:.3g} -> {row.ms:.3g}"
        tflops = f"{values['default_tflops']:.3g} -> {values['tflops']:.3g}"
        rows.append((name, shape, ms, tflops, f"{row.gain:.2f}", row.chosen))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        say("  ".join(map(str.ljust, cells, widths)).rstrip())
    before, after = result.total_ms(tuned=False), result.total_ms(tuned=True)
    say(f"all matmuls: {before:.4g} -> {after:.4g} ms, {before / after:.2f} times as fast")
    if result.threads is not None:
        say(f"threads: {result.threads} ({result.default_threads} by default)")
    for remark in result.notes:
        say(f"note: {remark}")
    say(f"use it: tune.file={path}")
