"""The reference policy: the weights with which a run started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.parallel.ddp import weights_gathered
from isthmus.engine.parallel.sharded_params import local_elements


class StartingWeights:
    """A copy of this rank's trainable weights, as they are now.

    New adapters change nothing, so with their starting weights the model is the base model.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages
        parameters = (parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad)
        self._pairs: list[tuple[Tensor, Tensor]] = [
            (local_elements(parameter), local_elements(parameter).clone()) for parameter in parameters
        ]

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """The model has the starting weights within the block, for forward passes only."""
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
