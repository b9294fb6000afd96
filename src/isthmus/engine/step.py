"""One optimizer step: micro batches through the pipeline, gradient reduction, weight update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder.decoder import Decoder, DecoderOutput
from isthmus.engine.decoder.mtp import mtp_positions
from isthmus.engine.host_copies import batch_to_device, to_device
from isthmus.engine.layers.dropout import dropout_keys
from isthmus.engine.linear.fp8_linear import fp8_step
from isthmus.engine.loss.objective import NEXT_TOKEN, Objective, PeakObjective, PreparedObjective
from isthmus.engine.loss.sample_losses import SampleLoss, SampleLosses
from isthmus.engine.moe.load_balancing import ExpertLoad, load_stats, router_sums, updated_bias
from isthmus.engine.moe.moe_layer import MoeBlock
from isthmus.engine.optim.optimizer import MIN_LOSS_SCALE, WrappedModel
from isthmus.engine.optim.update import prepare_grads, reduce_and_scale_grads, update_loss_scale, update_weights
from isthmus.engine.parallel.context_parallel import local_batch
from isthmus.engine.parallel.ddp import weights_gathered
from isthmus.engine.parallel.sharded_params import full_tensor, full_to_shard
from isthmus.engine.teacher import Teacher, pipeline_arguments
from isthmus.engine.trace_region import trace_region
from isthmus.errors import Diverged


class NotFinite(Diverged):
    """The loss or the gradient norm of a step is not finite; the weights are unchanged."""


@dataclass(frozen=True, slots=True)
class TokenPeak:
    """The largest of a value of the loss tokens of a step."""

    value: float
    sample: int
    """Index in the store of the token's sample."""
    position: int
    """Position of the token in its sample."""


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
    host_sums: Sequence[float] = ()
    """Sums over all ranks of the numbers that the caller of the step gave."""
    peak: TokenPeak | None = None
    """None unless the objective is a :class:`~isthmus.engine.loss.objective.PeakObjective`."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Mean loss and metrics, the same on every rank."""

    loss: float
    metrics: Mapping[str, float]


def _forward_step(
    iterator: Iterator[PackedBatch], model: Any, objective: Objective = NEXT_TOKEN, step: int = 0
) -> tuple[Tensor, Any]:
    """Forward pass of the next micro batch through a stage, and the function that makes a loss of its output."""
    packed = next(iterator)
    device = next(model.parameters()).device
    config = get_model_config(model)
    if model.training and config.is_random:
        keys = dropout_keys(packed, seed=config.seed, step=step)
        packed = replace(packed, dropout=replace(keys, tokens=to_device(keys.tokens, device)))
    batch = local_batch(replace(packed, sample_weights=objective.sample_weights(packed)))
    assert batch.labels is not None and batch.loss_mask is not None
    depths = (config.mtp_num_layers or 0) if model.training else 0
    positions = batch.loss_mask.nonzero()[:, 0]
    mtp = mtp_positions(positions, batch.position_ids, depths)
    output = model(
        batch_to_device(batch, device),
        _loss_output(
            objective,
            batch,
            to_device(positions, device),
            [to_device(depth_positions, device) for depth_positions in mtp],
        ),
    )

    def compute_loss(losses: Tensor) -> tuple[Tensor, Tensor, _Reported]:
        result = objective.loss(
            losses,
            batch,
            loss_tokens=positions.numel(),
            mtp_tokens=sum(depth_positions.numel() for depth_positions in mtp),
            mtp_weight=config.mtp_loss_scaling_factor / depths if depths else 0.0,
        )
        reported = (result.loss_sum, result.count, positions.numel(), *(result.sums[name] for name in objective.sums))
        return result.loss, torch.full((), result.count, dtype=torch.int, device=device), reported

    return output, compute_loss


def _loss_output(
    objective: Objective, batch: PackedBatch, positions: Tensor, mtp_positions: Sequence[Tensor]
) -> DecoderOutput:
    if objective.per_token in ("policy", "policy_entropy"):
        entropy_gradient = objective.per_token == "policy_entropy"
        return partial(Decoder.policy_values, positions=positions, entropy_gradient=entropy_gradient)
    if objective.per_token == "scores":
        return partial(Decoder.token_scores, positions=positions)
    if objective.per_token == "next_tokens":
        return partial(Decoder.next_tokens, positions=positions)
    if objective.per_token:
        return partial(Decoder.token_values, positions=positions)
    if batch.teacher is not None:
        return partial(Decoder.distillation_sums, positions=positions)
    return partial(Decoder.loss_sum, positions=positions, mtp_positions=mtp_positions)


