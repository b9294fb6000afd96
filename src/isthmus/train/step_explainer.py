"""Explains steps whose loss or gradient norm is not finite, or jumps: by tensor, rank and samples."""

from __future__ import annotations

import logging
import math
import socket
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.store.sample_origin import sample_origin
from isthmus.data.store.sample_store import Samples
from isthmus.engine.loss.sample_losses import SampleLoss
from isthmus.engine.nonfinite import NonFinite, find_nonfinite
from isthmus.engine.parallel.process_groups import gather_objects
from isthmus.engine.step import NotFinite, Stepper, StepResult
from isthmus.errors import IsthmusError
from isthmus.train.reporter import Reporter
from isthmus.train.watcher import Watcher

_WINDOW, _FEWEST = 100, 20
"""Values that a new one is compared with: at most, at least."""
_SMALLEST_SPREAD = 0.05
"""Relative to the median."""
_MOST_SAMPLES = 5
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SpikeDetector:
    """Compares a value with the values before: robust, so that spikes among these do not matter."""

    factor: float
    limit: float = math.inf
    """Limit of the next value: the median plus ``factor`` times the spread, 1.48 median absolute deviations."""
    _values: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _was_spike: bool = False

    def is_new_spike(self, value: float) -> bool:
        """Whether ``value`` is above the limit, and the value before was not; the next value is compared with both."""
        before, self._was_spike = self._was_spike, value > self.limit
        self._values.append(value)
        return self._was_spike and not before

    def update_limit(self) -> None:
        """Not in :meth:`is_new_spike`, for which a GPU waits."""
        if len(self._values) >= _FEWEST:
            middle = _median(self._values)
            spread = 1.4826 * _median(abs(value - middle) for value in self._values)
            self.limit = middle + self.factor * max(spread, _SMALLEST_SPREAD * abs(middle))


def _median(values: Iterable[float]) -> float:
    """The lower one of an even number; some times faster than that of ``statistics``."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


@dataclass(slots=True)
class StepExplainer(Watcher):
    """All methods are collectives: loss and gradient norm are the same on every rank, and so is what follows."""

    stepper: Stepper
    samples: Samples | None
    """That the steps train on; None for generated answers."""
    reporter: Reporter
    spike_factor: float | None
    _detectors: dict[str, SpikeDetector] = field(default_factory=dict)

    def step_started(self, step: int, batches: Sequence[PackedBatch]) -> None:
        """Look for spikes in the step."""
        if self.spike_factor is None:
            return
        for name in ("loss", "grad_norm"):
            self._detectors.setdefault(name, SpikeDetector(self.spike_factor)).update_limit()
        self.stepper.before_update = lambda result: self._check(step, batches, result)

    def _check(self, step: int, batches: Sequence[PackedBatch], result: StepResult) -> None:
        spikes = [
            {"metric": name, "value": value, "limit": detector.limit}
            for name, detector in self._detectors.items()
            if detector.is_new_spike(value := getattr(result, name))
        ]
        if not spikes:
            return
        losses = self._sample_losses(batches)
        largest = [asdict(loss) | sample_origin(self.samples, loss.sample) for loss in losses[:_MOST_SAMPLES]]
        total = sum(loss.loss for loss in losses)
        what = " and ".join(f"{spike['metric']} {spike['value']:.4g} (limit {spike['limit']:.4g})" for spike in spikes)
        shares = ", ".join(
            f"{_described(sample)} {sample['loss'] / total:.0%}" if total else _described(sample)
            for sample in largest[:3]
        )
        text = f"spike in step {step}: {what}. Samples with the largest part of the loss: {shares}."
        self.reporter.event(step, "spike", text, spikes=spikes, samples=largest)

    def _sample_losses(self, batches: Sequence[PackedBatch]) -> list[SampleLoss]:
        """Losses of the samples of all ranks, the largest first; documents of one sample are added up."""
        parts_by_sample: dict[int, list[SampleLoss]] = defaultdict(list)
        for loss in (loss for ranks in gather_objects(self.stepper.sample_losses(batches)) for loss in ranks):
            parts_by_sample[loss.sample].append(loss)
        joined = [
            SampleLoss(sample, sum(loss.loss for loss in parts), sum(loss.loss_tokens for loss in parts))
            for sample, parts in parts_by_sample.items()
        ]
        return sorted(joined, key=lambda loss: (loss.loss == loss.loss, -loss.loss))  # NaN first

    def explained(self, step: int, batches: Sequence[PackedBatch], error: NotFinite) -> IsthmusError:
        """The error with the first tensor that is not finite, which an event has, too.

        The micro batches run again: the state cannot be used afterwards.
        """
        try:
            tensors, hosts = self._first_nonfinite(batches), gather_objects(socket.gethostname())
            first = tensors[0] if tensors else None
            samples = list(first.samples) if first else []
            if first and not samples and first.kind != "weight":  # such as the gradient of a weight
                losses = self._sample_losses(batches)
                samples = [loss.sample for loss in losses if not abs(loss.loss) < float("inf")][:_MOST_SAMPLES]
        except Exception:  # the step failed for a reason of its own, which matters more
            _logger.debug("the step cannot be explained", exc_info=True)
            return error
        origins = [{"sample": sample} | sample_origin(self.samples, sample) for sample in samples]
        text = _explanation(first, hosts, origins)
        rows = [
            {"kind": tensor.kind, "name": tensor.name, "rank": tensor.rank, "host": hosts[tensor.rank]}
            for tensor in _first_of_kinds(tensors)
        ]
        self.reporter.event(step, "not finite", f"{error} {text}", prints=False, tensors=rows, samples=origins)
        return NotFinite(f"{error} {text}")

    def _first_nonfinite(self, batches: Sequence[PackedBatch]) -> list[NonFinite]:
        """Tensors of all ranks that are not finite, in the order of computation."""
        ranks = gather_objects(find_nonfinite(self.stepper, batches))
        return sorted(
            (tensor for tensors in ranks for tensor in tensors), key=lambda tensor: (*tensor.order, tensor.rank)
        )


def _first_of_kinds(tensors: Iterable[NonFinite]) -> list[NonFinite]:
    """The first of each kind."""
    first: dict[str, NonFinite] = {}
    for tensor in tensors:
        first.setdefault(tensor.kind, tensor)
    return list(first.values())


def _explanation(first: NonFinite | None, hosts: Sequence[str], origins: Sequence[dict[str, Any]]) -> str:
    if first is None:
        return (
            "The same step, computed again, has only finite values: neither weights nor data are the reason. Check the "
            "memory of the devices (ECC errors) with isthmus doctor."
        )
    what = {
        "weight": f"weight {first.name}",
        "output": f"output of {first.name}",
        "loss": "loss",
        "output gradient": f"gradient of the output of {first.name}",
        "weight gradient": f"gradient of {first.name}",
    }[first.kind]
    where = f"rank {first.rank} on {hosts[first.rank]}"
    samples = f", in {', '.join(map(_described, origins[:3]))}" if origins else ""
    return f"The first value that is not finite is in the {what}, on {where}{samples}."


def _described(origin: dict[str, Any]) -> str:
    """``sample 17 (record 18 of chats.jsonl)``"""
    place = next((f"{key} {origin[key]} of " for key in ("record", "sequence") if key in origin), "")
    return f"sample {origin['sample']}" + (f" ({place}{origin['file']})" if "file" in origin else "")
