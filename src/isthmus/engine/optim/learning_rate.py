"""Learning rate schedules: those of Megatron-Core, and more."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from isthmus.config.schema.optim import OptimConfig

_MEGATRON_NAMES = {"wsd": "WSD", "inverse_sqrt": "inverse-square-root"}


def build_schedule(optimizer: MegatronOptimizer, optim: OptimConfig, total_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up from zero to ``lr``, then decay to ``min_lr`` at ``schedule_steps`` (default: the last step)."""
    end, warmup = optim.schedule_steps or total_steps, optim.warmup(total_steps)
    decay = _decay(optim)
    style = "constant" if decay is not None else _MEGATRON_NAMES.get(optim.schedule, optim.schedule)
    schedule = _Schedule(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(end, warmup + 1),
        lr_decay_style=style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(1, total_steps),
        wd_incr_style="constant",
        wsd_decay_steps=optim.decay_steps,
        lr_wsd_decay_style="linear" if optim.schedule == "wsd" else None,
    )
    if decay is not None:
        schedule.decay = decay
        schedule.step(increment=0)  # the first learning rate, if there is no warm-up
    return schedule


def _decay(optim: OptimConfig) -> Callable[[float], float] | None:
    """Factor of ``lr - min_lr`` for the share 0..1 of the decay that is done; None: Megatron-Core computes it."""
    if optim.schedule == "polynomial":
        return lambda share: (1 - share) ** optim.power
    if optim.schedule == "cosine_with_restarts":
        # SGDR (arXiv 1608.03983), with cycles of equal length; the last one ends at zero.
        return lambda share: 0.5 * (1 + math.cos(math.pi * (optim.num_cycles * share % 1))) if share < 1 else 0.0
    return None


class _Schedule(OptimizerParamScheduler):
    decay: Callable[[float], float] | None = None
    """Replaces Megatron-Core's decay after the warm-up."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        done = self.num_steps - self.lr_warmup_steps
        if self.decay is None or done <= 0:
            return float(super().get_lr(param_group))
        highest: Any = param_group.get("max_lr", self.max_lr)
        lowest: Any = param_group.get("min_lr", self.min_lr)
        share = min(1.0, done / (self.lr_decay_steps - self.lr_warmup_steps))
        return float(lowest + self.decay(share) * (highest - lowest))
