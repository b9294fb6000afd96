"""Frozen weights in NF4 or int8, de-quantized for each matmul: the base of QLoRA (arXiv 2305.14314).

Elements are those of bitsandbytes' ``Linear4bit`` and ``Linear8bitLt``: NF4 with one float32 scale for 64 elements, or
int8 with one for a row. ``docs/decisions/0041`` lists the layouts in which they are equal.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isthmus.extras import optional_package

BLOCK = 64
"""Elements of a row with the same scale in NF4, bitsandbytes' default."""
Kind = Literal["nf4", "int8"]
ELEMENT_BYTES: dict[Kind, float] = {"nf4": 0.5 + 4 / BLOCK, "int8": 1.0}
"""Bytes of an element with the scales; int8 has 4 more bytes for a row."""


@functools.cache
def bitsandbytes(setting: str = "lora.quantize") -> Any:
    """The functional API; a UsageError if the package is not installed."""
    # On some CPUs the import warns that a package for inference is missing.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with optional_package(setting, "bitsandbytes", otherwise="omit the setting"):
        from bitsandbytes import functional
    return functional


class QuantizedWeight(nn.Parameter):
    """A frozen weight [N, K]: a tensor on the meta device, for its shape and dtype, and its quantized elements."""

    kind: Kind
    codes: Tensor
    """uint8 [N * K / 2, 1] with two elements a byte, or int8 [N, K]."""
    scale: Tensor
    """float32, the largest magnitude of each block [N * K / 64] or row [N]."""

    def __new__(cls, weight: Tensor, kind: Kind, device: torch.device) -> QuantizedWeight:
        """``weight`` gives shape, dtype and attributes; :meth:`quantize_` sets the elements."""
        quantized: QuantizedWeight = torch.Tensor._make_subclass(cls, weight.detach().to("meta"), False)
        vars(quantized).update(vars(weight))
        quantized.kind = kind
        quantized.codes = quantized.scale = torch.empty(0, device=device)
        return quantized

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the elements."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether the elements are on a GPU."""
        return self.codes.is_cuda

    @property
    def data(self) -> QuantizedWeight:  # type: ignore[override]
        """Itself: a tensor made from it would not have the elements."""
        return self

    def detach(self) -> QuantizedWeight:  # type: ignore[override]
        """Itself, for the same reason."""
        return self

    @torch.no_grad()
    def quantize_(self, weight: Tensor) -> None:
        """Set the elements to those of ``weight`` [N, K], which is on the same device."""
        if self.kind == "nf4":
            self.codes, state = bitsandbytes().quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
            self.scale = state.absmax
        else:
            # bitsandbytes quantizes from float16 on any device; its GPU kernel takes nothing else.
            self.codes, self.scale, _ = bitsandbytes().int8_vectorwise_quant(weight.to(torch.float16))

    @torch.no_grad()
    def dequantize(self) -> Tensor:  # type: ignore[override]
        """The elements as a new tensor [N, K] of this weight's dtype."""
        if self.kind == "int8":
            return self.codes.to(self.dtype).mul_(self.scale[:, None] * (1 / 127))
        state = bitsandbytes().QuantState(self.scale, self.shape, None, BLOCK, "nf4", self.dtype)
        return bitsandbytes().dequantize_4bit(self.codes, state)

    @property
    def elements(self) -> tuple[Tensor, Tensor]:
        """The tensors with its memory."""
        return self.codes, self.scale


def dense(weight: Tensor) -> Tensor:
    """The weight, de-quantized if it is quantized."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
