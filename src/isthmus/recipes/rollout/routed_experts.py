"""Router replay: the experts that vLLM servers chose, as training needs them (arXiv 2510.11370)."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.config.schema import RunConfig
from isthmus.data.batching.rollout_batches import RoutedExperts
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture

SERVER_OPTION = "--enable-return-routed-experts"
"""The option of ``vllm serve`` with which a server returns experts with each answer."""


@dataclass(frozen=True, slots=True)
class RouterShapes:
    """Sizes of the experts that a server returns for an answer."""

    num_layers: int
    """Of the model; in layers without experts the numbers have no meaning."""
    expert_layers: Sequence[int]
    """Layers with experts, from 0."""
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest one for the number of an expert."""
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype(np.uint16)

    def decoded(self, text: object, tokens: int, server: str) -> RoutedExperts:
        """The experts of all ``tokens`` of prompt and answer but the last.

        Args:
            text: a .npy file in base64, ``routed_experts`` of a choice in vLLM's reply.
            tokens: of prompt and answer.
            server: name for errors.

        Raises:
            DataError: it is something else.
        """
        try:
            if not isinstance(text, str):
                raise ValueError(f"got {type(text).__name__}")
            array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
            self._check(array, (tokens - 1, self.num_layers, self.top_k))
        except (ValueError, EOFError, OSError) as error:
            raise DataError(
                f"{server} returns no valid routed_experts: {str(error)[:300]}. Start it with {SERVER_OPTION} and the "
                "model of the policy, or set rollout.router_replay=false."
            ) from None
        return np.ascontiguousarray(array, dtype=self.dtype)

    def _check(self, array: RoutedExperts, shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            raise ValueError(f"expected [tokens - 1, layers, experts per token] = {shape}, got {array.shape}")
        if array.dtype.kind not in "ui":
            raise ValueError(f"expected integers, got {array.dtype}")
        used = array[:, list(self.expert_layers)].astype(np.int64)
        if used.size and not 0 <= used.min() <= used.max() < self.num_experts:
            raise ValueError(f"expected experts from 0 to {self.num_experts - 1}, got {used.min()} to {used.max()}")
        used.sort(axis=-1)
        repeated = np.argwhere(used[..., 1:] == used[..., :-1])
        if len(repeated):  # such as zeros of a kernel that records no choice
            token, index, _ = repeated[0].tolist()
            raise ValueError(
                f"token {token} has an expert twice in layer {self.expert_layers[index]}: {used[token, index].tolist()}"
            )


def replay_shapes(config: RunConfig, architecture: Architecture) -> RouterShapes | None:
    """What servers have to return for ``rollout.router_replay``; None if the routers of training choose.

    Raises UsageError if it is true, and the model cannot replay.
    """
    setting, moe = config.rollout.router_replay, architecture.moe
    if config.rollout.engine != "vllm" or setting is False:
        return None
    obstacle = ""
    if moe is None:
        obstacle = f"{architecture.family} without experts has no choice to replay"
    elif moe.score == "sparsemixer":
        obstacle = f"{architecture.family} draws its experts at random in training"
    if obstacle or moe is None:
        if setting is True:
            raise UsageError(f"rollout.router_replay=true: {obstacle}. Leave it out.")
        return None
    layers = tuple(layer.number for layer in architecture.layers if layer.experts is not None)
    return RouterShapes(architecture.num_layers, layers, moe.num_experts, moe.top_k)
