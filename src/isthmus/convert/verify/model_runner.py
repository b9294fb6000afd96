"""Opens a model on the disk for running: by transformers if it is a Hugging Face folder, else by Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from isthmus.convert.canonical import own_placements, row_slices
from isthmus.convert.hf.from_hf import WovenWeights
from isthmus.convert.open_model import Stored
from isthmus.convert.verify.layerwise import Network
from isthmus.engine.checkpoint.checkpoint_names import layer_of
from isthmus.engine.meta_init import without_memory
from isthmus.errors import UsageError
from isthmus.platforms.free_memory import free_bytes


@contextmanager
def opened_network(side: Stored, *, by_layer: bool) -> Iterator[Network]:
    """The model in float32, with its weights or, if it is to run layer by layer, with none yet.

    Raises:
        UsageError: it cannot be run.
        DataError: the weights are not what transformers wants.
    """
    empty = without_memory() if by_layer else nullcontext()
    if isinstance(side.weights, WovenWeights) and side.like is not None:
        from isthmus.hf.transformers_model import HfNetwork

        with empty:
            network = HfNetwork(side.like.config, side.weights.source, by_layer=by_layer)
        yield network
        return
    from isthmus.engine.single_process_model import MegatronNetwork, alone

    placements = own_placements(side.family, side.arch)

    def read(name: str) -> Tensor:
        found = torch.empty(placements[name].rule.canonical_shape(side.arch))
        for rows in row_slices(tuple(found.shape), found.itemsize):
            found[rows] = side.weights.read(name, rows)
        return found

    with alone():
        with empty:
            model = MegatronNetwork(side.arch, read, by_layer=by_layer)
        yield model


def judges(a: Stored, b: Stored) -> str:
    """Who runs the two, in words."""
    one, other = ("transformers" if side.format == "hf" else "Megatron-Core" for side in (a, b))
    return f"both in {one}" if one == other else f"{one} and {other}"


def float32_bytes(side: Stored) -> dict[int | None, int]:
    """Size of each layer, and under None that of all else that runs."""
    sizes: dict[int | None, int] = {}
    for name, placed in own_placements(side.family, side.arch).items():
        if not name.startswith("mtp."):
            size = math.prod(placed.rule.canonical_shape(side.arch)) * torch.float32.itemsize
            sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + size
    return sizes


def memory_plan(a: Stored, b: Stored, *, by_layer: bool) -> tuple[bool, str]:
    """Whether to run layer by layer, as asked for or because memory is short, and why, in words.

    Raises:
        UsageError: there is no memory for a layer.
    """
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
