"""A decoder on Megatron-Core in float32 on the CPU, in one process, its weights read from wherever they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.checkpoint_names import layer_of
from isthmus.engine.layers.attention import Segments
from isthmus.engine.parallel.process_groups import close_groups, open_groups, world_from_environment
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.platforms.detect import detect

_EMBEDDING = "embedding.word_embeddings.weight"


@contextmanager
def alone() -> Iterator[None]:
    """Megatron-Core's process groups for one rank on the CPU, for as long as the block lasts.

    Raises:
        UsageError: this process is one of several ranks, or uses a GPU.
    """
    _, ranks, _ = world_from_environment()
    if ranks > 1:
        raise UsageError(f"this process is one of {ranks} ranks, and a model is run by one. Start it alone.")
    if torch.cuda.is_initialized():
        raise UsageError("this process uses a GPU, and models are compared on the CPU. Start another for it.")
    joined_before = dist.is_initialized()
    open_groups(ParallelConfig(), detect("cpu"), seed=0)
    try:
        yield
    finally:
        if not joined_before:
            close_groups()


class MegatronNetwork:
    """A decoder for looking at its logits and at what its layers make of their input."""

    def __init__(self, architecture: Architecture, read: Callable[[str], Tensor], *, by_layer: bool) -> None:
        """Build the model within :func:`alone`; where it runs layer by layer, nothing is read yet.

        Args:
            architecture: the model's.
            read: a whole tensor in float32, by its canonical name.
            by_layer: whoever calls this has seen to it that parameters get no memory.
        """
        from isthmus.engine.megatron_model import build_model
        from isthmus.engine.model_config import transformer_config

        config = transformer_config(architecture, dtype=torch.float32)
        self._read = read
        self.module: Any = build_model(architecture, config).eval()
        self.layers: Sequence[nn.Module] = list(self.module.decoder.layers)
        if not by_layer:
            self.fill([name for name, _ in self.module.named_parameters()])

    @property
    def parts(self) -> list[list[str]]:
        """Names of parameters: those before the layers, those of each layer, those behind the layers."""
        found: list[list[str]] = [[] for _ in range(len(self.layers) + 2)]
        for name, _ in self.module.named_parameters():
            layer = layer_of(name)
            found[1 + layer if layer is not None else 0 if name.startswith("embedding.") else -1].append(name)
        if self.module.architecture.tie_embeddings:
            found[-1].append(_EMBEDDING)
        return found

    def fill(self, names: Sequence[str]) -> None:
        """Give memory and weights to these parameters, whose names are canonical where one rank has them all."""
        for name in names:
            module, _, own = name.rpartition(".")
            parameter = nn.Parameter(self._read(name), requires_grad=False)
            self.module.get_submodule(module).register_parameter(own, parameter)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits [B * S, V] of int64 [B, S]."""
        samples, length = input_ids.shape
        positions = torch.arange(length).repeat(samples)
        logits: Tensor = self.module(input_ids.flatten(), positions, Segments((length,) * samples))
        return logits

    @staticmethod
    def hidden(states: Any) -> Tensor:
        """Hidden states [B * S, H] in what a layer takes or returns."""
        found: Tensor = states[0] if isinstance(states, tuple) else states
        return found[:, 0]
