"""A Megatron-Core decoder in float32 on the CPU, in one process, with weights read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.parallel.process_groups import close_groups, open_groups
from isthmus.engine.tensor_names import layer_of
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.platforms import rank_env
from isthmus.platforms.detect import detect

_EMBEDDING = "embedding.word_embeddings.weight"


@contextmanager
def single_process_groups() -> Iterator[None]:
    """Open Megatron-Core's process groups for one CPU rank.

    Raises:
        UsageError: the run has several ranks, or uses a GPU.
    """
    if (ranks := rank_env.world_size()) > 1:
        raise UsageError(f"this process is one of {ranks} ranks, a model is verified in one. Start it alone.")
    joined_before = dist.is_initialized()
    open_groups(ParallelConfig(), detect("cpu"), seed=0)
    try:
        yield
    finally:
        if not joined_before:
            close_groups()


class SingleProcessModel:
    def __init__(self, architecture: Architecture, read: Callable[[str], Tensor], *, by_layer: bool) -> None:
        """Build the model within :func:`single_process_groups`.

        ``read`` returns a whole float32 tensor by canonical name. With ``by_layer`` the parameters are not read yet.
        """
        from isthmus.engine.decoder.decoder import build_model
        from isthmus.engine.decoder.model_config import transformer_config

        config = transformer_config(architecture, dtype=torch.float32)
        self._read = read
        self.module: Any = build_model(architecture, config).eval()
        self.layers: Sequence[nn.Module] = list(self.module.decoder.layers)
        if not by_layer:
            self.fill([name for name, _ in self.module.named_parameters()])

    @property
    def parts(self) -> list[list[str]]:
        """Names of parameters before the layers, of each layer, and after the layers."""
        groups: list[list[str]] = [[] for _ in range(len(self.layers) + 2)]
        for name, _ in self.module.named_parameters():
            layer = layer_of(name)
            groups[1 + layer if layer is not None else 0 if name.startswith("embedding.") else -1].append(name)
        if self.module.architecture.head.tie_embeddings:
            groups[-1].append(_EMBEDDING)
        return groups

    def fill(self, names: Sequence[str]) -> None:
        for name in names:
            module, _, parameter_name = name.rpartition(".")
            parameter = nn.Parameter(self._read(name), requires_grad=False)
            self.module.get_submodule(module).register_parameter(parameter_name, parameter)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits [B * S, V] of int64 [B, S]."""
        return self.module(PackedBatch.for_inference(list(input_ids)))

    @staticmethod
    def hidden(states: Any) -> Tensor:
        """Hidden states [B * S, H] from the input or output of a layer."""
        hidden: Tensor = states[0] if isinstance(states, tuple) else states
        return hidden[:, 0]
