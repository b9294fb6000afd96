"""One optimizer step: micro batches through the pipeline, gradient reduction, weight update."""

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

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.host_copies import to_device
from isthmus.engine.layers.dropout import dropout_keys
from isthmus.engine.layers.mtp_layer import mtp_positions
from isthmus.engine.moe.load_balancing import ExpertLoad, reduce_load, updated_bias
from isthmus.engine.moe.moe_layer import MoeBlock
from isthmus.engine.objective import NEXT_TOKEN, Objective
from isthmus.engine.optim.optimizer import MIN_LOSS_SCALE, WrappedModel
from isthmus.engine.parallel.context_parallel import local_batch
from isthmus.engine.parallel.sharded_params import full_tensor, full_to_shard
from isthmus.engine.trace_region import trace_region
from isthmus.engine.upstream.compat import sync_loss_scales
from isthmus.errors import Diverged


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one training step, the same on every rank."""

    loss: float
    """Mean over the loss tokens of the global batch, or over its pairs."""
    loss_tokens: int
    grad_norm: float
    """Infinite if the step was skipped."""
    lr: float
    load: ExpertLoad | None = None
    """None for a model without experts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    """None unless the model is float16."""
    skipped: int | None = None
    """Steps without an update so far because a float16 gradient overflowed; None unless the model is float16."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Mean loss and metrics, the same on every rank."""

    loss: float
    metrics: Mapping[str, float]


def _forward_step(
    iterator: Iterator[PackedBatch], model: Any, objective: Objective = NEXT_TOKEN, step: int = 0
) -> tuple[Tensor, Any]:
    whole = next(iterator)
    device = next(model.parameters()).device
    config = get_model_config(model)
    if model.training and config.has_dropout:
        keys = dropout_keys(whole, seed=config.seed, step=step)
        whole = replace(whole, dropout=replace(keys, tokens=to_device(keys.tokens, device)))
    batch = local_batch(replace(whole, sample_weights=objective.sample_weights(whole)))
    assert batch.labels is not None and batch.loss_mask is not None
    depths = (config.mtp_num_layers or 0) if model.training else 0
    positions = batch.loss_mask.nonzero()[:, 0]
    mtp = mtp_positions(positions, batch.position_ids, depths)
    on_device = replace(
        batch,
        input_ids=to_device(batch.input_ids, device),
        position_ids=to_device(batch.position_ids, device),
        labels=to_device(batch.labels, device),
    )
    output = model(
        on_device,
        loss_positions=to_device(positions, device),
        mtp_positions=[to_device(each, device) for each in mtp],
        per_token=objective.per_token,
    )

    def compute_loss(losses: Tensor) -> tuple[Tensor, Tensor, _Reported]:
        found = objective.loss(
            losses,
            batch,
            loss_tokens=positions.numel(),
            mtp_tokens=sum(each.numel() for each in mtp),
            mtp_weight=config.mtp_loss_scaling_factor / depths if depths else 0.0,
        )
        reported = (found.loss_sum, found.count, positions.numel(), *(found.sums[name] for name in objective.sums))
        return found.loss, torch.tensor(found.count, dtype=torch.int, device=device), reported

    return output, compute_loss


