"""Measures the cells of a grid, one after the other, and records each result; a second call continues."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.errors import CheckFailed, DataError, OutputExists, UsageError
from isthmus.files.atomic_write import write_atomic
from isthmus.files.folder_lock import LOCK, locked_folder
from isthmus.files.input_files import read_json
from isthmus.tools.bench.bench_checks import Environment, check_cells
from isthmus.tools.bench.bench_config import cell_config, fingerprint
from isthmus.tools.bench.bench_grid import BenchCell
from isthmus.tools.bench.cell_run import Command, run_cell

RESULTS_FILE = "bench.json"
Row = dict[str, Any]
"""A cell, its status, and its figures or the reason why it has none."""
_STATUS = {"not finished after": "timeout", "out of memory": "out of memory"}
"""Status of a failed run by words of its error."""


@dataclass(frozen=True, slots=True)
class CheckedCell:
    cell: BenchCell
    config: RunConfig | None
    """None if it is not valid."""
    refusal: str | None = None
    key: str | None = None
    """Fingerprint of the settings."""
    environment: Environment | None = None

    def row(self, status: str, **values: Any) -> Row:
        result = {**self.cell.as_dict(), "status": status, **values}
        return result | {"fingerprint": self.key, "environment": self.environment}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """How cells are measured."""

    out: Path
    recipe: str | None
    """None: that of each config file."""
    model: str | None
    warmup: int
    """Steps before the measured ones, at least 1."""
    steps: int
    timeout_s: float
    """Limit of a cell."""
    retry: bool
    """Measure cells again that failed in an earlier call."""
    command: Command
    log: Callable[[str], None]
    watch: Callable[[BenchCell, int], None]
    """Is called with the number of steps that a cell has done, a few times per second."""

    def run(self, cells: Sequence[BenchCell], command_line: str) -> dict[str, Any]:
        """Measure all cells; returns the content of ``RESULTS_FILE`` with the rows of these cells only.

        Raises:
            UsageError: no cell has a valid config.
            OutputExists, OutputInUse: the folder has other files, or another command writes to it.
            DataError: the recorded results are damaged.
        """
        with locked_folder(self.out):
            recorded = self._recorded()
            checked = self._check(cells)
            refused = {cell.cell: cell.row("refused", reason=cell.refusal) for cell in checked if cell.key is None}
            certificate = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "command": command_line,
                "system": f"{platform.system()} {platform.release()} {platform.machine()}",
                "environment": next((cell.environment for cell in checked if cell.environment), {}),
            }
            rows, number = [], 0
            for cell in checked:
                if cell.key is not None:
                    number += 1
                    recorded[cell.key] = self._result(cell, recorded, f"{number}/{len(checked) - len(refused)}  ")
                rows.append(refused[cell.cell] if cell.key is None else recorded[cell.key])
                results = {"certificate": certificate, "cells": [*recorded.values(), *refused.values()]}
                write_atomic(self.out / RESULTS_FILE, json.dumps(results, indent=1) + "\n")
        return {"certificate": certificate, "cells": rows}

    def _recorded(self) -> dict[str, Row]:
        """The measured rows by fingerprint."""
        file = self.out / RESULTS_FILE
        if not file.exists():
            if any(path.name not in (LOCK, "cells") for path in self.out.iterdir()):
                raise OutputExists(
                    f"{self.out} exists already and has no {RESULTS_FILE}. Choose another folder with --out."
                )
            return {}
        try:
            return {row["fingerprint"]: row for row in read_json(file)["cells"] if row["status"] != "refused"}
        except (KeyError, TypeError) as error:
            raise DataError(f"{file} is damaged: it has no cells. Remove it, or choose another --out.") from error

    def _check(self, cells: Sequence[BenchCell]) -> list[CheckedCell]:
        """The cells in their order, with the reasons of those whose run would be refused."""
        valid: dict[BenchCell, RunConfig] = {}
        invalid: dict[BenchCell, UsageError] = {}
        for cell in cells:
            try:
                steps = self.warmup + self.steps
                config = cell_config(cell, recipe=self.recipe, model=self.model, steps=steps, out=self.out)
            except UsageError as error:
                invalid[cell] = error
            else:
                key = fingerprint(config, nproc=cell.nproc, warmup=self.warmup)
                valid[cell] = config.model_copy(update={"out": str(self.out / "cells" / key)})
        if not valid:
            raise next(iter(invalid.values()))
        checked = {cell: CheckedCell(cell, None, " ".join(str(error).split())) for cell, error in invalid.items()}
        for refused in checked.values():
            self.log(describe_row(refused.row("refused", reason=refused.refusal)))
        checks = check_cells([(config, cell.nproc) for cell, config in valid.items()])
        for (cell, config), (environment, refusal) in zip(valid.items(), checks, strict=True):
            name = None if refusal else Path(config.out).name
            checked[cell] = CheckedCell(cell, config, refusal, name, environment)
            if refusal:
                self.log(describe_row(checked[cell].row("refused", reason=refusal)))
        return [checked[cell] for cell in cells]

    def _result(self, checked: CheckedCell, recorded: dict[str, Row], number: str) -> Row:
        """The recorded row of a cell, or a new one."""
        assert checked.key is not None and checked.environment is not None
        if (row := recorded.get(checked.key)) is not None and not (self.retry and row["status"] != "ok"):
            changes = _changes(row["environment"], checked.environment)
            if not changes:
                self.log(f"{number}{describe_row(row)} (recorded)")
                return row | checked.cell.as_dict()  # other settings may vary in this grid
            self.log(f"measured again, since its environment has changed ({changes}): {checked.cell}")
        self.log(f"{number}{checked.cell}")
        row = self._measure(checked)
        self.log(f"{number}{describe_row(row)}")
        return row

    def _measure(self, checked: CheckedCell) -> Row:
        assert checked.config is not None
        try:
            figures = run_cell(
                checked.config,
                nproc=checked.cell.nproc,
                warmup=self.warmup,
                timeout_s=self.timeout_s,
                command=self.command,
                watch=lambda steps: self.watch(checked.cell, steps),
            )
        except CheckFailed as error:
            status = next((status for words, status in _STATUS.items() if words in str(error)), "failed")
            return checked.row(status, reason=str(error), log=f"{checked.config.out}.log")
        return checked.row("ok", **figures)


def _changes(before: Environment, now: Environment) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names)


def describe_row(row: Row) -> str:
    """A row in one line."""
    if row["status"] != "ok":
        return f"{row['cell']}: {row['status']}: {row['reason']}"
    return f"{row['cell']}: {row['tokens_per_s']:,.0f} tokens/s, step {row['step_time_s']:.3g} s"


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """The row with the most tokens/s of each config."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["status"] == "ok":
            best[row["name"]] = max(row, best.get(row["name"], row), key=lambda candidate: candidate["tokens_per_s"])
    return list(best.values())
