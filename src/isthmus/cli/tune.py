"""``isthmus tune``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.options import ResultOptions, config_and_overrides, option
from isthmus.cli.terminal import note, say, show
from isthmus.cli.train_verbs import MODEL, WORDS
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.tools.tune.choose import TuneResult


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions(ResultOptions):
    words: list[str] | None = WORDS()
    model: str | None = MODEL()
    out: Path | None = option(
        "FILE", "The file for tune.file. Default: tune.json, or tune.csv for AMD GPUs.", show_default=False
    )


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
        show(result.as_dict() | {"file": str(path)}, as_json=True)
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
