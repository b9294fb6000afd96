"""A task with the reports of the ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from isthmus.config.schema import LoggingConfig
from isthmus.train.rank_reports import RankReports
from ranks.tasks import _digest, start


def train_with_reports(*, interval: int, slow_rank: int | None, steps: int = 6, **layout: Any) -> dict[str, Any]:
    """Train; ``slow_rank`` sleeps before each stage. Returns reports, events and a digest of the final state."""
    training = start(**layout)
    if dist.get_rank() == slow_rank:
        for stage in training.stepper.model:
            stage.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    events: list[dict[str, Any]] = []
    unpatched = dict(vars(dist.ProcessGroup))
    ranks = RankReports(
        settings=LoggingConfig(ranks_every=interval),
        rank=dist.get_rank(),
        hosts=[f"node{rank}" for rank in range(dist.get_world_size())],
        stages=layout.get("pp", 1),
        device=training.stepper.device,
        sensors=None,
        reporter=SimpleNamespace(  # type: ignore[arg-type]
            event=lambda step, kind, text, **details: events.append({"event": kind, "text": text, **details})
        ),
    )
    reports = []
    for step in range(1, steps + 1):
        batches = training.batches.step(step - 1)
        with ranks.context(step):
            done = training.stepper.train_step(batches, lambda step=step: ranks.host_numbers(step))  # type: ignore[misc]
        reports.append(ranks.metrics(step, done.host_sums))
    assert dict(vars(dist.ProcessGroup)) == unpatched
    return {"reports": reports, "events": events, "digest": _digest(training)}
