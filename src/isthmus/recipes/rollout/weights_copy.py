"""Other weights of the policy: those of the start of a run, or those that generate answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.engine.parallel.ddp import gather_weights, weights_gathered
from isthmus.engine.parallel.sharded_params import local_elements


class WeightsCopy:
    """A copy of what training changes of this rank's weights; methods are collectives.

    New adapters change nothing, so with their starting weights the model is the base model.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages
        gather_weights(stages)
        self._parameters = [parameter for stage in stages for parameter in _changing(stage)]
        tensors = map(local_elements, self._parameters)
        self._pairs: list[tuple[Tensor, Tensor]] = [(tensor, tensor.clone()) for tensor in tensors]

    @property
    def copies(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of this rank, and the copy of their local elements."""
        return [(parameter, copy) for parameter, (_, copy) in zip(self._parameters, self._pairs, strict=True)]

    def update(self) -> None:
        """Copy the present weights."""
        gather_weights(self._stages)
        for current, copy in self._pairs:
            copy.copy_(current)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """The model has these weights within the block, for forward passes only."""
        gather_weights(self._stages)
        with weights_gathered(self._stages):
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for current, copy in self._pairs:
            present = current.clone()
            current.copy_(copy)
            copy.copy_(present)


def _changing(stage: Any) -> Iterator[nn.Parameter]:
    """Trained parameters, and the bias of routers, which changes without a gradient."""
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad or name.rpartition(".")[2] == "expert_bias":
            yield parameter
