"""One optimizer step: micro batches through the pipeline, gradients over the ranks, weights updated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from isthmus.engine.layers.attention import Segments
from isthmus.engine.layers.mtp_layer import places_ahead
from isthmus.engine.moe.load_balancing import Load, take_stock, updated_bias
from isthmus.engine.moe.moe_layer import MoeBlock
from isthmus.engine.objective import NEXT_TOKEN, Objective, PackedLine, segment_lengths
from isthmus.engine.optim.optimizer import MIN_LOSS_SCALE, Wrapped
from isthmus.engine.parallel.context_parallel import own_part, own_spans
from isthmus.engine.parallel.sharded_params import gathered, whole_to_fill
from isthmus.engine.trace_region import phase
from isthmus.engine.upstream.compat import same_loss_scale
from isthmus.errors import Diverged


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on every rank."""

    loss: float
    """Mean over all learned tokens of the global batch, or over its pairs."""
    learned_tokens: int
    grad_norm: float
    """Infinite where the step was skipped."""
    lr: float
    load: Load | None = None
    """Of the experts, if there are any."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else the objective tells, by name; of layers that predict ahead their mean loss, ``mtp_loss``."""
    loss_scale: float | None = None
    """What the loss was multiplied by (float16); None in other precisions."""
    skipped: int | None = None
    """Steps of the run so far whose gradient overflowed, so that nothing was updated; None as above."""


@dataclass(frozen=True, slots=True)
class Means:
    """What an evaluation tells, equal on every rank."""

    loss: float
    figures: Mapping[str, float]


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor from the host; to a GPU from pinned memory, without which the host would wait for all before it."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _forward_step(iterator: Iterator[PackedLine], model: Any, objective: Objective = NEXT_TOKEN) -> tuple[Tensor, Any]:
    line = next(iterator)
    device = next(model.parameters()).device
    spans = own_spans(line.input_ids.numel())
    learned = own_part(line.loss_mask, spans).nonzero()[:, 0]
    config = get_model_config(model)
    depths = (config.mtp_num_layers or 0) if model.training else 0
    ahead = places_ahead(learned, line.position_ids, depths)
    padded = line.num_tokens < line.input_ids.numel()
    output = model(
        _sent(own_part(line.input_ids, spans), device),
        _sent(own_part(line.position_ids, spans), device),
        Segments(segment_lengths(line), objective.shares(line), padded=padded, spans=spans),
        labels=_sent(own_part(line.labels, spans), device),
        learned=_sent(learned, device),
        ahead=[_sent(places, device) for places in ahead],
        each=objective.each,
    )

    def measure(losses: Tensor) -> tuple[Tensor, Tensor, _Told]:
        found = objective.measure(
            losses,
            line,
            learned.numel(),
            sum(places.numel() for places in ahead),
            config.mtp_loss_scaling_factor / depths if depths else 0.0,
        )
        told = (found.loss_sum, found.count, learned.numel(), *(found.sums[name] for name in objective.sums))
        return found.loss, torch.tensor(found.count, dtype=torch.int, device=device), told

    return output, measure


