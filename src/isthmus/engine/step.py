"""One optimizer step: micro batches through the pipeline, gradients over the ranks, weights updated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from isthmus.engine.attention import Segments
from isthmus.engine.balance import Load, take_stock, updated_bias
from isthmus.engine.fsdp import FullyShardedDataParallel
from isthmus.engine.moe import MoeBlock
from isthmus.engine.row_shards import gathered, whole_to_fill
from isthmus.errors import Diverged


class PackedLine(Protocol):
    """What a step needs of a micro batch; :class:`isthmus.data.batches.MicroBatch` is one."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [T]"""

    @property
    def labels(self) -> Tensor:
        """int64 [T], already shifted."""

    @property
    def loss_mask(self) -> Tensor:
        """bool [T], True where the label is learned."""

    @property
    def position_ids(self) -> Tensor:
        """int64 [T], from 0 in each sample."""

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [segments + 1]"""

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, padding not counted."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on every rank."""

    loss: float
    """Mean over all learned tokens of the global batch."""
    learned_tokens: int
    grad_norm: float
    lr: float
    load: Load | None
    """Of the experts, if there are any."""


def _forward_step(iterator: Iterator[PackedLine], model: Any) -> tuple[Tensor, Any]:
    line = next(iterator)
    device = next(model.parameters()).device
    boundaries = line.cu_seqlens.tolist()
    lengths = tuple(end - start for start, end in itertools.pairwise(boundaries))
    learned = line.loss_mask.nonzero()[:, 0]
    of_samples = tuple(part.sum().item() for part in line.loss_mask.split(lengths))
    output = model(
        line.input_ids.to(device, non_blocking=True),
        line.position_ids.to(device, non_blocking=True),
        Segments(lengths, of_samples, padded=line.num_tokens < line.input_ids.numel()),
        labels=line.labels.to(device, non_blocking=True),
        learned=learned.to(device, non_blocking=True),
    )

    def count(loss_sum: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        num_tokens = torch.tensor(learned.numel(), dtype=torch.int, device=device)
        return loss_sum, num_tokens, {"loss_sum": loss_sum.detach().double(), "num_tokens": learned.numel()}

    return output, count


def _run_pipeline(model: Any, lines: Sequence[PackedLine], *, forward_only: bool) -> tuple[float, int]:
    """Summed loss and learned tokens of the global batch, on every rank."""
    results = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(lines),
        model=[model],
        num_microbatches=len(lines),
        seq_length=lines[0].input_ids.numel(),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    totals = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        totals[0] = sum(float(result["loss_sum"]) for result in results)
        totals[1] = sum(result["num_tokens"] for result in results)
    dist.all_reduce(totals)
    loss_sum, num_tokens = totals.tolist()
    return loss_sum, int(num_tokens)


class Stepper:
    """Runs training steps and evaluations on this rank's stage of the model."""

    def __init__(
        self,
        model: DistributedDataParallel | FullyShardedDataParallel,
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = optimizer.scale_loss

    def train_step(self, lines: Sequence[PackedLine]) -> StepResult:
        """Update the weights once on this dp rank's micro batches.

        The gradient is that of the mean loss over all learned tokens of the global batch, so it does not depend on
        how the batch is cut.

        Raises:
            Diverged: the loss or the gradient norm is not finite, or the gradient is nothing at all while there is a
                loss; the weights are left as they were for a loss.
        """
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss_sum, num_tokens = _run_pipeline(self.model, lines, forward_only=False)
        loss = loss_sum / max(1, num_tokens)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} after {self.schedule.num_steps} good steps; the weights are as after the last "
                "of them. Lower optim.lr, lengthen optim.warmup_steps, or resume from an earlier checkpoint."
            )
        lr = self.lr
        _, grad_norm, _ = self.optimizer.step()
        norm = float(grad_norm)
        if not math.isfinite(norm):
            raise Diverged(
                f"the gradient norm is {norm} at a loss of {loss:.4f}. Lower optim.lr, lengthen optim.warmup_steps, "
                "or resume from an earlier checkpoint."
            )
        if norm == 0 and loss > 0:
            # Weights so large that a norm's mean square overflows: it scales by 1/inf, and all behind it is zero.
            raise Diverged(
                f"the gradient is zero at a loss of {loss:.4f}, so nothing is learned any more. Lower optim.lr, "
                "lengthen optim.warmup_steps, or resume from an earlier checkpoint."
            )
        load = self._take_stock(num_tokens)
        self.schedule.step(increment=1)
        return StepResult(loss=loss, learned_tokens=num_tokens, grad_norm=norm, lr=lr, load=load)

    def _take_stock(self, num_tokens: int) -> Load | None:
        """What the routers of all ranks saw in this step; biases of the choice move against it."""
        config = self.model.config
        if config.num_moe_experts is None:
            return None
        blocks = [module for module in self.model.modules() if isinstance(module, MoeBlock)]
        settings = config.experts
        load, counts = take_stock(
            [(block.layer, block.router.tally) for block in blocks],
            num_layers=config.num_layers,
            num_experts=config.num_moe_experts,
            num_tokens=num_tokens,
            losses=settings.losses,
        )
        for block in blocks if settings.expert_bias_update_rate else ():
            bias = block.router.expert_bias
            assert bias is not None
            moved = updated_bias(gathered(bias.data), counts[block.layer], settings.expert_bias_update_rate)
            with whole_to_fill(bias.data) as whole:
                whole.copy_(moved)
        return load

    def evaluate(self, batches: Iterator[Sequence[PackedLine]]) -> float:
        """Mean loss per learned token over all batches, without touching weights or gradients."""
        self.model.eval()
        loss_sum, num_tokens = 0.0, 0
        with torch.no_grad():
            for lines in batches:
                batch_loss, batch_tokens = _run_pipeline(self.model, lines, forward_only=True)
                loss_sum += batch_loss
                num_tokens += batch_tokens
        return loss_sum / max(1, num_tokens)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])
