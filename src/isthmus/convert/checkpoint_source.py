"""The Hugging Face tensors of a Megatron checkpoint, without converting it."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.convert.canonical import unique_placements
from isthmus.convert.open_model import OpenedModel
from isthmus.convert.weight_source import TensorSpec
from isthmus.families.family import Placement
from isthmus.families.rules.shard import TensorSlice, tensor_slices, unsharded


class CheckpointSource:
    """A weight source that assembles tensors from those of a checkpoint; it keeps the last ones."""

    def __init__(self, model: OpenedModel) -> None:
        self._model = model
        self._parts: dict[str, list[tuple[Placement, TensorSlice]]] = {}
        for placement in unique_placements(model.family, model.arch).values():
            for piece in tensor_slices(placement.rule, model.arch, unsharded(model.arch), placement.expert):
                self._parts.setdefault(placement.hf[piece.part], []).append((placement, piece))
        shapes = model.family.hf_shapes(model.arch)
        self.tensors: dict[str, TensorSpec] = {
            name: TensorSpec(model.weights.dtype(parts[0][0].canonical), shapes[name])
            for name, parts in self._parts.items()
        }
        self._canonical: tuple[str, Tensor] | None = None
        self._last: tuple[str, Tensor] | None = None

    def __str__(self) -> str:
        return str(self._model.path)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._assembled(name))
        part = self._last[1][index or ...]
        return part.clone() if into is None else into.detach().copy_(part)

    def _assembled(self, name: str) -> Tensor:
        spec = self.tensors[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        for placement, piece in self._parts[name]:
            tensor[piece.hf] = piece.view(self._read(placement)).to(spec.dtype)
        return tensor

    def _read(self, placement: Placement) -> Tensor:
        """A whole canonical tensor; a fused one forms several Hugging Face tensors, in succession."""
        name = placement.canonical
        if self._canonical is None or self._canonical[0] != name:
            rows = placement.rule.canonical_shape(self._model.arch)[0]
            self._canonical = (name, self._model.weights.read(name, slice(0, rows)))
        return self._canonical[1]