_NEGLIGIBLE_LOSS = 1e-9
"""Loss of well-separated pairs: the square of their gradient underflows in float32."""
_Reported = tuple[Tensor | float, ...]
"""Loss sum, count, loss tokens, and the objective's other sums."""


class Evaluator:
    """Runs this rank's stages."""

    def __init__(self, model: Sequence[Any], objective: Objective = NEXT_TOKEN, teacher: Teacher | None = None) -> None:
        self.model: list[Any] = list(model)
        self.objective = objective
        self.teacher = teacher
        """Gives the targets of ``objective``; other objectives have none."""
        self.device: torch.device = next(model[0].parameters()).device

    @property
    def step(self) -> int:
        """Steps done so far."""
        return 0

    def evaluate(self, batches: Iterator[Sequence[PackedBatch]], objective: Objective | None = None) -> EvalResult:
        """Mean loss per loss token, or per pair, over all batches; ``objective`` replaces the objective of training."""
        prepares = objective is None
        objective = self.objective if objective is None else objective
        total = torch.zeros(3 + len(objective.sums), dtype=torch.float64, device=self.device)
        for micro_batches in batches:
            if prepares:
                self._prepare(micro_batches)
            sums = self._sums(self.run_forward(micro_batches, objective), objective)
            dist.all_reduce(sums)
            total += sums
        loss_sum, count, _, *more = total.tolist()
        return EvalResult(
            loss_sum / max(1, count), objective.metrics(dict(zip(objective.sums, more, strict=True)), count)
        )

    def run_forward(self, batches: Sequence[PackedBatch], objective: Objective) -> list[_Reported]:
        """What the objective reports of each micro batch, in evaluation mode; empty before the last stage."""
        for stage in self.model:
            if stage.training:  # a walk over all modules, which a pass of generation would notice
                stage.eval()
        with torch.no_grad():
            return self._run_micro_batches(batches, objective, forward_only=True)

    def _prepare(self, batches: Sequence[PackedBatch]) -> None:
        if isinstance(self.objective, PreparedObjective):
            self.objective.prepare(batches, lambda others, objective: self.evaluate(iter([others]), objective).loss)

    def _run_pipeline(
        self,
        batches: Sequence[PackedBatch],
        objective: Objective,
        *,
        forward_only: bool,
        before_micro_batch: Callable[[int], None] | None = None,
    ) -> Tensor:
        """This rank's part of the sums over the global batch: loss, count, loss tokens, then the objective's; float64.

        The ranks of a packed sequence report it once. ``before_micro_batch`` is called with the number of done ones,
        before each but the first.
        """
        results = self._run_micro_batches(
            batches, objective, forward_only=forward_only, before_micro_batch=before_micro_batch
        )
        return self._sums(results, objective)

    def _run_micro_batches(
        self,
        batches: Sequence[PackedBatch],
        objective: Objective,
        *,
        forward_only: bool,
        before_micro_batch: Callable[[int], None] | None = None,
    ) -> list[_Reported]:
        """:meth:`_run_pipeline` without the sums: what the objective reports of each micro batch on the last stage."""
        if self.teacher and objective is self.objective:
            inputs = self.teacher.with_targets(batches)
        else:
            inputs = batches
        forward_step = partial(_forward_step, objective=objective, step=self.step)
        with fp8_step(keeps_weights=len(batches) > 1, gradients_are_zero=not forward_only):
            if forward_only and parallel_state.get_pipeline_model_parallel_world_size() == 1:
                iterator, reported = _micro_batches(inputs, before_micro_batch), list[_Reported]()
                for _ in batches:
                    output, compute_loss = forward_step(iterator, self.model[0])
                    reported.append(compute_loss(output)[2])
                return reported
            results: list[_Reported] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[_micro_batches(inputs, before_micro_batch) for _ in self.model],
                forward_only=forward_only,
                **pipeline_arguments(self.model, batches),
            )
        return results

    def _sums(self, results: Sequence[_Reported], objective: Objective) -> Tensor:
        """The sums of :meth:`_run_pipeline` over the micro batches."""
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            return torch.stack([self._sum(values) for values in zip(*results, strict=True)])
        return torch.zeros(3 + len(objective.sums), dtype=torch.float64, device=self.device)

    def _sum(self, values: Sequence[Tensor | float]) -> Tensor:
        """Sum of scalars on the device or host, one after the other in float64, without a copy between the two."""
        total = sum(value.detach().double() if isinstance(value, Tensor) else float(value) for value in values)
        if isinstance(total, Tensor):
            return total
        return torch.full((), total, dtype=torch.float64, device=self.device)


