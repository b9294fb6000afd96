"""Profiles steps: a trace of each rank for a viewer, and a table of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity

from isthmus.atomic_write import atomic_file
from isthmus.errors import IOFailure, NoSpace, Preempted
from isthmus.train.profile_table import Costs, Shape, costs_of, weight_uses


@dataclass(kw_only=True, slots=True)
class StepProfile:
    """Profiles ``steps``. A stopped run writes the steps profiled so far; a failed run writes none."""

    steps: range
    """Counted from 1; empty for none."""
    folder: Path
    """For ``rank<N>.json.gz`` and ``rank<N>.md``."""
    rank: int
    weights: Mapping[str, Shape]
    """Shapes of this rank's weights by canonical name."""
    memory_stats: Callable[[], Mapping[str, int]]
    """Bytes that stay allocated between steps, by use."""
    device: torch.device
    peak_gib: Callable[[], float]
    log: Callable[[str], None]
    _profiler: torch.profiler.profile | None = field(default=None, init=False)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The context of step ``step``, counted from 1."""
        if step in self.steps and self._profiler is None:
            on_device = self.device.type == "cuda"
            self._profiler = torch.profiler.profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])],
                record_shapes=True,
                profile_memory=True,
            )
            self._profiler.start()
        yield
        if self.steps and step == self.steps[-1]:
            self.finish()

    def finish(self) -> None:
        """End and write the profile, if one is open."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        try:
            self._write(profiler)
        except (OSError, NoSpace, IOFailure) as error:  # no reason to end the run
            self.log(f"the profile could not be written into {self.folder}: {error}")

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Preempted):
            self.finish()
        elif self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler: torch.profiler.profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"rank{self.rank}.json.gz"
        with atomic_file(trace) as temporary:
            profiler.export_chrome_trace(str(temporary))  # .gz: compressed
        costs = costs_of(profiler.events() or (), weight_uses(self.weights))
        if not costs.steps:
            return
        table = self.folder / f"rank{self.rank}.md"
        table.write_text(self._table(costs), encoding="utf-8")
        self.log(f"profile of {_step_range(costs.steps)}: {costs.largest()} of the time; {table}")

    def _table(self, costs: Costs) -> str:
        count = len(costs.steps)
        source = "the device's kernels" if costs.on_device else "this process"
        rows = [
            f"| {name} | {1e3 * cost.seconds / count:.3f} | {cost.seconds / costs.wall_s:.1%} "
            f"| {cost.calls / count:g} | {cost.allocated_bytes / count / 2**30:.4f} |"
            for name, cost in costs.rows.items()
        ]
        total_s = sum(cost.seconds for cost in costs.rows.values())
        parallel = " More than the step: kernels ran in parallel." if total_s > 1.01 * costs.wall_s else ""
        memory = {**self.memory_stats(), "peak of the rank so far, in total": self.peak_gib() * 2**30}
        lines = [
            f"# Rank {self.rank}, {_step_range(costs.steps)}",
            "",
            f"The largest costs: {costs.largest()} of the step.",
            "",
            f"A step took {1e3 * costs.wall_s / count:.3f} ms, with the overhead of the profiler. Times are those of "
            f"{source}; an operation's time excludes the operations it calls.{parallel}",
            "",
            "| what | ms a step | share | calls a step | allocates GiB a step |",
            "| --- | ---: | ---: | ---: | ---: |",
            *rows,
            f"| total | {1e3 * total_s / count:.3f} | {total_s / costs.wall_s:.1%} | | |",
            "",
            "| memory | GiB |",
            "| --- | ---: |",
            *(f"| {name} | {size / 2**30:.4f} |" for name, size in memory.items()),
            "",
            f"Open `rank{self.rank}.json.gz` in https://ui.perfetto.dev.",
            "",
        ]
        return "\n".join(lines)


def _step_range(steps: list[str]) -> str:
    numbers = sorted(int(step.split()[1]) for step in steps)
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}-{numbers[-1]}"
