"""Runs a decoder with hooks on its layers, optionally with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from isthmus.platforms.free_memory import trim_memory

Seen = Callable[[int, Tensor], None]
"""Called with the number of layers run and the hidden states [B * S, H] after them."""


class Network(Protocol):
    module: Any
    layers: Sequence[nn.Module]

    @property
    def parts(self) -> list[list[str]]:
        """Names of the parameters before the layers, of each layer, and after the layers."""

    def fill(self, names: Sequence[str]) -> None:
        """Allocate and load these parameters."""

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits [B * S, V] of int64 [B, S]."""

    def hidden(self, states: Any) -> Tensor:
        """Hidden states [B * S, H] from the input or output of a layer."""


def run_layers(network: Network, input_ids: Tensor, seen: Seen, *, by_layer: bool) -> Tensor:
    """Logits [B * S, V] of int64 [B, S]; ``seen`` gets the input of the first layer and the output of each layer.

    ``by_layer`` loads parameters just before use and releases them after; it needs a network on the meta device.
    """
    parts = network.parts if by_layer else [[] for _ in range(len(network.layers) + 2)]
    empty = {
        name: network.module.get_parameter(name) for part in parts for name in part if _is_parameter(network, name)
    }

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


def _is_parameter(network: Network, name: str) -> bool:
    """False for buffers, which are small and stay loaded."""
    module, _, local = name.rpartition(".")
    return local in network.module.get_submodule(module)._parameters
