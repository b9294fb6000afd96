"""Where the time of profiled steps went, in words: the profiler's events, each counted under what it is for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
Span = tuple[float, float]

HOST = "Python, launching and waiting"
IDLE = "device idle, waiting for this process"
COMMUNICATION = "communication between ranks"
OTHER = "other tensor operations"

_PRODUCTS = re.compile(r"^(aten|mkldnn)::_?(\w+_)?(mm|addmm|addmv|mv|bmm|baddbmm|linear)_?$|^aten::_grouped_mm")
_COMMUNICATION = re.compile(r"c10d|gloo:|nccl|rccl|record_param_comms", re.IGNORECASE)
_PHASES = {"data": "data", "optimizer": "optimizer"}
_KINDS = (
    (re.compile(r"LineAttention|scaled_dot_product|flash_attention|efficient_attention"), "attention"),
    (re.compile(r"CrossEntropy"), "loss"),
    (re.compile(r"RMSNorm|rms_norm|LayerNorm|layer_norm", re.IGNORECASE), "norms"),
    (re.compile(r"SwiGLU|GeGLU|GeLU|silu|relu|sigmoid", re.IGNORECASE), "activations"),
    (re.compile(r"_Rotate"), "rotary positions"),
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
    """What one kind of work took over all profiled steps."""

    seconds: float = 0.0
    calls: int = 0
    allocated_bytes: int = 0
    """Asked of the allocator, all calls together; most of it is given back soon."""


@dataclass(slots=True)
class Costs:
    """Of one rank."""

    steps: list[str]
    wall_s: float
    """Of the profiled steps together."""
    on_device: bool
    """Whether the seconds are those of a device's kernels; else of this process."""
    kinds: dict[str, Cost] = field(default_factory=dict)
    """Largest first."""

    def largest(self, count: int = 3) -> str:
        """The largest costs with their share of the step: ``loss 12%, norms 9%``."""
        ranked = list(self.kinds.items())[:count]
        return ", ".join(f"{kind} {cost.seconds / max(self.wall_s, 1e-12):.0%}" for kind, cost in ranked)


def weight_uses(shapes: Mapping[str, Shape]) -> dict[Shape, str]:
    """What products with a matrix of some shape [out, in] are for; ``shapes`` holds this rank's weights by name.

    A shape that weights of several uses have names all of them.
    """
    uses: dict[Shape, list[str]] = defaultdict(list)
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        use = next((words for pattern, words in _WEIGHTS if pattern.search(name)), "other weights")
        if use not in uses[shape[-2:]]:
            uses[shape[-2:]].append(use)
    return {shape: " or ".join(names) for shape, names in uses.items()}


def costs_of(events: Sequence[Any], uses: Mapping[Shape, str]) -> Costs:
    """Sum the events of a profile up by kind.

    Args:
        events: torch.profiler's FunctionEvents; those named ``step N`` are the steps, and nothing outside them counts.
        uses: see :func:`weight_uses`.
    """
    on_cpu = [event for event in events if "CPU" in str(event.device_type)]
    roots = [event for event in on_cpu if re.fullmatch(r"step \d+", event.name)]
    steps = sorted((root.time_range.start, root.time_range.end) for root in roots)
    kernels = [span(event) for event in events if "CPU" not in str(event.device_type) and not _is_range(event)]
    costs = Costs([root.name for root in roots], sum(end - start for start, end in steps) / 1e6, bool(kernels))
    kinds: dict[str, Cost] = defaultdict(Cost)
    if kernels:
        # The backward pass has a thread of its own there, whose events are in no step's tree.
        for event, within in _walk([one for one in on_cpu if one.cpu_parent is None and not _is_range(one)]):
            _count_kernels(kinds, event, within, uses, steps)
        for root in roots:
            for event, within in _walk([root]):
                _count_kernels(kinds, event, within, uses, steps)
        kinds[IDLE].seconds = max(0.0, costs.wall_s - length(overlap(union(kernels), union(steps))) / 1e6)
    else:
        talking = union(span(event) for event in on_cpu if _COMMUNICATION.search(event.name))
        for root in roots:
            for event, within in _walk([root]):
                kind = _kind(event, within, uses)
                seconds = event.self_cpu_time_total / 1e6
                if talking and not event.name.startswith("aten::"):
                    # Between its operations a function of Python may wait for other ranks.
                    waited = length(overlap(_own_spans(event), talking)) / 1e6
                    kinds[COMMUNICATION].seconds += waited
                    seconds -= waited
                kinds[kind].seconds += seconds
                kinds[kind].calls += kind not in (HOST, within and _kind(within[-1], within[:-1], uses))
                kinds[kind].allocated_bytes += max(0, event.self_cpu_memory_usage)
    costs.kinds = dict(sorted(kinds.items(), key=lambda item: -item[1].seconds))
    return costs


