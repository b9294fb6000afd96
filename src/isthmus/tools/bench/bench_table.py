"""The results of a benchmark as a table and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from isthmus.errors import escaped
from isthmus.extras import optional_package
from isthmus.files.atomic_write import atomic_file
from isthmus.tools.bench.run_bench import Row

_UNSTEADY = 0.05
"""Relative difference of the mean step time from the median that is reported."""


def bench_table(rows: Sequence[Row]) -> Table:
    """A line per cell; columns with the same value in all of them are left out."""
    table = Table(
        caption="TFLOP/s count causal attention; memory is the peak of the rank with most; ± is the "
        "interquartile range of the step times."
    )
    names = [setting.partition("=")[0] for setting in max((row["varied"] for row in rows), key=len, default=[])]
    several = {key: len({row[key] for row in rows}) > 1 for key in ("name", "nproc")}
    for column in ["config"] * several["name"] + ["ranks"] * several["nproc"] + names:
        table.add_column(column, justify="left" if column == "config" else "right", overflow="fold")
    for column in ("tokens/s", "per device", "TFLOP/s", "MFU", "memory", "step", "±"):
        table.add_column(column, justify="right", no_wrap=True)
    if any(map(_note, rows)):
        table.add_column("note", overflow="fold")
    for row in rows:
        settings = [setting.partition("=")[2] for setting in row["varied"]]
        cells = [row["name"]] * several["name"] + [str(row["nproc"])] * several["nproc"] + settings
        table.add_row(*cells, *_figures(row), *([escaped(_note(row))] if any(map(_note, rows)) else []))
    return table


def _figures(row: Row) -> list[str]:
    if row["status"] != "ok":
        return ["-"] * 7
    tflops, mfu = row["tflops_per_device"], row["mfu"]
    return [
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tokens_per_s_per_device']:,.0f}",
        "-" if tflops is None else f"{tflops:.3g}",
        "-" if mfu is None else f"{mfu:.1%}",
        f"{row['memory_gib']:.2f} GiB",
        f"{row['step_time_s']:.3g} s",
        f"{row['step_time_spread']:.1%}",
    ]


def _note(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    drift = row["mean_step_time_s"] / row["step_time_s"] - 1
    if abs(drift) < _UNSTEADY:
        return ""
    return f"unsteady: the mean of the step times is {drift:+.0%} from their median; raise --steps or --warmup"


def import_pyplot() -> Any:
    """matplotlib.pyplot, without a display; raises UsageError if it is not installed."""
    with optional_package("isthmus bench --png", "matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

    return pyplot


def write_chart(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG with a bar of tokens/s per device for each cell, or the status of a cell that has none.

    Raises:
        UsageError: matplotlib is not installed.
        NoSpace, IOFailure: the file cannot be written.
    """
    pyplot = import_pyplot()
    rows = rows[::-1]  # the first one is at the top
    rates = [row["tokens_per_s_per_device"] if row["status"] == "ok" else 0.0 for row in rows]
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.35 * len(rows)), layout="constrained")
    bars = axes.barh(range(len(rows)), rates)
    axes.bar_label(
        bars, [f"{rate:,.0f}" if rate else row["status"] for rate, row in zip(rates, rows, strict=True)], padding=3
    )
    axes.set_yticks(range(len(rows)), [row["cell"] for row in rows])
    axes.set_xlabel("tokens/s per device")
    axes.set_title(title, fontsize="small", wrap=True)
    axes.margins(x=0.15)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    pyplot.close(figure)