_NEGLIGIBLE_LOSS = 1e-9
"""Loss of well-separated pairs: the square of their gradient underflows in float32."""
_Reported = tuple[Tensor | float, ...]
"""Loss sum, count, loss tokens, and the objective's other sums."""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over the global batch, the same on every rank."""

    loss_sum: float
    count: float
    loss_tokens: float
    sums: dict[str, float]


class Stepper:
    def __init__(
        self,
        model: Sequence[WrappedModel],
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        objective: Objective = NEXT_TOKEN,
    ) -> None:
        self.model: list[Any] = list(model)
        self.optimizer = optimizer
        self.schedule = schedule
        self.objective = objective
        self.skipped = 0
        """Steps without an update because a float16 gradient overflowed. Checkpoints save the count."""
        self.skipped_in_a_row = 0
        self.device: torch.device = next(model[0].parameters()).device
        config = model[0].config  # shared by all stages
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss

    def train_step(self, batches: Sequence[PackedBatch]) -> StepResult:
        """Update the weights once on this rank's micro batches; the loss is the mean over the global batch.

        Raises:
            Diverged: the loss or gradient norm is not finite, or the gradient is zero at a nonzero loss. A non-finite
                loss leaves the weights unchanged. A float16 overflow skips the step and halves the loss scale, down to
                its minimum.
        """
        for stage in self.model:
            stage.train()
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        with trace_region("forward and backward"):
            totals = self._run_pipeline(batches, self.objective, forward_only=False)
        loss = totals.loss_sum / max(1, totals.count)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} after {self.schedule.num_steps} good steps; the weights are as after the last "
                "of them. Lower optim.lr, lengthen optim.warmup_steps, or resume from an earlier checkpoint."
            )
        lr, loss_scale = self.lr, self.loss_scale
        with trace_region("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
        if loss_scale is not None:
            sync_loss_scales(self.optimizer)
        result = StepResult(
            loss=loss,
            loss_tokens=int(totals.loss_tokens),
            grad_norm=math.inf,
            lr=lr,
            load=self._expert_load(int(totals.count), updated=bool(updated)),
            metrics=self.objective.metrics(totals.sums, totals.count),
            loss_scale=loss_scale,
        )
        if loss_scale is not None and not updated and loss_scale > MIN_LOSS_SCALE:
            self.skipped += 1  # the learning rate schedule does not advance
            self.skipped_in_a_row += 1
            return replace(result, skipped=self.skipped)
        norm = float(grad_norm) if updated else math.inf
        _check_gradient(norm, loss)
        self.schedule.step(increment=1)
        self.skipped_in_a_row = 0
        return replace(result, grad_norm=norm, skipped=None if loss_scale is None else self.skipped)

    def _run_pipeline(self, batches: Sequence[PackedBatch], objective: Objective, *, forward_only: bool) -> _Totals:
        results: list[_Reported] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, objective=objective, step=self.step),
            data_iterator=[iter(batches) for _ in self.model],
            model=self.model,
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.numel(),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        totals = torch.zeros(3 + len(objective.sums), dtype=torch.float64, device=self.device)
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            for index, values in enumerate(zip(*results, strict=True)):
                totals[index] = sum(map(float, values))
        dist.all_reduce(totals)
        loss_sum, count, loss_tokens, *sums = totals.tolist()
        return _Totals(loss_sum, count, loss_tokens, dict(zip(objective.sums, sums, strict=True)))

    def _expert_load(self, count: int, *, updated: bool) -> ExpertLoad | None:
        """Sum the router statistics over all ranks. After a weight update, also update the expert biases."""
        config = get_model_config(self.model[0])
        if config.num_moe_experts is None:
            return None
        blocks = [module for stage in self.model for module in stage.modules() if isinstance(module, MoeBlock)]
        settings = config.experts
        load, counts = reduce_load(
            [(block.layer, block.router.stats) for block in blocks],
            num_layers=config.num_layers + (config.mtp_num_layers or 0),
            num_experts=config.num_moe_experts,
            count=count,
            losses=settings.losses,
            device=self.device,
        )
        for block in blocks if settings.expert_bias_update_rate and updated else ():
            bias = block.router.expert_bias
            assert bias is not None
            moved = updated_bias(full_tensor(bias.data), counts[block.layer], settings.expert_bias_update_rate)
            with full_to_shard(bias.data) as whole:
                whole.copy_(moved)
        return load

    def evaluate(self, batches: Iterator[Sequence[PackedBatch]], objective: Objective | None = None) -> EvalResult:
        """Mean loss per loss token, or per pair, over all batches; ``objective`` replaces the objective of training."""
        objective = self.objective if objective is None else objective
        for stage in self.model:
            stage.eval()
        loss_sum, count = 0.0, 0.0
        sums = dict.fromkeys(objective.sums, 0.0)
        with torch.no_grad():
            for micro_batches in batches:
                totals = self._run_pipeline(micro_batches, objective, forward_only=True)
                loss_sum += totals.loss_sum
                count += totals.count
                sums = {name: value + totals.sums[name] for name, value in sums.items()}
        return EvalResult(loss_sum / max(1, count), objective.metrics(sums, count))

    @property
    def step(self) -> int:
        """Steps done so far, skipped ones too."""
        return int(self.schedule.num_steps) + self.skipped

    @property
    def loss_scale(self) -> float | None:
        return float(self.optimizer.get_loss_scale()) if self.model[0].config.fp16 else None

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def _check_gradient(norm: float, loss: float) -> None:
    hint = "Lower optim.lr, lengthen optim.warmup_steps, or resume from an earlier checkpoint."
    if not math.isfinite(norm):
        raise Diverged(f"the gradient norm is {norm} at a loss of {loss:.4f}. {hint}")
    if norm == 0 and loss > _NEGLIGIBLE_LOSS:
        # With very large weights the mean square in a norm overflows. Then all gradients before the norm are zero.
        raise Diverged(f"the gradient is zero at a loss of {loss:.4f}, so training makes no progress. {hint}")
