"""``isthmus bench``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.options import ResultOptions, argument, configs_and_overrides, flag, option
from isthmus.cli.terminal import interruptible, show
from isthmus.cli.train_verbs import MODEL
from isthmus.errors import Preempted, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus.tools.bench.bench_grid import BenchCell


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions(ResultOptions):
    words: list[str] | None = argument(
        "CONFIG.yaml|KEY=VALUE,...",
        "Config files, preset:NAME or tables, and settings with one or several values, such as parallel.tp=1,2.",
        None,
        show_default=False,
    )
    model: str | None = MODEL()
    recipe: str | None = option("RECIPE", "pretrain or sft; default: that of CONFIG.yaml, or pretrain.")
    nproc: str = option("N,...", "Numbers of ranks to start on this machine, such as 1,2,4.", "1")
    warmup: int = option("N", "Steps of a cell before the measured ones.", 5, min=1)
    steps: int = option("N", "Measured steps of a cell.", 10, min=2)
    timeout: float = option("SECONDS", "Longest time of a cell.", 1800.0, min=1)
    out: Path = option("DIR", "Folder for results. A second call continues.", Path("isthmus-bench"))
    retry: bool = flag("Measure cells again that failed in an earlier call.")
    png: Path | None = option("FILE", "Also write a chart.")


def bench(options: BenchOptions) -> int:
    """Measure the training step of configs on mock data, in a grid of settings.

    A failing cell has its reason in the table. The best config is printed, and written to DIR.
    """
    from isthmus.cli import process
    from isthmus.platforms.rank_env import is_one_of_several_ranks
    from isthmus.tools.bench.bench_config import check_settings
    from isthmus.tools.bench.bench_grid import make_cells
    from isthmus.tools.bench.bench_table import import_pyplot, write_chart
    from isthmus.tools.bench.run_bench import Bench

    if is_one_of_several_ranks():
        raise UsageError("isthmus bench starts the ranks of each cell itself. Start it once, without torchrun or srun.")
    if options.png is not None:
        import_pyplot()  # refused before hours of measurements
    configs, settings = configs_and_overrides(options.words or [])
    check_settings(settings)
    cells = make_cells(configs, settings, _numbers(options.nproc), configs_and_overrides)
    recipe = options.recipe or (None if configs else "pretrain")
    try:
        with interruptible(), _progress(len(cells)) as (log, watch):
            results = Bench(
                out=options.out,
                recipe=recipe,
                model=options.model,
                warmup=options.warmup,
                steps=options.steps,
                timeout_s=options.timeout,
                retry=options.retry,
                command=lambda arguments: process.run_alone([*arguments, *["--debug"] * options.debug], process.parse),
                log=log,
                watch=watch,
            ).run(cells, shlex.join(["isthmus", *process.argv]))
    except KeyboardInterrupt:
        raise Preempted(
            f"stopped as requested. Finished cells are recorded in {options.out}; the same command continues."
        ) from None
    best = _write_best(results["cells"], cells, options.out, recipe=recipe, model=options.model)
    if options.png is not None:
        write_chart(results["cells"], options.png, results["certificate"]["environment"].get("device", ""))
    if options.json:
        show(results | {"best": best}, as_json=True)
    else:
        _print_results(results, best)
    return 0 if best else 1


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= number <= 1024 for number in numbers):
        raise UsageError(
            f"--nproc {text} is not a list of numbers of ranks from 1 to 1024. Write --nproc 8 or --nproc 1,2,4."
        )
    return numbers


@contextmanager
def _progress(cells: int) -> Iterator[tuple[Callable[[str], None], Callable[[BenchCell, int], None]]]:
    """Functions that print a line to stderr, and show the steps of a cell if stderr is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{cells} {'cell' if cells == 1 else 'cells'}; checking their configs")
    with console.status("") as status:
        yield console.print, lambda cell, steps: status.update(Text(f"{cell}: {steps} steps"))


def _write_best(
    rows: list[dict[str, Any]], cells: list[BenchCell], out: Path, *, recipe: str | None, model: str | None
) -> list[dict[str, Any]]:
    """Write the config of the best cell of each config to OUT; returns rows with ``config`` and ``file``."""
    from isthmus.files.atomic_write import write_atomic
    from isthmus.tools.bench.bench_config import pasteable_yaml
    from isthmus.tools.bench.run_bench import best_rows

    results = []
    best = best_rows(rows)
    for earlier in out.glob("best*.yaml"):
        earlier.unlink()
    for number, row in enumerate(best, start=1):
        cell = next(cell for cell, other in zip(cells, rows, strict=True) if other is row)
        file = out / ("best.yaml" if len(best) == 1 else f"best-{number}.yaml")
        config = pasteable_yaml(cell, recipe=recipe, model=model)
        write_atomic(file, f"# {cell}: {row['tokens_per_s']:,.0f} tokens/s\n{config}")
        results.append(
            {name: row[name] for name in ("name", "nproc", "settings")} | {"file": str(file), "config": config}
        )
    return results


def _print_results(results: dict[str, Any], best: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from isthmus.tools.bench.bench_table import bench_table

    width = None if sys.stdout.isatty() else 160
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    console.print(bench_table(results["cells"]))
    console.print(results["certificate"]["environment"].get("device", ""))
    if len(best) == 1:
        console.print(f"\nbest, in {best[0]['file']} (--nproc {best[0]['nproc']}):\n\n{best[0]['config']}")
    for row in best if len(best) > 1 else ():
        console.print(f"best of {row['name']}: {row['file']} (--nproc {row['nproc']})")
