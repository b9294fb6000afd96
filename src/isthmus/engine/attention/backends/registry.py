"""The attention backends, and why one cannot compute the attention of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isthmus.engine.attention.backends.blocks import packed_attention
from isthmus.engine.attention.backends.cudnn import LENGTH_MULTIPLE, cudnn_attention
from isthmus.engine.attention.backends.flex import flex_attention
from isthmus.engine.attention.backends.sdpa import sdpa_attention
from isthmus.engine.attention.backends.varlen import varlen_attention
from isthmus.engine.compiled import find_compiler
from isthmus.engine.decoder_config import BackendName

MAX_FLASH_WIDTH = 256


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What the attention of a run computes, on this rank."""

    device: Literal["cpu", "cuda"]
    dtype: torch.dtype
    groups: int
    """Key heads."""
    repeat: int
    """Query heads per key head."""
    key_width: int
    value_width: int
    scale: float | None = None
    window: bool = False
    """Whether any layer has a window."""
    softcap: float | None = None
    sinks: bool = False
    dropout: bool = False
    cp: bool = False

    def unsupported_scores(self) -> str | None:
        """Why a kernel that knows nothing but scale and window cannot be used."""
        if self.softcap is not None:
            return "it has no logit softcapping"
        return "it has no attention sinks" if self.sinks else None


def _varlen_lacks(needs: AttentionNeeds) -> str | None:
    if needs.device == "cpu":
        return "it has no CPU kernel"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, got {needs.dtype}"
    if needs.dropout:
        return "it has no dropout of attention probabilities"
    if needs.key_width % 8 or needs.key_width > MAX_FLASH_WIDTH or needs.value_width > needs.key_width:
        return (
            f"it needs heads with a multiple of 8 up to {MAX_FLASH_WIDTH} channels and values that are not wider, got "
            f"keys of {needs.key_width} and values of {needs.value_width}"
        )
    return needs.unsupported_scores()


def _cudnn_lacks(needs: AttentionNeeds) -> str | None:
    if torch.version.hip is not None:
        return "cuDNN is for NVIDIA GPUs"
    if torch.are_deterministic_algorithms_enabled():
        return "train.deterministic=true excludes its backward pass"
    return _varlen_lacks(needs)


def _flex_lacks(needs: AttentionNeeds) -> str | None:
    if needs.device == "cpu":
        return "it has no backward pass on a CPU"
    if needs.dropout:
        return "it has no dropout of attention probabilities"
    return find_compiler(needs.device)[1] or None


def _sdpa_lacks(needs: AttentionNeeds) -> str | None:
    if needs.device == "cpu" and needs.dropout:
        return "its dropout masks on a CPU would depend on the parallel layout"
    return needs.unsupported_scores()


@dataclass(frozen=True, slots=True)
class Backend:
    attend: Callable[..., Tensor]
    """Takes the arguments of :func:`packed_attention` that it supports."""
    unsupported: Callable[[AttentionNeeds], str | None]
    """Why it cannot compute this; None: it can."""
    description: str
    one_sample_tokens: int | None = None
    """It has another kernel for a packed sequence that is one sample of a multiple of this number of tokens."""


BACKENDS: dict[BackendName, Backend] = {
    "varlen": Backend(varlen_attention, _varlen_lacks, "flash attention over all samples of a packed sequence"),
    "cudnn": Backend(
        cudnn_attention,
        _cudnn_lacks,
        f"cuDNN for packed sequences of one sample of a multiple of {LENGTH_MULTIPLE} tokens, else flash attention",
        LENGTH_MULTIPLE,
    ),
    "flex": Backend(flex_attention, _flex_lacks, "a kernel that torch.compile generates for this model"),
    "sdpa": Backend(sdpa_attention, _sdpa_lacks, "scaled_dot_product_attention, one call for each sample"),
    "blocks": Backend(packed_attention, lambda _needs: None, "plain matmuls over blocks of queries"),
}
