"""A profile of some steps: a trace of each rank to look at, and a table of where its time and memory went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity

from isthmus.atomic_write import atomic_file
from isthmus.errors import Preempted
from isthmus.train.profile_table import Costs, Shape, costs_of, weight_uses


class StepProfile:
    """Profiles the steps it was asked for; costs nothing before and after them.

    A run that is asked to stop writes what was profiled until then; one that fails leaves no profile.
    """

    def __init__(
        self,
        steps: range,
        folder: Path,
        *,
        rank: int,
        weights: Mapping[str, Shape],
        held: Callable[[], Mapping[str, int]],
        memory_gib: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        """Set up.

        Args:
            steps: to profile, counted from 1; empty for none.
            folder: of the run; the files go to ``profile/rank<N>.json.gz`` and ``.md`` in it.
            rank: of this process.
            weights: shapes of this rank's weights by name, by which matrix products are told apart.
            held: bytes that stay over the steps, by what they are for; asked when the profile ends.
            memory_gib: this rank's peak so far.
            say: prints a line for the user.
        """
        self._steps = steps
        self._folder = folder / "profile"
        self._rank = rank
        self._weights = weights
        self._held = held
        self._memory_gib = memory_gib
        self._say = say
        self._profiler: torch.profiler.profile | None = None

    def around(self, step: int) -> AbstractContextManager[None]:
        """Enter it around step ``step``, counted from 1."""
        return self._profiled(step) if step in self._steps else nullcontext()

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        if self._profiler is None:
            on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
            self._profiler = torch.profiler.profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])],
                record_shapes=True,
                profile_memory=True,
            )
            self._profiler.start()
        yield
        if step == self._steps[-1]:
            self.finish()

    def finish(self) -> None:
        """End the profile here and write it; does nothing where there is none."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        try:
            self._write(profiler)
        except OSError as error:
            self._say(f"the profile could not be written into {self._folder}: {error.strerror or error}")

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
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank{self._rank}.json.gz"
        with atomic_file(trace) as temporary:
            profiler.export_chrome_trace(str(temporary))  # compressed, since the name ends in .gz
        costs = costs_of(profiler.events() or (), weight_uses(self._weights))
        if not costs.steps:
            return
        table = self._folder / f"rank{self._rank}.md"
        table.write_text(self._table(costs), encoding="utf-8")
        self._say(f"profile of {_named(costs.steps)}: {costs.largest()} of the time; {table}")

    def _table(self, costs: Costs) -> str:
        count = len(costs.steps)
        of = "the device's kernels" if costs.on_device else "this process"
        rows = [
            f"| {kind} | {1e3 * cost.seconds / count:.3f} | {cost.seconds / costs.wall_s:.1%} "
            f"| {cost.calls / count:g} | {cost.allocated_bytes / count / 2**30:.4f} |"
            for kind, cost in costs.kinds.items()
        ]
        total_s = sum(cost.seconds for cost in costs.kinds.values())
        more = " More than the step: kernels ran beside each other." if total_s > 1.01 * costs.wall_s else ""
        memory = {
            **self._held(),
            "peak of the rank so far, all included": self._memory_gib() * 2**30,
        }
        return "\n".join(
            [
                f"# Rank {self._rank}, {_named(costs.steps)}",
                "",
                f"The largest costs: {costs.largest()} of the step.",
                "",
                f"A step took {1e3 * costs.wall_s / count:.3f} ms while it was profiled, which costs time of its own. "
                f"Times are those of {of}, without what an operation calls in turn.{more}",
                "",
                "| what | ms a step | share | calls a step | allocates GiB a step |",
                "| --- | ---: | ---: | ---: | ---: |",
                *rows,
                f"| together | {1e3 * total_s / count:.3f} | {total_s / costs.wall_s:.1%} | | |",
                "",
                "| memory | GiB |",
                "| --- | ---: |",
                *(f"| {what} | {size / 2**30:.4f} |" for what, size in memory.items()),
                "",
                f"`rank{self._rank}.json.gz` beside this file opens in https://ui.perfetto.dev.",
                "",
            ]
        )


def _named(steps: list[str]) -> str:
    numbers = sorted(int(step.split()[1]) for step in steps)
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}-{numbers[-1]}"
