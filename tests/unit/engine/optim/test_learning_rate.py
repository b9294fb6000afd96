"""Learning rate schedules equal those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.config.schema.optim import OptimConfig
from isthmus.engine.optim.learning_rate import build_schedule

STEPS, LR = 20, 0.5


def rates(settings: dict[str, Any], *, resume_at: int = 0) -> list[float]:
    """The learning rate of each step; those before ``resume_at`` in one go, as after loading a checkpoint."""
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": None}])
    schedule = build_schedule(optimizer, OptimConfig.model_validate({"lr": LR, **settings}), STEPS)
    if resume_at:
        schedule.step(increment=resume_at)
    results = []
    for _ in range(resume_at, STEPS):
        results.append(optimizer.param_groups[0]["lr"])
        schedule.step(increment=1)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("settings", "name", "theirs"),
    [
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "polynomial", "power": 2.5}, "polynomial", {"power": 2.5, "lr_end": 0.0}),
        ({"schedule": "cosine_with_restarts", "num_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
    ],
)
def test_schedules_equal_transformers(settings: dict[str, Any], name: str, theirs: dict[str, Any], warmup: int) -> None:
    if name == "inverse_sqrt" and not warmup:
        with pytest.raises(ValueError, match="needs a warm-up"):
            OptimConfig.model_validate(settings)
        return
    from transformers import get_scheduler  # imports PEFT, which takes seconds

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = get_scheduler(name, optimizer, warmup, STEPS, scheduler_specific_kwargs=theirs)
    expected = []
    for _ in range(STEPS):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = rates(settings | {"warmup_steps": warmup})
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert rates(settings | {"warmup_steps": warmup}, resume_at=11) == ours[11:]


def test_lowest_rate_and_end_of_the_decay() -> None:
    shaped = {"schedule": "polynomial", "power": 2.0, "min_lr": 0.1, "schedule_steps": 10}
    assert rates(shaped)[5] == pytest.approx(0.1 + 0.25 * 0.4) and rates(shaped)[10:] == [0.1] * 10
    restarts = rates({"schedule": "cosine_with_restarts", "num_cycles": 2, "min_lr": 0.1})
    assert restarts[0] == restarts[10] == 0.5 and restarts[5] == pytest.approx(0.3)
    assert min(rates({"schedule": "inverse_sqrt", "warmup_steps": 1, "min_lr": 0.2})[1:]) == 0.2


def test_settings_of_other_schedules_are_refused() -> None:
    for settings, message in (
        ({"power": 2.0}, r"power=2 is for schedule polynomial, got cosine"),
        ({"num_cycles": 2, "schedule": "linear"}, r"num_cycles=2 is for schedule cosine_with_restarts, got linear"),
        ({"schedule_steps": 5, "schedule": "constant"}, r"schedule_steps=5 is for schedules cosine, linear, poly"),
    ):
        with pytest.raises(ValueError, match=message):
            OptimConfig.model_validate(settings)
