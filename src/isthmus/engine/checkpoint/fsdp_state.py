"""Checkpoint state of a fully sharded model: each rank's rows, under layout-independent names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from isthmus.engine.checkpoint.optimizer_state import is_tensor, local_entries, optimizer_state
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.sharded_params import copy_number, elements_before, local_elements


def sharded_state(model: FullyShardedDataParallel, adam: Any, *, is_loading: bool) -> dict[str, Any]:
    """This rank's rows of weights and optimizer state."""
    parameters = dict(model.module.named_parameters())
    copy = copy_number(next(iter(parameters.values())))
    starts = {name: elements_before(parameter) for name, parameter in parameters.items()}
    weights = {name: entry for name, entry in model.sharded_tensors.items() if not is_tensor(entry)}
    for name, parameter in parameters.items():
        entry, local = model.sharded_tensors[name], local_elements(parameter)
        if not (is_loading and parameter.requires_grad):
            saved = local if is_loading else local.to(entry.data.dtype)
            parts = local_entries(entry, saved, starts[name], copy=copy)
            weights |= {f"{name}.{n}": part for n, part in enumerate(parts)}

    def shards() -> Iterator[tuple[Any, Tensor, int]]:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                yield model.sharded_tensors[name], parameter, starts[name]

    return {"model": weights, "optimizer": optimizer_state(adam, shards(), stacked=not model.module.frozen, copy=copy)}