class Stepper(Evaluator):
    """Trains this rank's stages."""

    def __init__(
        self,
        model: Sequence[WrappedModel],
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        objective: Objective = NEXT_TOKEN,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__(model, objective, teacher)
        self.optimizer = optimizer
        self.schedule = schedule
        self.skipped: int = 0
        """Steps without an update because a float16 gradient overflowed. Checkpoints save the count."""
        self.skipped_in_a_row: int = 0
        self.before_update: Callable[[StepResult], None] | None = None
        """Called with the result of a step, the same on every rank, before the weights change."""
        config = model[0].config  # shared by all stages
        config.finalize_model_grads_func = reduce_and_scale_grads
        config.grad_scale_func = optimizer.scale_loss if config.fp16 else None

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        host_numbers: Callable[[], Sequence[float]] = tuple,
        before_micro_batch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Update the weights once on this rank's micro batches; the loss is the mean over the global batch.

        ``host_numbers`` is called after the backward pass; its result (the same length on all ranks) is summed over all
        ranks with the loss, instead of in a collective of its own. On a GPU the update may still run on return.
        ``before_micro_batch`` is called with the number of done micro batches before each but the first. If it raises
        on all ranks (not with pipeline stages, which work on different micro batches), the state is that before the
        step.

        Raises:
            Diverged: the loss or gradient norm is not finite, or the gradient is zero at a nonzero loss; the weights
                are unchanged. A float16 overflow skips the step and halves the loss scale, down to its minimum.
        """
        self._prepare(batches)
        sums = self.compute_gradients(batches, before_micro_batch)
        routed = self._router_sums()
        with trace_region("optimizer"):
            # The only read of the device in a step: everything before it is queued, and no weight has changed.
            numbers = to_device(torch.tensor(host_numbers(), dtype=torch.float64), self.device)
            parts = [sums, numbers, self._peak_by_rank(), routed.flatten()]
            everywhere = torch.cat(parts)
            dist.all_reduce(everywhere)
            sums, numbers, peaks, flat = everywhere.split([len(part) for part in parts])
            routed = flat.view_as(routed)
            totals, host_sums, peak_numbers, (square, overflow, scale), load = _read(
                sums, numbers, peaks, prepare_grads(self.optimizer), load_stats(routed, sums[1])
            )
            norm = square**0.5
            result = self._result(totals, load, host_sums, loss_scale=scale if self.model[0].config.fp16 else None)
            result = self._with_peak(result, peak_numbers)
            if not self._check(result.loss, norm, overflow=bool(overflow), loss_scale=result.loss_scale):
                return replace(result, skipped=self.skipped)
            result = replace(result, grad_norm=norm)
            if self.before_update is not None:
                self.before_update(result)
            update_weights(self.optimizer, norm)
        self._update_expert_bias(routed)
        self.schedule.step(increment=1)
        return result

    def compute_gradients(
        self, batches: Sequence[PackedBatch], before_micro_batch: Callable[[int], None] | None = None
    ) -> Tensor:
        """Forward and backward pass of a step; returns this rank's part of the sums, float64."""
        for stage in self.model:
            stage.train()
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        with trace_region("forward and backward"):
            return self._run_pipeline(
                batches, self.objective, forward_only=False, before_micro_batch=before_micro_batch
            )

    def sample_losses(self, batches: Sequence[PackedBatch]) -> list[SampleLoss]:
        """The loss of each sample of this rank's micro batches, as the present weights give it in training.

        A collective; each sample is in the result of one rank. Gradients and statistics of the step are unchanged.
        """
        recorder = SampleLosses(self.objective)
        with torch.no_grad(), weights_gathered(self.model), trace_region("losses of samples"):
            self._run_pipeline(batches, recorder, forward_only=True)
        return recorder.losses

    def _result(
        self, sums: list[float], load: list[float], host_sums: list[float], *, loss_scale: float | None
    ) -> StepResult:
        loss_sum, count, loss_tokens, *more = sums
        experts = self.model[0].config.experts
        return StepResult(
            loss=loss_sum / max(1, count),
            loss_tokens=int(loss_tokens),
            grad_norm=math.inf,
            lr=self.lr,
            load=ExpertLoad.of(load, experts.losses) if load else None,
            metrics=self.objective.metrics(dict(zip(self.objective.sums, more, strict=True)), count),
            loss_scale=loss_scale,
            skipped=None if loss_scale is None else self.skipped,
            host_sums=host_sums,
        )

    def _peak_by_rank(self) -> Tensor:
        """1 and the peak of this rank in its place, zeros for other ranks: a sum gathers them; float64 [4 W]."""
        if not isinstance(self.objective, PeakObjective):
            return torch.empty(0, dtype=torch.float64, device=self.device)
        by_rank = torch.zeros(dist.get_world_size(), 4, dtype=torch.float64, device=self.device)
        peak = self.objective.take_peak()
        if peak is not None:
            by_rank[dist.get_rank()] = torch.cat([peak.new_ones(1), peak])
        return by_rank.flatten()

    def _with_peak(self, result: StepResult, by_rank: list[float]) -> StepResult:
        if not isinstance(self.objective, PeakObjective):
            return result
        rows = [by_rank[start : start + 4] for start in range(0, len(by_rank), 4)]
        _, value, sample, position = max(rows)  # a rank with a peak before those without
        if not any(has_peak for has_peak, *_ in rows):
            return result
        metrics = {**result.metrics, self.objective.peak_name: value}
        return replace(result, metrics=metrics, peak=TokenPeak(value, int(sample), int(position)))

    def _check(self, loss: float, norm: float, *, overflow: bool, loss_scale: float | None) -> bool:
        """Whether to update the weights; raises Diverged if training cannot continue."""
        if not math.isfinite(loss):
            raise NotFinite(
                f"the loss is {loss} after {self.schedule.num_steps} good steps; the weights are as after the last "
                f"of them. {_DIVERGED_HINT}"
            )
        update_loss_scale(self.optimizer, overflow=overflow)
        if overflow and loss_scale is not None and loss_scale > MIN_LOSS_SCALE:
            self.skipped += 1  # the learning rate schedule does not advance
            self.skipped_in_a_row += 1
            return False
        self.skipped_in_a_row = 0
        # All ratios of a policy loss may be clipped: then its gradient is zero.
        may_be_zero = self.objective.per_token in ("policy", "policy_entropy")
        _check_gradient(math.inf if overflow else norm, loss, may_be_zero=may_be_zero)
        return True

    def _router_sums(self) -> Tensor:
        """This rank's router statistics of the step; empty for a model without experts."""
        config = get_model_config(self.model[0])
        return router_sums(
            [(block.layer, block.router.stats) for block in self._expert_blocks()],
            num_layers=config.num_layers + (config.mtp_num_layers or 0),
            num_experts=config.num_moe_experts,
            device=self.device,
        )

    def _expert_blocks(self) -> list[MoeBlock]:
        return [module for stage in self.model for module in stage.modules() if isinstance(module, MoeBlock)]

    def _update_expert_bias(self, routed: Tensor) -> None:
        rate = get_model_config(self.model[0]).experts.expert_bias_update_rate
        for block in self._expert_blocks() if rate else ():
            bias = block.router.expert_bias
            assert bias is not None
            tokens = routed[block.layer, : bias.size(0)]
            moved = updated_bias(full_tensor(bias.data), tokens, rate)
            with full_to_shard(bias.data) as full_bias:
                full_bias.copy_(moved)

    @property
    def step(self) -> int:
        """Steps done so far, skipped ones too."""
        return int(self.schedule.num_steps) + self.skipped

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of fp16; None for other precisions."""
        return float(self.optimizer.get_loss_scale()) if self.model[0].config.fp16 else None

    @property
    def lr(self) -> float:
        """Learning rate of the parameters without a multiplier."""
        return float(self.schedule.get_lr({}))


def _micro_batches(
    batches: Iterable[PackedBatch], before_micro_batch: Callable[[int], None] | None
) -> Iterator[PackedBatch]:
    for done, batch in enumerate(batches):
        if done and before_micro_batch is not None:
            before_micro_batch(done)
        yield batch


_DIVERGED_HINT = "Lower optim.lr, lengthen optim.warmup_steps, or resume from an earlier checkpoint."


def _check_gradient(norm: float, loss: float, *, may_be_zero: bool) -> None:
    if not math.isfinite(norm):
        raise NotFinite(f"the gradient norm is {norm} at a loss of {loss:.4f}. {_DIVERGED_HINT}")
    if norm == 0 and loss > _NEGLIGIBLE_LOSS and not may_be_zero:
        # With very large weights the mean square in a norm overflows. Then all gradients before the norm are zero.
        raise Diverged(f"the gradient is zero at a loss of {loss:.4f}, so training makes no progress. {_DIVERGED_HINT}")


def _read(*vectors: Tensor) -> list[list[float]]:
    """The values of float64 vectors, in one copy to the host."""
    parts = torch.cat(vectors).cpu().split([len(vector) for vector in vectors])
    return [part.tolist() for part in parts]
