"""Runs an opened model: a Hugging Face folder in transformers, a checkpoint in Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from isthmus.convert.canonical import row_slices, unique_placements
from isthmus.convert.hf.from_hf import HfWeights
from isthmus.convert.open_model import OpenedModel
from isthmus.convert.verify.layerwise import Network
from isthmus.engine.checkpoint.checkpoint_names import layer_of
from isthmus.engine.meta_init import init_empty_weights
from isthmus.errors import UsageError
from isthmus.platforms.free_memory import free_bytes


@contextmanager
def open_network(side: OpenedModel, *, by_layer: bool) -> Iterator[Network]:
    """The model in float32; ``by_layer`` leaves its weights on the meta device."""
    empty = init_empty_weights() if by_layer else nullcontext()
    if isinstance(side.weights, HfWeights) and side.hf_folder is not None:
        from isthmus.hf.transformers_model import TransformersModel

        with empty:
            network = TransformersModel(side.hf_folder.config, side.weights.source, by_layer=by_layer)
        yield network
        return
    from isthmus.engine.single_process_model import SingleProcessModel, single_process_groups

    placements = unique_placements(side.family, side.arch)

    def read(name: str) -> Tensor:
        found = torch.empty(placements[name].rule.canonical_shape(side.arch))
        for rows in row_slices(tuple(found.shape), found.itemsize):
            found[rows] = side.weights.read(name, rows)
        return found

    with single_process_groups():
        with empty:
            model = SingleProcessModel(side.arch, read, by_layer=by_layer)
        yield model


def runner_names(a: OpenedModel, b: OpenedModel) -> str:
    one, other = ("transformers" if side.format == "hf" else "Megatron-Core" for side in (a, b))
    return f"both in {one}" if one == other else f"{one} and {other}"


def float32_bytes(side: OpenedModel) -> dict[int | None, int]:
    """Bytes of each layer, and under None of all other weights except MTP."""
    sizes: dict[int | None, int] = {}
    for name, placed in unique_placements(side.family, side.arch).items():
        if not name.startswith("mtp."):
            size = math.prod(placed.rule.canonical_shape(side.arch)) * torch.float32.itemsize
            sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + size
    return sizes


def memory_plan(a: OpenedModel, b: OpenedModel, *, by_layer: bool) -> tuple[bool, str]:
    """Whether to run layer by layer, and the reason; a UsageError if the largest layer does not fit into memory."""
    sizes = [float32_bytes(side) for side in (a, b)]
    needed, free = max(sum(size.values()) for size in sizes), free_bytes()
    if 2 * needed <= free:
        return by_layer, "layer by layer as asked" if by_layer else "all weights at once"
    largest = max(max(size.values()) for size in sizes)
    if largest > free:
        raise UsageError(
            f"the largest layer takes {_gib(largest)} in float32 and {_gib(free)} are free. Use a larger machine."
        )
    return True, f"layer by layer: the model needs {_gib(needed)} and {_gib(free)} are free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
