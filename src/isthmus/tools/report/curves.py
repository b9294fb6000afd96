"""Metrics of runs as panels of curves, thinned so that the minima and maxima stay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.tools.report.run_history import RunHistory, Series

_POINTS = 100_000
"""Points of all curves; about 2 MB of JSON."""
_MOST_POINTS, _LEAST_POINTS = 2000, 100
"""Points of one curve."""
_MEANS = 100
"""Intervals of the mean of a thinned curve."""
_MOST_TITLE = 80
_PARTS = {"valid_": "validation", "test_": "test"}
_GROUPS = (
    ("Loss", re.compile(r"^(?!moe_).*(loss|perplexity|accuracy)$|^kl$")),
    ("Rewards", re.compile(r"^(rewards|logps|logits)/|^(margins?|kl_.*)$")),
    ("Optimizer", re.compile(r"^(lr|grad_norm|loss_scale|skipped)$")),
    ("Speed", re.compile(r"^(tokens_per_s|tflops_per_device|mfu|step_time_s)$")),
    ("Memory", re.compile(r"^memory_")),
    ("Experts", re.compile(r"^moe_")),
    ("Ranks and GPUs", re.compile(r"^(slowest_rank|median_rank|straggler_|gpu_|throttled_)")),
    ("Data", re.compile(r"^(num_tokens|loss_tokens|padding)$")),
    ("Other", re.compile("")),
)
_TITLES = {
    "loss": ("Loss", "nats"),
    "mtp_loss": ("Loss of the MTP layers", "nats"),
    "perplexity": ("Perplexity", ""),
    "mean_token_accuracy": ("Token accuracy", "%"),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "loss_scale": ("Loss scale", ""),
    "skipped": ("Skipped steps", ""),
    "tokens_per_s": ("Tokens per second", ""),
    "tflops_per_device": ("TFLOP/s per device", ""),
    "mfu": ("MFU", "%"),
    "step_time_s": ("Step time", "s"),
    "memory_gib": ("Peak memory", "GiB"),
    "memory_used": ("Device memory in use", "%"),
    "moe_load_max_over_mean": ("Load of the busiest expert over the mean", ""),
    "moe_replay_differences": ("Replayed choices that the router would not make", "%"),
    "slowest_rank": ("Slowest rank", ""),
    "slowest_rank_s": ("Own work of the slowest rank", "s"),
    "median_rank_s": ("Own work of the median rank", "s"),
    "straggler_share": ("Share for which the slowest rank is waited for", "%"),
    "gpu_temperature_c": ("Highest GPU temperature", "°C"),
    "gpu_power_w": ("Median GPU power", "W"),
    "gpu_clock_mhz": ("Lowest GPU clock", "MHz"),
    "throttled_gpus": ("Throttled GPUs", ""),
    "num_tokens": ("Tokens per step", ""),
    "loss_tokens": ("Loss tokens per step", ""),
    "padding": ("Padding", "%"),
}
_HIDDEN = ("consumed_sequences", "epoch", "time_s")
"""Straight lines."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a metric of all runs, in training, validation and test."""

    group: str
    title: str
    unit: str
    curves: list[dict[str, Any]]
    """Curves for JSON: ``run`` (number), ``part`` (training, validation or test), ``label``, ``steps``, ``values``, and
    ``means`` by ``mean_steps`` of a thinned curve."""
    about: str
    """The last value of each curve."""


def panels(runs: Sequence[RunHistory]) -> list[Panel]:
    """The panels of all metrics that are not always zero, by group."""
    names = dict.fromkeys(_split(key)[0] for run in runs for key in run.metrics if key not in _HIDDEN)
    shown = [name for name in names if any(np.nan_to_num(series.values).any() for *_, series in _of(runs, name))]
    shown.sort(key=lambda name: next(k for k, (_, pattern) in enumerate(_GROUPS) if pattern.search(name)))
    points = _POINTS // max(1, sum(1 for name in shown for _ in _of(runs, name)))
    return [_panel(runs, name, min(max(points, _LEAST_POINTS), _MOST_POINTS)) for name in shown]


def _split(key: str) -> tuple[str, str]:
    """(name, part) of a key of ``metrics.jsonl``."""
    for prefix, part in _PARTS.items():
        if key.startswith(prefix):
            return key.removeprefix(prefix), part
    return key, "training"


def _of(runs: Sequence[RunHistory], name: str) -> Iterator[tuple[int, str, Series]]:
    for number, run in enumerate(runs):
        for prefix, part in (("", "training"), *_PARTS.items()):
            if (series := run.metrics.get(prefix + name)) is not None:
                yield number, part, series


def _panel(runs: Sequence[RunHistory], name: str, most: int) -> Panel:
    title, unit = _TITLES.get(name, (name if len(name) <= _MOST_TITLE else f"{name[:_MOST_TITLE]}...", ""))
    scale = 100.0 if unit == "%" else 1.0
    curves, last = [], []
    for number, part, series in _of(runs, name):
        label = part if len(runs) == 1 else runs[number].name + ("" if part == "training" else f", {part}")
        indices = thinned(series.values, most)
        curve = {"run": number, "part": part, "label": label}
        curve |= {"steps": series.steps[indices].tolist(), "values": _short(scale * series.values[indices])}
        if len(indices) < len(series.values):
            middles, averages = _means(series.values, _MEANS)
            curve |= {"mean_steps": series.steps[middles].tolist(), "means": _short(scale * averages)}
        curves.append(curve)
        last.append(f"{label} {scale * series.last:.4g}{'%' if unit == '%' else ''}")
    group = next(group for group, pattern in _GROUPS if pattern.search(name))
    return Panel(group, title, unit, curves, "; ".join(last))


def _short(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Six digits; null for NaN."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _means(values: npt.NDArray[np.float64], most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Index of the middle, and mean of the finite values, of equal intervals."""
    bounds = np.linspace(0, len(values), most + 1).astype(np.int64)
    is_finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_finite, values, 0.0), bounds[:-1])
    counts = np.add.reduceat(is_finite.astype(np.int64), bounds[:-1])
    averages = np.divide(sums, counts, out=np.full(most, np.nan), where=counts > 0)
    return (bounds[:-1] + bounds[1:]) // 2, averages


def thinned(values: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """The indices of at most ``most`` values: the first, the last, and the minimum and maximum of equal intervals.

    An interval of NaN alone keeps one, so that the gap is visible.
    """
    if len(values) <= most:
        return np.arange(len(values), dtype=np.int64)
    width = -(-len(values) // ((most - 2) // 2))
    starts = np.arange(0, len(values), width)
    padded = np.full(len(starts) * width, np.nan)
    padded[: len(values)] = values
    rows = padded.reshape(len(starts), width)
    lowest, highest = (np.where(np.isfinite(rows), sign * rows, np.inf).argmin(axis=1) for sign in (1, -1))
    return np.unique(np.concatenate([[0, len(values) - 1], starts + lowest, starts + highest]))
