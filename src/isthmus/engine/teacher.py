"""The frozen teacher of distillation, on the ranks of the student."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from isthmus.config.schema.distillation import DistillConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder.decoder import Decoder
from isthmus.engine.host_copies import batch_to_device, to_device
from isthmus.engine.loss.linear_cross_entropy import TeacherOutput
from isthmus.engine.parallel.context_parallel import local_batch


class Teacher:
    """Computes hidden states of loss tokens; the loss makes logits of them, chunk by chunk."""

    def __init__(self, stages: Sequence[Any], settings: DistillConfig) -> None:
        """``stages`` are this rank's, with the padded vocabulary of the student."""
        self.stages: list[Any] = [stage.eval() for stage in stages]
        self.settings = settings

    def with_targets(self, batches: Sequence[PackedBatch]) -> Iterable[PackedBatch]:
        """The micro batches of a step with the teacher's output, on the last pipeline stage.

        Without pipeline parallelism, the teacher runs when the next micro batch is taken, so the hidden states of one
        micro batch exist at a time. With it, the teacher's pipeline runs all micro batches before the student's.
        """
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return (self._with_output(batch, hidden) for batch in batches for hidden in self._hidden([batch]))
        return [self._with_output(batch, hidden) for batch, hidden in zip(batches, self._hidden(batches), strict=True)]

    @torch.no_grad()
    def _hidden(self, batches: Sequence[PackedBatch]) -> Sequence[Tensor | None]:
        """[n, H] for each micro batch on the last pipeline stage, None on the others."""
        hidden: list[Tensor] = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in self.stages],
            forward_only=True,
            collect_non_loss_data=True,
            **pipeline_arguments(self.stages, batches),
        )
        return hidden or [None] * len(batches)

    def _with_output(self, batch: PackedBatch, hidden: Tensor | None) -> PackedBatch:
        if hidden is None:
            return batch
        decoder = get_attr_wrapped_model(self.stages[-1], "output_projection", return_model_obj=True)
        for unit in (decoder, decoder.output_layer):
            if isinstance(unit, FSDPModule):
                unit.unshard()  # until the teacher's next forward pass
        weight, shard = decoder.output_projection()
        return replace(batch, teacher=TeacherOutput(hidden, weight.detach(), shard, self.settings))


def _forward(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
    batch, device = local_batch(next(iterator)), next(model.parameters()).device
    assert batch.loss_mask is not None
    positions = to_device(batch.loss_mask.nonzero()[:, 0], device)
    output = model(batch_to_device(batch, device), partial(Decoder.projection_inputs, positions=positions))
    return output, lambda hidden, **_: hidden


def pipeline_arguments(stages: Sequence[Any], batches: Sequence[PackedBatch]) -> dict[str, Any]:
    """Arguments of Megatron-Core's schedules for these micro batches; sets whether stages exchange shapes."""
    # All stages have the same micro batches. Exchanging shapes costs two synchronizations with the GPU each time.
    # Megatron-Core expects a part of each sequence under context parallelism, and generation has all of it.
    generates = any(batch.states is not None for batch in batches)
    lengths = {batch.num_rows for batch in batches}
    get_model_config(stages[0]).variable_seq_lengths = generates or len(lengths) > 1
    return {
        "model": list(stages),
        "num_microbatches": len(batches),
        "seq_length": batches[0].num_rows,
        "micro_batch_size": 1,
    }
