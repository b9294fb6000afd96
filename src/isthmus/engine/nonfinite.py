"""Finds where values that are not finite come from: runs the micro batches of a step again, and checks each tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, to_local_if_dtensor
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder.decoder import Decoder
from isthmus.engine.parallel.context_parallel import local_tokens
from isthmus.engine.parallel.live_parameters import canonical_name
from isthmus.engine.step import Stepper
from isthmus.engine.tensor_names import layer_of

Kind = Literal["weight", "output", "loss", "output gradient", "weight gradient"]
_KINDS: Sequence[Kind] = ("weight", "output", "loss", "output gradient", "weight gradient")
"""In the order of their computation."""
_MOST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with a value that is not finite."""

    kind: Kind
    name: str
    """Canonical name of the module or parameter."""
    rank: int
    order: tuple[int, ...]
    """Ascending in the order of computation, in one model: kind, layer, micro batch, number of the check."""
    micro_batch: int | None = None
    """Number of the micro batch on its rank, from 0."""
    samples: tuple[int, ...] = ()
    """Indices in the store of the samples with such values, if known."""


def find_nonfinite(stepper: Stepper, batches: Sequence[PackedBatch]) -> list[NonFinite]:
    """The first tensor of each kind on this rank, in the order of computation; a collective.

    Dropout masks are those of the step. Its gradients and statistics are replaced: no update may follow.
    """
    probe = _Probe()
    decoders = [get_attr_wrapped_model(stage, "decoder", return_model_obj=True) for stage in stepper.model]
    for decoder in decoders:
        for name, weight in decoder.named_parameters():
            probe.check("weight", canonical_name(decoder, name), weight.detach())
    handles = [handle for decoder in decoders for handle in probe.watch(decoder)]
    try:
        stepper.compute_gradients(batches)
    finally:
        for handle in handles:
            handle.remove()
    for decoder in decoders:
        for name, weight in decoder.named_parameters():
            gradient = getattr(weight, "main_grad", weight.grad)
            if gradient is not None:
                probe.check("weight gradient", canonical_name(decoder, name), gradient)
    return sorted(probe.found.values(), key=lambda nonfinite: nonfinite.order)


@dataclass(slots=True)
class _Place:
    """The micro batch that a stage computes."""

    number: int = -1
    batch: PackedBatch | None = None


@dataclass(slots=True)
class _Probe:
    found: dict[Kind, NonFinite] = field(default_factory=dict)
    _checks: int = 0

    def watch(self, decoder: Decoder) -> Iterator[Any]:
        """Check the output of each module, and its gradient; yields the handles of the hooks."""
        place = _Place()

        def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
            place.number, place.batch = place.number + 1, args[0]

        yield decoder.register_forward_pre_hook(begin)
        for name, module in decoder.named_modules():
            if name not in ("", "decoder", "output_layer"):  # which return the last layer's output and the loss
                hook = self._hook("output", canonical_name(decoder, name), place)
                yield module.register_forward_hook(hook)
        if decoder.post_process:
            yield decoder.register_forward_hook(self._hook("loss", "loss", place))

    def _hook(self, kind: Kind, name: str, place: _Place) -> Callable[..., None]:
        def check(_: nn.Module, args: Any, output: Any) -> None:
            # Recomputed blocks run again in the backward pass; pipeline stages have begun another micro batch by then.
            known = (
                torch._C._current_graph_task_id() == -1 or parallel_state.get_pipeline_model_parallel_world_size() == 1
            )
            number, batch = place.number, place.batch if known else None

            def check_gradient(gradient: Tensor) -> None:
                self.check("output gradient", name, gradient, number, batch)

            for tensor in output if isinstance(output, tuple | list) else (output,):
                if isinstance(tensor, Tensor):
                    self.check(kind, name, tensor.detach(), number, batch)
                    if tensor.requires_grad:
                        tensor.register_hook(check_gradient)

        return check

    def check(
        self, kind: Kind, name: str, tensor: Tensor, number: int | None = None, batch: PackedBatch | None = None
    ) -> None:
        self._checks += 1  # of all tensors: the same on ranks that share a layer
        tensor = to_local_if_dtensor(tensor)
        if tensor.is_meta or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            return
        samples = () if batch is None else _samples(tensor, batch)
        first = self.found.get(kind)
        layer = _layer(name)
        order = (_KINDS.index(kind), -layer if "gradient" in kind else layer, number or 0, self._checks)
        if first is None or order < first.order:
            self.found[kind] = NonFinite(kind, name, dist.get_rank(), order, number, samples)
        elif not first.samples and first.micro_batch == number:  # rows of experts have no samples; their layer's have
            self.found[kind] = replace(first, samples=samples)


def _layer(name: str) -> int:
    """Layer of a module or parameter, from 0; the embedding is before, final norm, output and MTP layers are after."""
    layer = layer_of(f"{name}.output")
    return layer if layer is not None else -1 if name.startswith("embedding") else 1 << 20


def _samples(tensor: Tensor, batch: PackedBatch) -> tuple[int, ...]:
    """The samples of the rows that are not finite; none if ``tensor`` is not [T, 1, ...], of this rank's tokens."""
    if tensor.dim() < 3 or tensor.size(1) != 1:
        return ()
    tokens = batch.layer_rows(local_tokens(torch.arange(sum(batch.lengths)), batch.spans))
    ranks, rest = divmod(len(tokens), len(tensor))
    sharded = ranks == parallel_state.get_tensor_model_parallel_world_size()  # sequence parallelism
    if rest or not (ranks == 1 or sharded):
        return ()
    rank_tokens = tokens.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0]
    rows = (~torch.isfinite(tensor)).flatten(1).any(1).cpu()
    ends = list(accumulate(batch.lengths))
    numbers = dict.fromkeys(bisect_right(ends, token) for token in rank_tokens[rows].tolist())
    found = dict.fromkeys(batch.sample_ids[number] for number in numbers if number < len(batch.sample_ids))
    return tuple(found)[:_MOST_SAMPLES]
