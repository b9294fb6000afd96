"""Profiles steps: a trace of each rank for a viewer, and a table of time and memory (docs/decisions/0025)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from isthmus.errors import IOFailure, OutputError, Preempted
from isthmus.files.atomic_write import atomic_file
from isthmus.train.watcher import Watcher

Shape = tuple[int, ...]
Span = tuple[float, float]

HOST = "Python, launching and waiting"
IDLE = "device idle, waiting for this process"
COMMUNICATION = "communication between ranks"
OTHER = "other tensor operations"

_MATMULS = re.compile(r"^(aten|mkldnn)::_?(\w+_)?(mm|addmm|addmv|mv|bmm|baddbmm|linear)_?$|^aten::_grouped_mm")
_COMMUNICATION = re.compile(r"c10d|gloo:|nccl|rccl|record_param_comms", re.IGNORECASE)
_REGIONS = ("data", "optimizer")
"""Trace regions that are one row each."""
_ATTENTION = re.compile(r"PackedAttention|scaled_dot_product|(flash|flex|efficient)_attention")
_ROWS = (
    (re.compile(r"CrossEntropy"), "loss"),
    (re.compile(r"RMSNorm|rms_norm|LayerNorm|layer_norm|NormFunction", re.IGNORECASE), "norms"),
    (re.compile(r"SwiGLU|GeGLU|GeLU|silu|relu|sigmoid|FusedFunction", re.IGNORECASE), "activations"),
    (re.compile(r"_Rotate|_ProjectedHeads"), "rotary positions"),
    (re.compile(r"_Lookup|embedding", re.IGNORECASE), "embedding"),
)
_WEIGHTS = (
    (re.compile(r"\.router\."), "the router"),
    (re.compile(r"experts"), "the experts"),
    (re.compile(r"\.mlp\."), "the feed-forward block"),
    (re.compile(r"attention"), "the attention projections"),
    (re.compile(r"output_layer|word_embeddings"), "the output layer"),
)


@dataclass(slots=True)
class Cost:
    """One row, summed over all profiled steps."""

    seconds: float = 0.0
    calls: int = 0
    allocated_bytes: int = 0


@dataclass(slots=True)
class Costs:
    """The rows of one rank."""

    steps: list[str]
    wall_s: float
    on_device: bool
    """Whether the times are those of kernels on a device."""
    rows: dict[str, Cost] = field(default_factory=dict)
    """Largest first."""

    def largest(self, count: int = 3) -> str:
        """The largest rows with their share of the step: ``loss 12%, norms 9%``."""
        ranked = list(self.rows.items())[:count]
        return ", ".join(f"{name} {cost.seconds / max(self.wall_s, 1e-12):.0%}" for name, cost in ranked)


def weight_uses(shapes: Mapping[str, Shape]) -> dict[Shape, str]:
    """The use of a weight by its shape [out, in]; a shape with several uses names all of them."""
    uses: dict[Shape, list[str]] = defaultdict(list)
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        use = next((words for pattern, words in _WEIGHTS if pattern.search(name)), "other weights")
        if use not in uses[shape[-2:]]:
            uses[shape[-2:]].append(use)
    return {shape: " or ".join(names) for shape, names in uses.items()}


def costs_of(events: Sequence[Any], uses: Mapping[Shape, str]) -> Costs:
    """Sum torch.profiler's FunctionEvents by row; only events during an event named ``step N`` count."""
    on_cpu = [event for event in events if "CPU" in str(event.device_type)]
    steps = [event for event in on_cpu if re.fullmatch(r"step \d+", event.name)]
    kernels = [_span(event) for event in events if "CPU" not in str(event.device_type) and not _is_region(event)]
    step_spans = union(map(_span, steps))
    costs = Costs([step.name for step in steps], length(step_spans) / 1e6, bool(kernels))
    rows: dict[str, Cost] = defaultdict(Cost)
    communication = union(_span(event) for event in on_cpu if _COMMUNICATION.search(event.name))
    for event, ancestors in _events_of_steps(on_cpu, step_spans, all_threads=bool(kernels)):
        row = _row(event, ancestors, uses)
        if kernels:
            _add_kernels(rows, event, row)
            continue
        waited_s = 0.0
        if communication and not event.name.startswith("aten::"):
            # A Python function may wait for other ranks between its operations.
            children = union(map(_span, event.cpu_children))
            waited_s = (overlap([_span(event)], communication) - overlap(children, communication)) / 1e6
            rows[COMMUNICATION].seconds += waited_s
        rows[row].seconds += event.self_cpu_time_total / 1e6 - waited_s
        rows[row].calls += row not in (HOST, ancestors and _row(ancestors[-1], ancestors[:-1], uses))
        rows[row].allocated_bytes += max(0, event.self_cpu_memory_usage)
    if kernels:
        rows[IDLE].seconds = max(0.0, costs.wall_s - overlap(union(kernels), step_spans) / 1e6)
    costs.rows = dict(sorted(rows.items(), key=lambda item: -item[1].seconds))
    return costs


