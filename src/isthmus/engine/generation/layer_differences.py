"""Where generation and training differ: outputs of all layers for the tokens of one sequence, computed both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.generation.inference import Inference
from isthmus.engine.parallel.context_parallel import local_tokens


@dataclass(frozen=True, slots=True)
class LayerDifference:
    layer: int
    """From 0."""
    position: int
    """Position of the token in the sequence."""
    difference: float
    """Largest difference of an element of the layer's output, relative to the largest element, or to 1."""


def first_difference(
    inference: Inference, tokens: Sequence[int], prompt_tokens: int, tolerance: float
) -> LayerDifference | None:
    """The first token, and the first layer for it, with a larger difference than ``tolerance``; a collective.

    The outputs are those of generation, a token at a time after the prompt, and of the packed forward pass. None if
    all are close: then only the output layer can differ.
    """
    with _LayerRecorder(inference, len(tokens) - 1).recording() as generation:
        inference.repeat(tokens, prompt_tokens)
    with _LayerRecorder(inference, len(tokens) - 1).recording() as training:
        inference.score([(tokens, len(tokens) - prompt_tokens)])
    expected = training.outputs()
    scale = expected.abs().amax(-1).clamp(min=1)
    differences = (generation.outputs() - expected).abs().amax(-1) / scale
    large = (differences > tolerance) | differences.isnan()
    if not large.any():
        return None
    position = int(large.any(0).nonzero()[0])
    layer = int(large[:, position].nonzero()[0])
    return LayerDifference(layer, position, float(differences[layer, position]))


class _LayerRecorder:
    """Outputs of the layers of this rank, by layer and position."""

    def __init__(self, inference: Inference, positions: int) -> None:
        self._decoders = inference.decoders
        config, device = self._decoders[0].config, inference.device
        self._sums = torch.zeros(config.num_layers, positions, config.hidden_size, device=device)
        self._counts = torch.zeros(config.num_layers, positions, device=device)
        self._positions = torch.empty(0)

    @contextmanager
    def recording(self) -> Iterator[_LayerRecorder]:
        """Record the forward passes within the block."""
        handles: list[Any] = []
        for decoder in self._decoders:
            handles.append(decoder.register_forward_pre_hook(self._begin))
            for layer in decoder.decoder.layers:
                handles.append(layer.register_forward_hook(self._hook(layer.layer_number - 1)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def outputs(self) -> Tensor:
        """float32 [layers, positions, H] of the whole model; a collective."""
        for tensor in (self._sums, self._counts):
            dist.all_reduce(tensor)  # ranks with the same rows have the same values
        return self._sums / self._counts.clamp(min=1)[..., None]

    def _begin(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        batch: PackedBatch = args[0]
        positions = batch.position_ids.clone()
        real = torch.ones(sum(batch.lengths), dtype=torch.bool)
        real[len(real) - batch.padding :] = False
        positions[~local_tokens(real, batch.spans).to(positions.device)] = -1
        self._positions = positions

    def _hook(self, layer: int) -> Any:
        def record(_: nn.Module, args: Any, output: Tensor) -> None:
            rows = output.detach()[:, 0].float()
            ranks = len(self._positions) // len(rows)  # more than one with sequence parallelism
            rank = parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0
            positions = self._positions.chunk(ranks)[rank]
            kept = positions >= 0
            self._sums[layer, positions[kept]] += rows[kept]
            self._counts[layer, positions[kept]] += 1

        return record