def _count_kernels(
    kinds: dict[str, Cost], event: Any, within: tuple[Any, ...], uses: Mapping[Shape, str], steps: Sequence[Span]
) -> None:
    if not any(start <= event.time_range.start < end for start, end in steps):
        return
    kind = _kind(event, within, uses)
    for kernel in event.kernels:
        cost = kinds[COMMUNICATION if _COMMUNICATION.search(kernel.name) else OTHER if kind == HOST else kind]
        cost.seconds += kernel.duration / 1e6
        cost.calls += 1
    if event.self_device_memory_usage > 0:
        kinds[OTHER if kind == HOST else kind].allocated_bytes += event.self_device_memory_usage


def _is_range(event: Any) -> bool:
    """Whether the event is a phase and not an operation; a device's timeline repeats those."""
    return bool(getattr(event, "is_user_annotation", False))


def _walk(roots: Iterable[Any], within: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every event below ``roots`` with those it lies in, innermost last."""
    waiting = [(root, within) for root in roots]
    while waiting:
        event, outer = waiting.pop()
        yield event, outer
        waiting += [(child, (*outer, event)) for child in event.cpu_children]


def _kind(event: Any, within: tuple[Any, ...], uses: Mapping[Shape, str]) -> str:
    around = [*(one.name for one in within), event.name]
    if _COMMUNICATION.search(event.name):
        return COMMUNICATION
    for phase, kind in _PHASES.items():
        if phase in around:
            return kind
    if _is_range(event) or event.name == around[0]:
        return HOST
    if any(_KINDS[0][0].search(name) for name in around):
        return "attention"
    if _PRODUCTS.search(event.name):
        return f"matrix products of {_use(event, within, uses)}"
    for name in reversed(around):
        for pattern, kind in _KINDS:
            if pattern.search(name):
                return kind
    return OTHER if event.name.startswith("aten::") else HOST


def _use(event: Any, within: tuple[Any, ...], uses: Mapping[Shape, str]) -> str:
    """What a product is for, by the weight among its operands.

    Forward that is the last operand, transposed; backward it is the last operand of the function's first product, which
    yields the gradient of the input. The function's other products, of the gradient of the weight, go with it.
    """
    if any("CrossEntropy" in one.name for one in within):
        return "the output layer"
    function = next((one for one in reversed(within) if not re.match("aten::|autograd::", one.name)), None)
    if function is None or not re.search(r"Backward\d*$", function.name):
        return uses.get(_last_operand(event)[::-1], "no weight")
    products = sorted((one for one, _ in _walk([function]) if _PRODUCTS.search(one.name)), key=span)
    return uses.get(_last_operand(products[0]), "no weight")


def _last_operand(event: Any) -> Shape:
    """[K, N] of a product over K."""
    shapes = [tuple(shape[-2:]) for shape in event.input_shapes or () if len(shape) >= 2]
    if "scaled_mm" in event.name:
        shapes = shapes[:2]  # behind the operands come their scales
    shape = shapes[-1] if shapes else ()
    return shape[::-1] if "linear" in event.name else shape


def span(event: Any) -> Span:
    """When an event began and ended."""
    return event.time_range.start, event.time_range.end


def _own_spans(event: Any) -> list[Span]:
    """The parts of an event that none of its children covers."""
    spans, at = [], event.time_range.start
    for start, end in sorted(span(child) for child in event.cpu_children):
        if start > at:
            spans.append((at, start))
        at = max(at, end)
    return [*spans, (at, event.time_range.end)] if event.time_range.end > at else spans


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def overlap(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The time that both have; each in order and without overlaps of its own."""
    common, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(spans: Iterable[Span]) -> float:
    """Their time together."""
    return sum(end - start for start, end in spans)
