"""Runs an opened model in float32: a Hugging Face folder in transformers, a checkpoint in Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isthmus.convert.canonical import row_slices, unique_placements
from isthmus.convert.hf.hf_tensors import HfWeights
from isthmus.convert.open_model import OpenedModel
from isthmus.engine.parallel.sharded_params import init_empty_weights
from isthmus.engine.tensor_names import layer_of
from isthmus.errors import UsageError
from isthmus.platforms.free_memory import free_bytes, trim_memory

if TYPE_CHECKING:
    from isthmus.engine.decoder.single_process_model import SingleProcessModel
    from isthmus.hf.transformers_model import TransformersModel

    DecoderRunner = TransformersModel | SingleProcessModel
Seen = Callable[[int, Tensor], None]
"""Called with the number of layers run and the hidden states [B * S, H] after them."""


@contextmanager
def open_network(side: OpenedModel, *, by_layer: bool, trust_remote_code: bool = False) -> Iterator[DecoderRunner]:
    """The model in float32; ``by_layer`` leaves its weights on the meta device."""
    empty = init_empty_weights() if by_layer else nullcontext()
    if isinstance(side.weights, HfWeights) and side.hf_folder is not None:
        from isthmus.hf.transformers_model import TransformersModel

        with empty:
            network = TransformersModel(
                side.hf_folder, side.weights.source, by_layer=by_layer, trust_remote_code=trust_remote_code
            )
        yield network
        return
    from isthmus.engine.decoder.single_process_model import SingleProcessModel, single_process_groups

    placements = unique_placements(side.family, side.arch)

    def read(name: str) -> Tensor:
        tensor = torch.empty(placements[name].rule.canonical_shape(side.arch))
        for rows in row_slices(tuple(tensor.shape), tensor.itemsize):
            tensor[rows] = side.weights.read(name, rows)
        return tensor

    with single_process_groups():
        with empty:
            model = SingleProcessModel(side.arch, read, by_layer=by_layer)
        yield model


def run_layers(network: DecoderRunner, input_ids: Tensor, seen: Seen, *, by_layer: bool) -> Tensor:
    """Logits [B * S, V] of int64 [B, S]; ``seen`` gets the input of the first layer and the output of each layer.

    ``by_layer`` loads parameters just before use and releases them after; it needs a network on the meta device.
    """
    parts = network.parts if by_layer else [[] for _ in range(len(network.layers) + 2)]
    empty = dict(network.module.named_parameters(remove_duplicate=False))  # buffers are small and stay loaded

    def fill(part: int) -> None:
        if by_layer:
            network.fill(parts[part])

    def release(part: int) -> None:
        for name in parts[part]:
            if name in empty:
                module, _, local = name.rpartition(".")
                network.module.get_submodule(module).register_parameter(local, empty[name])
        if by_layer:
            trim_memory()

    last = len(network.layers) - 1
    handles = []
    for number, layer in enumerate(network.layers):

        def before(_module: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
            if number == 0:
                seen(0, network.hidden(args[0] if args else kwargs["hidden_states"]))
                release(0)
            fill(1 + number)

        def after(_module: nn.Module, _args: Any, output: Any, number: int = number) -> None:
            release(1 + number)
            seen(1 + number, network.hidden(output))
            if number == last:
                fill(-1)

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.register_forward_hook(after))
    try:
        fill(0)
        return network(input_ids)
    finally:
        release(-1)
        for handle in handles:
            handle.remove()


def runner_names(a: OpenedModel, b: OpenedModel) -> str:
    first, second = ("transformers" if side.format == "hf" else "Megatron-Core" for side in (a, b))
    return f"both in {first}" if first == second else f"{first} and {second}"


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