def _events_of_steps(
    on_cpu: Sequence[Any], steps: Sequence[Span], *, all_threads: bool
) -> Iterator[tuple[Any, list[Any]]]:
    """The events during ``steps`` with their ancestors, outermost first.

    On a CPU only the thread that runs the steps; on a device ``all_threads``, since the backward pass has its own.
    """
    for event in on_cpu:
        ancestors: list[Any] = []
        parent = event.cpu_parent
        while parent is not None:
            ancestors.insert(0, parent)
            parent = parent.cpu_parent
        root = ancestors[0] if ancestors else event
        if re.fullmatch(r"step \d+", root.name):
            yield event, ancestors
        elif all_threads and not _is_region(root) and any(start <= _span(event)[0] < end for start, end in steps):
            yield event, ancestors


def _add_kernels(rows: dict[str, Cost], event: Any, row: str) -> None:
    row = OTHER if row == HOST else row
    for kernel in event.kernels:
        cost = rows[COMMUNICATION if _COMMUNICATION.search(kernel.name) else row]
        cost.seconds += kernel.duration / 1e6
        cost.calls += 1
    if event.self_device_memory_usage > 0:
        rows[row].allocated_bytes += event.self_device_memory_usage


def _is_region(event: Any) -> bool:
    # A device's timeline repeats trace regions.
    return bool(getattr(event, "is_user_annotation", False))


def _row(event: Any, ancestors: Sequence[Any], uses: Mapping[Shape, str]) -> str:
    names = [*(ancestor.name for ancestor in ancestors), event.name]
    if _COMMUNICATION.search(event.name):
        return COMMUNICATION
    for region in _REGIONS:
        if region in names:
            return region
    if _is_region(event) or not ancestors:
        return HOST
    if any(_ATTENTION.search(name) for name in names):
        return "attention"
    if _MATMULS.search(event.name):
        return f"matmuls of {_use(event, ancestors, uses)}"
    for name in reversed(names):
        for pattern, row in _ROWS:
            if pattern.search(name):
                return row
    return OTHER if event.name.startswith("aten::") else HOST


def _use(event: Any, ancestors: Sequence[Any], uses: Mapping[Shape, str]) -> str:
    """The use of a matmul's weight. Forward it is the last operand, transposed; backward the last operand of the
    function's first matmul, which computes the input's gradient.
    """
    if any("CrossEntropy" in ancestor.name for ancestor in ancestors):
        return "the output layer"
    function = next(
        (ancestor for ancestor in reversed(ancestors) if not re.match("aten::|autograd::", ancestor.name)), None
    )
    if function is None or not re.search(r"Backward\d*$", function.name):
        return uses.get(_last_operand(event)[::-1], "no weight")
    first = min(_matmuls_below(function), key=_span)
    return uses.get(_last_operand(first), "no weight")


def _matmuls_below(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        if _MATMULS.search(child.name):
            yield child
        yield from _matmuls_below(child)


def _last_operand(event: Any) -> Shape:
    """[K, N] of a matmul over K."""
    shapes = [tuple(shape[-2:]) for shape in event.input_shapes or () if len(shape) >= 2]
    if "scaled_mm" in event.name:
        shapes = shapes[:2]  # the scales follow the operands
    shape = shapes[-1] if shapes else ()
    return shape[::-1] if "linear" in event.name else shape


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted and without overlaps."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Length of the intersection; both are without overlaps."""
    return length(first) + length(second) - length(union([*first, *second]))


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


@dataclass(kw_only=True, slots=True)
class StepProfile(Watcher):
    """Profiles ``steps``. A stopped run writes the steps profiled so far; a failed run writes none."""

    steps: range
    """Counted from 1; empty for none."""
    folder: Path
    """Folder of ``rank<N>.json.gz`` and ``rank<N>.md``."""
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
    def context(self, step: int) -> Iterator[None]:
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
            self.stopping()

    def stopping(self) -> None:
        """End and write the profile, if one is open."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        try:
            self._write(profiler)
        except (OSError, OutputError, IOFailure) as error:  # no reason to end the run
            self.log(f"the profile could not be written into {self.folder}: {error}")

    def ended(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is None or issubclass(kind, Preempted):
            self.stopping()
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
