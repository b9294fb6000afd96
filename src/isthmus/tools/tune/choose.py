"""Measures each matmul of a step with every library or kernel that this device has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from isthmus.engine.linear.matmul import default_library, onednn_keeps_float32, use_table
from isthmus.engine.linear.matmul_table import Library, MatmulShape, MatmulTable
from isthmus.engine.linear.tuned_matmuls import TunedMatmuls, made_for
from isthmus.platforms.base import Platform
from isthmus.platforms.cpu_threads import cores, cores_in_use
from isthmus.recipes.plan.step_matmuls import StepMatmul
from isthmus.tools.tune import tunable_op
from isthmus.tools.tune.measure import MARGIN, SECONDS, Operands, compare

Report = Callable[[str], None]
_Choice = tuple[int | None, Library]
"""Threads and library."""
_GPU = torch.device("cuda")
_SHORTER = (2, 4)
"""Without length buckets, libraries are also compared for a half and a quarter of the longest micro batch."""


@dataclass(frozen=True, slots=True)
class TunedRow:
    """One matmul before and after."""

    matmul: StepMatmul
    default: str
    chosen: str
    default_ms: float
    ms: float

    @property
    def gain(self) -> float:
        """1.1 is 10% faster."""
        return self.default_ms / self.ms

    def as_dict(self) -> dict[str, Any]:
        """TFLOP/s are of the default and of the choice."""
        shape = self.matmul.shape
        return {
            "weight": self.matmul.weight,
            "part": self.matmul.part,
            "m": shape.m,
            "k": shape.k,
            "n": shape.n,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "count": self.matmul.count,
            "default": self.default,
            "chosen": self.chosen,
            "default_ms": self.default_ms,
            "ms": self.ms,
            "gain": self.gain,
            "default_tflops": shape.flops / self.default_ms / 1e9,
            "tflops": shape.flops / self.ms / 1e9,
        }


@dataclass(frozen=True, slots=True)
class TuneResult:
    rows: Sequence[TunedRow]
    content: str
    """Content of the file."""
    threads: int | None
    default_threads: int | None
    notes: Sequence[str]

    def total_ms(self, *, tuned: bool) -> float:
        """Milliseconds of all matmuls of micro batches of each measured length."""
        return sum((row.ms if tuned else row.default_ms) * row.matmul.count for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        default_ms, ms = self.total_ms(tuned=False), self.total_ms(tuned=True)
        return {
            "default_ms": default_ms,
            "ms": ms,
            "gain": default_ms / ms,
            "default_threads": self.default_threads,
            "threads": self.threads,
            "notes": list(self.notes),
            "matmuls": [row.as_dict() for row in self.rows],
        }


def choose(matmuls: Sequence[StepMatmul], platform: Platform, report: Report) -> TuneResult:
    """Measure and choose. The choices are only written into ``content``; this process keeps its defaults."""
    if platform.name == "rocm":
        return _tune_kernels(matmuls, report)
    counts = [None] if platform.name == "cuda" else _thread_counts()
    notes = _notes_of_cpu(matmuls) if platform.name == "cpu" else []  # first: threads of this process wait busily later
    default_names, measured, kind = [], [], platform.device_type
    for number, matmul in enumerate(matmuls, start=1):
        operands = Operands(matmul, torch.device(platform.device_type))
        default = default_library(operands.a, operands.b)
        names = dict.fromkeys((default, *_libraries(matmul, platform)))
        candidates = {(threads, name): _choice(matmul, name, threads) for threads in counts for name in names}
        times = compare(operands, candidates, seconds=SECONDS * len(candidates))
        default_names.append(default)
        measured.append(times)
        shown = {f"{_name(name, matmul, kind)}{_with(count)}": ms for (count, name), ms in times.items()}
        listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in shown.items())
        report(f"{number}/{len(matmuls)}: {describe(matmul)}: {listed}")
    by_count = {
        threads: [_fastest(times, threads, default) for times, default in zip(measured, default_names, strict=True)]
        for threads in counts
    }

    def total(threads: int | None) -> float:
        rows = zip(matmuls, measured, by_count[threads], strict=True)
        return sum(times[threads, name] * matmul.count for matmul, times, name in rows)

    best = min(counts, key=total)
    best = best if total(best) <= MARGIN * total(counts[0]) else counts[0]
    rows = [
        TunedRow(
            matmul,
            _name(default, matmul, kind),
            _name(name, matmul, kind),
            times[counts[0], default],
            times[best, name],
        )
        for matmul, times, default, name in zip(matmuls, measured, default_names, by_count[best], strict=True)
    ]
    choices = [(matmul.shape, name) for matmul, name in zip(matmuls, by_count[best], strict=True)]
    tuned = TunedMatmuls(made_for=made_for(platform), choices=choices, threads=best)
    return TuneResult(rows, tuned.to_json(), best, counts[0], notes)


def _notes_of_cpu(matmuls: Sequence[StepMatmul]) -> list[str]:
    notes = []
    if any(matmul.shape.dtype == torch.float32 for matmul in matmuls) and not onednn_keeps_float32():
        notes.append("oneDNN rounds float32 to bfloat16 on this CPU, or torch is built without it: MKL is used")
    if used := cores_in_use():
        notes.append(
            f"other processes use {used} of {cores()} cores: the threads are those for a machine that is as busy as now"
        )
    return notes


def _fastest(times: Mapping[_Choice, float], threads: int | None, default: Library) -> Library:
    """The default, unless another library is clearly faster with this number of threads."""
    with_threads = {name: ms for (count, name), ms in times.items() if count == threads}
    best = min(with_threads, key=with_threads.__getitem__)
    return best if with_threads[best] <= MARGIN * with_threads[default] else default


def with_shorter(tokens: Sequence[int], multiple: int) -> list[int]:
    """Lengths to compare libraries for, if micro batches differ in length; ascending."""
    parts = (length // part // multiple * multiple for length in tokens for part in (1, *_SHORTER))
    return sorted({length for length in parts if length})


def _thread_counts() -> list[int | None]:
    """The default first: all cores. Fewer threads may be faster where two cores share their units."""
    available = cores()
    fewer = {available // 2, available - 1, *(available // 4 * part for part in (1, 3))}
    return [available, *sorted(number for number in fewer if number and number != available)]


def _libraries(matmul: StepMatmul, platform: Platform) -> tuple[Library, ...]:
    """Libraries that torch lets a caller choose from."""
    if platform.name == "cuda":
        return ("default", "cublas", "cublaslt")
    return ("default", "onednn") if matmul.shape.dtype == torch.float32 and onednn_keeps_float32() else ("default",)


def _choice(matmul: StepMatmul, library: Library, threads: int | None) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def context() -> Iterator[None]:
        before = torch.get_num_threads()
        use_table(MatmulTable([(matmul.shape, library)]))
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            use_table(None)

    return context


def _tune_kernels(matmuls: Sequence[StepMatmul], report: Report) -> TuneResult:
    """Choose kernels with TunableOp.

    It has one result for equal shapes, and none for weight gradients that are added to float32.
    """
    rows, results = list[TunedRow](), dict[MatmulShape, tuple[str, str] | None]()
    with tunable_op.tuning() as tuner:
        for number, matmul in enumerate(matmuls, start=1):
            operands = Operands(matmul, _GPU)
            result = results.setdefault(matmul.shape, tuner.measure(operands))
            times = compare(operands, {"default": tuner.off, "tuned": tuner.on}, seconds=2 * SECONDS)
            faster = times.get("tuned", times["default"]) <= MARGIN * times["default"]
            chosen = "Default"
            if result is not None and faster:
                chosen = tuner.kernel(result)
            elif result is not None:
                tuner.reject(result)
            default_ms = times["default"]
            ms = default_ms if chosen == "Default" else times["tuned"]
            rows.append(TunedRow(matmul, "Default", chosen, default_ms, ms))
            report(f"{number}/{len(matmuls)}: {describe(matmul)}: {default_ms:.3g} ms, {chosen} {ms:.3g} ms")
        untuned = sorted({matmul.part for matmul in matmuls if results[matmul.shape] is None})
        notes = [f"{part}: TunableOp has no kernels for it, because it is added to float32" for part in untuned]
        return TuneResult(rows, tuner.csv(), None, None, notes)


def describe(matmul: StepMatmul) -> str:
    shape = matmul.shape
    return f"{matmul.weight} {matmul.part} {shape.m} x {shape.k} x {shape.n}"


def _name(library: Library, matmul: StepMatmul, device_type: str) -> str:
    """What computes it: PyTorch's default on a CPU is MKL in float32 and oneDNN in bfloat16."""
    if library == "default" and device_type == "cpu":
        return "MKL" if matmul.shape.dtype == torch.float32 else "oneDNN"
    return {"onednn": "oneDNN", "cublas": "cuBLAS", "cublaslt": "cuBLASLt"}.get(library, library)


def _with(threads: int | None) -> str:
    return "" if threads is None else f" with {threads} threads"
