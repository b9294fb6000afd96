"""Runs a decoder and shows what each layer made of its input; if asked to, with the weights of one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from isthmus.platforms.free_memory import give_back

Seen = Callable[[int, Tensor], None]
"""Told the number of layers passed and the hidden states [B * S, H] behind them."""


class Network(Protocol):
    """A decoder, whoever built it."""

    module: Any
    layers: Sequence[nn.Module]

    @property
    def parts(self) -> list[list[str]]:
        """Names of parameters: those before the layers, those of each layer, those behind the layers."""

    def fill(self, names: Sequence[str]) -> None:
        """Give memory and weights to these parameters."""

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits [B * S, V] of int64 [B, S]."""

    def hidden(self, states: Any) -> Tensor:
        """Hidden states [B * S, H] in what a layer takes or returns."""


def run(network: Network, input_ids: Tensor, seen: Seen, *, by_layer: bool) -> Tensor:
    """Logits [B * S, V] of int64 [B, S].

    Args:
        network: built :func:`~isthmus.engine.meta_init.without_memory` if it runs layer by layer.
        input_ids: the samples.
        seen: told the input of the first layer and the output of all.
        by_layer: a layer's parameters are filled before it runs and lose their memory behind it; so do those before
            and behind the layers.
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
                module, _, own = name.rpartition(".")
                network.module.get_submodule(module).register_parameter(own, empty[name])
        if by_layer:
            give_back()

    def before(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if number == 0:
                seen(0, network.hidden(args[0] if args else kwargs["hidden_states"]))
                release(0)
            fill(1 + number)

        return hook

    def behind(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            release(1 + number)
            seen(1 + number, network.hidden(output))
            if number == len(network.layers) - 1:
                fill(-1)

        return hook

    handles = [layer.register_forward_pre_hook(before(n), with_kwargs=True) for n, layer in enumerate(network.layers)]
    handles += [layer.register_forward_hook(behind(n)) for n, layer in enumerate(network.layers)]
    try:
        fill(0)
        return network(input_ids)
    finally:
        release(-1)
        for handle in handles:
            handle.remove()


def _is_parameter(network: Network, name: str) -> bool:
    """Not a buffer: those are small, and keep what they were filled with."""
    module, _, own = name.rpartition(".")
    return own in network.module.get_submodule(module)._parameters