_LEAST_LOSS = 1e-9
"""Of pairs that are well told apart, whose gradient's square no float32 holds."""
_Told = tuple[Tensor | float, ...]
"""Loss, count, learned tokens, and the objective's own sums."""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over the global batch, equal on every rank."""

    loss_sum: float
    count: float
    num_tokens: float
    """Learned."""
    sums: dict[str, float]


def _run_pipeline(
    model: list[Any], lines: Sequence[PackedLine], objective: Objective, *, forward_only: bool
) -> _Totals:
    """Run all micro batches through the stages; what they add up to."""
    results: list[_Told] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, objective=objective),
        data_iterator=[iter(lines) for _ in model],
        model=model,
        num_microbatches=len(lines),
        seq_length=lines[0].input_ids.numel(),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    totals = torch.zeros(3 + len(objective.sums), dtype=torch.float64, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for place, told in enumerate(zip(*results, strict=True)):
            totals[place] = sum(map(float, told))
    dist.all_reduce(totals)
    loss_sum, count, num_tokens, *sums = totals.tolist()
    return _Totals(loss_sum, count, num_tokens, dict(zip(objective.sums, sums, strict=True)))


class Stepper:
    """Runs training steps and evaluations on this rank's stages of the model."""

    def __init__(
        self,
        model: Sequence[Wrapped],
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        objective: Objective = NEXT_TOKEN,
    ) -> None:
        self.model = list(model)
        self.optimizer = optimizer
        self.schedule = schedule
        self.objective = objective
        self.skipped = 0
        """Steps that took no update because a float16 gradient overflowed; a checkpoint keeps the count."""
        config = model[0].config  # which all stages share
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss

    def train_step(self, lines: Sequence[PackedLine]) -> StepResult:
        """Update the weights once on this dp rank's micro batches.

        The gradient is that of the mean loss over all learned tokens of the global batch, or whatever else the
        objective counts, so it does not depend on how the batch is cut.

        Raises:
            Diverged: the loss or the gradient norm is not finite, or the gradient is nothing at all while there is a
                loss; the weights are left as they were for a loss. A float16 gradient that overflows costs the step and
                half the loss scale instead, until the scale is as low as it gets.
        """
        for stage in self.model:
            stage.train()
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        with phase("forward and backward"):
            totals = _run_pipeline(self.model, lines, self.objective, forward_only=False)
        loss = totals.loss_sum / max(1, totals.count)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} after {self.schedule.num_steps} good steps; the weights are as after the last "
                "of them. Lower optim.lr, lengthen optim.warmup_steps, or resume from an earlier checkpoint."
            )
        lr, loss_scale = self.lr, self.loss_scale
        with phase("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
        if loss_scale is not None:
            same_loss_scale(self.optimizer)
        result = StepResult(
            loss=loss,
            learned_tokens=int(totals.num_tokens),
            grad_norm=math.inf,
            lr=lr,
            load=self._take_stock(int(totals.count), updated=bool(updated)),
            figures=self.objective.figures(totals.sums, totals.count),
            loss_scale=loss_scale,
        )
        if loss_scale is not None and not updated and loss_scale > MIN_LOSS_SCALE:
            self.skipped += 1  # and the schedule stays where it is
            return replace(result, skipped=self.skipped)
        norm = float(grad_norm) if updated else math.inf
        if not math.isfinite(norm):
            raise Diverged(
                f"the gradient norm is {norm} at a loss of {loss:.4f}. Lower optim.lr, lengthen optim.warmup_steps, "
                "or resume from an earlier checkpoint."
            )
        if norm == 0 and loss > _LEAST_LOSS:
            # Weights so large that a norm's mean square overflows: it scales by 1/inf, and all behind it is zero.
            raise Diverged(
                f"the gradient is zero at a loss of {loss:.4f}, so nothing is learned any more. Lower optim.lr, "
                "lengthen optim.warmup_steps, or resume from an earlier checkpoint."
            )
        self.schedule.step(increment=1)
        return replace(result, grad_norm=norm, skipped=None if loss_scale is None else self.skipped)

    def _take_stock(self, count: int, *, updated: bool) -> Load | None:
        """What the routers of all ranks saw in this step; biases of the choice move against it in one that updates."""
        config = get_model_config(self.model[0])
        if config.num_moe_experts is None:
            return None
        blocks = [module for stage in self.model for module in stage.modules() if isinstance(module, MoeBlock)]
        settings = config.experts
        load, counts = take_stock(
            [(block.layer, block.router.tally) for block in blocks],
            num_layers=config.num_layers + (config.mtp_num_layers or 0),
            num_experts=config.num_moe_experts,
            num_tokens=count,
            losses=settings.losses,
        )
        for block in blocks if settings.expert_bias_update_rate and updated else ():
            bias = block.router.expert_bias
            assert bias is not None
            moved = updated_bias(gathered(bias.data), counts[block.layer], settings.expert_bias_update_rate)
            with whole_to_fill(bias.data) as whole:
                whole.copy_(moved)
        return load

    def evaluate(self, batches: Iterator[Sequence[PackedLine]]) -> float:
        """Mean loss per learned token, or per pair, over all batches, without touching weights or gradients."""
        return self.means(batches).loss

    def means(self, batches: Iterator[Sequence[PackedLine]], objective: Objective | None = None) -> Means:
        """What :meth:`evaluate` returns, and what else the objective tells; another objective than the run's own."""
        objective = self.objective if objective is None else objective
        for stage in self.model:
            stage.eval()
        loss_sum, count = 0.0, 0.0
        sums = dict.fromkeys(objective.sums, 0.0)
        with torch.no_grad():
            for lines in batches:
                totals = _run_pipeline(self.model, lines, objective, forward_only=True)
                loss_sum += totals.loss_sum
                count += totals.count
                sums = {name: value + totals.sums[name] for name, value in sums.items()}
        return Means(loss_sum / max(1, count), objective.figures(sums, count))

    @property
    def loss_scale(self) -> float | None:
        """What the loss of the next step is multiplied by; None unless the model is float16."""
        return float(self.optimizer.get_loss_scale()) if self.model[0].config.fp16 else None

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])
