"""Finds the layouts of a run that fit into the memory of its GPUs, and orders them by the time of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from isthmus.config.load import load_config
from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.errors import UsageError
from isthmus.recipes.plan.layout_checks import check_async_layout, check_offload
from isthmus.recipes.plan.memory_estimate import MemoryEstimate, estimate_memory
from isthmus.recipes.plan.model_plan import ModelPlan, check_training
from isthmus.recipes.plan.parameter_counts import PlanCounts
from isthmus.tools.planner.cost.step_time import StepTime, step_time
from isthmus.tools.planner.cost.workload import Workload
from isthmus.tools.planner.layouts import layouts, micro_batch_sizes, recompute_choices
from isthmus.tools.planner.planned_gpus import CONTEXT_BYTES, FRAGMENTATION, PlannedGpus


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with the settings that go with it."""

    config: RunConfig
    memory: MemoryEstimate
    """Memory of the rank that needs most."""
    time: StepTime | None
    """None without the data of a part."""

    @property
    def fragmentation(self) -> int:
        """Bytes that the allocator reserves beyond the tensors."""
        return math.ceil(FRAGMENTATION * (self.memory.total - self.memory.persistent))

    @property
    def needed_bytes(self) -> int:
        """Bytes of the allocator."""
        return self.memory.total + self.fragmentation

    @property
    def total_bytes(self) -> int:
        """Bytes of the GPU."""
        return self.needed_bytes + CONTEXT_BYTES

    @property
    def order(self) -> tuple[float, ...]:
        """Ascending from the best; without step times, from the least recomputation and communication."""
        train, parallel = self.config.train, self.config.parallel
        ranks = (parallel.tp * parallel.cp, parallel.pp * parallel.vpp, parallel.ep)
        share = {"none": 0.0, "selective": 0.1, "full": 1.0}[train.recompute]
        simple = (self.config.optim.offload, share, math.prod(ranks), *ranks, -train.micro_batch_size)
        return (0.0 if self.time is None else self.time.total_s, *simple)


def plan_of(plan: ModelPlan, layout: ParallelConfig, world_size: int) -> ModelPlan:
    """The plan in another layout; a teacher without experts has the rest of it."""
    teacher = plan.teacher
    if teacher is not None:
        experts = {} if teacher.architecture.moe is not None else {"ep": 1, "etp": None}
        teacher = replace(teacher, parallel=layout.model_copy(update=experts), world_size=world_size)
    return replace(plan, parallel=layout, world_size=world_size, teacher=teacher)


class Search:
    """All layouts of a model on a machine; each has the micro batch size and recomputation that are fastest."""

    def __init__(
        self, plan: ModelPlan, config: RunConfig, precision: str, machine: PlannedGpus, fixed: Collection[str]
    ) -> None:
        """Search the layouts of ``machine``; settings in ``fixed``, by dotted name, keep the value of ``config``.

        Raises:
            UsageError: no layout of these ranks is possible.
        """
        self.plan = plan
        self.config = config
        self.precision = precision
        self.machine = machine
        self.fixed = fixed
        self.evaluated: int = 0
        """Memory estimates that were computed."""
        self.closest: Candidate | None = None
        """That needs the least memory."""
        self._counts = PlanCounts(plan, config)
        self._any_fits = False
        candidates = [best for layout in self._layouts() if (best := self._best(layout)) is not None]
        self.fitting: list[Candidate] = sorted(candidates, key=lambda candidate: candidate.order)
        """One for each layout that fits, from the fastest."""

    def best(self, number: int) -> list[Candidate]:
        """The first ``number`` that pass all checks of a run."""
        candidates: list[Candidate] = []
        refused: UsageError | None = None
        for candidate in self.fitting:
            if len(candidates) == number:
                break
            try:
                load_config(None, None, replaced=candidate.config.model_dump(mode="json", exclude_unset=True))
                check_training(candidate.config, self._plan_of(candidate.config.parallel))
                config = candidate.config
                check_offload(config.optim, config.rollout, config.parallel, "cuda")
                check_async_layout(config.parallel, "cuda", self.precision, ranks_here=self.machine.gpus_per_node)
            except UsageError as error:
                refused = refused or error
                continue
            candidates.append(candidate)
        if refused is not None and not candidates:
            raise refused
        return candidates

    def _layouts(self) -> Iterator[ParallelConfig]:
        machine = self.machine
        return layouts(
            self.plan.architecture,
            self.config,
            world_size=machine.world_size,
            gpus_per_node=machine.gpus_per_node,
            fixed=self.fixed,
        )

    def _plan_of(self, layout: ParallelConfig) -> ModelPlan:
        return plan_of(self.plan, layout, self.machine.world_size)

    def _best(self, layout: ParallelConfig) -> Candidate | None:
        plan = self._plan_of(layout)
        candidates: list[Candidate] = []
        for size in micro_batch_sizes(self.config, layout, self.machine.world_size, self.fixed):
            fitting = self._least_recomputed(plan, size, offload=self.config.optim.offload)
            recomputes = fitting is None or fitting.config.train.recompute != self.config.train.recompute
            if recomputes and self._may_offload(layout):
                candidates += [
                    candidate
                    for candidate in (self._least_recomputed(plan, size, offload=True),)
                    if candidate is not None
                ]
            candidates += [] if fitting is None else [fitting]
            if not candidates:  # a larger micro batch does not fit either
                break
        return min(candidates, key=lambda candidate: candidate.order, default=None)

    def _may_offload(self, layout: ParallelConfig) -> bool:
        optim = self.config.optim
        is_decided = "optim.offload" in self.fixed or optim.offload
        return not is_decided and not layout.fsdp and optim.optimizer == "adamw"

    def _least_recomputed(self, plan: ModelPlan, micro_batch_size: int, *, offload: bool) -> Candidate | None:
        """The candidate with the least recomputation that fits, which is the fastest."""
        choices = recompute_choices(plan.architecture, self.config, plan.parallel, self.fixed)
        configs = [self._settings(plan, micro_batch_size, recompute, offload=offload) for recompute in choices]
        for config in configs:
            candidate = self._evaluate(plan, config)
            if candidate.needed_bytes <= self.machine.usable_bytes:
                self._any_fits = True
                return replace(candidate, time=self._time(plan, config))
            if candidate.memory.persistent > self.machine.usable_bytes:
                break
        if not self._any_fits:
            self._evaluate(plan, configs[-1])  # may be the closest
        return None

    def _settings(
        self, plan: ModelPlan, micro_batch_size: int, recompute: dict[str, Any], *, offload: bool
    ) -> RunConfig:
        train = self.config.train.model_copy(update={"micro_batch_size": micro_batch_size, **recompute})
        optim = self.config.optim.model_copy(update={"offload": offload})
        return self.config.model_copy(update={"parallel": plan.parallel, "train": train, "optim": optim})

    def _evaluate(self, plan: ModelPlan, config: RunConfig) -> Candidate:
        self.evaluated += 1
        memory = estimate_memory(
            plan, config, self.precision, gpu_bytes=self.machine.memory_bytes, compiles=True, counts=self._counts
        )
        candidate = Candidate(config, memory, None)
        if self.closest is None or candidate.needed_bytes < self.closest.needed_bytes:
            self.closest = candidate
        return candidate

    def _time(self, plan: ModelPlan, config: RunConfig) -> StepTime | None:
        if self.machine.cluster is None:
            return None
        teacher = None if plan.teacher is None else plan.teacher.architecture
        work = Workload.from_config(config, plan.architecture, self.precision, teacher=teacher)
        return step_time(work, plan.parallel, self.machine.cluster)
