"""Copies of weights in the layout of oneDNN's kernels, for the few rows of a pass of generation on a CPU.

A matmul of few rows then reads each weight in order, which is faster, most for an output layer (docs/decisions/0082). A
training step has more rows, and its weights change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isthmus.engine.linear import matmul
from isthmus.engine.linear.quantized_weight import QuantizedWeight
from isthmus.platforms.cpu import has_bf16_matmuls
from isthmus.platforms.torch_features import PACK_WEIGHT

MOST_ROWS = 128
"""With more, the default layout is as fast."""


def are_packed(dtype: torch.dtype, rows: int) -> bool:
    """Whether weights of this dtype on this CPU are packed for passes of so many rows."""
    has_kernels = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16_matmuls())
    return PACK_WEIGHT is not None and has_kernels and 2 <= rows <= MOST_ROWS


class PackedWeights:
    """Packed copies of weights."""

    def __init__(self, weights: Iterable[Tensor], rows: int) -> None:
        """Pack the matrices among ``weights`` that a CPU has as a whole: float32, and bfloat16 if it has instructions.

        Others, and all if passes do not have 2 to 128 ``rows``, are multiplied as they are. The weights must not change
        before the object is dropped.
        """
        self._packed: dict[matmul.MatrixKey, Tensor] = {}
        for weight in weights:
            # FSDP gathers the weights of a layer, each time elsewhere; quantized ones are de-quantized.
            if isinstance(weight, DTensor | QuantizedWeight):
                continue
            if weight.device.type == "cpu" and are_packed(weight.dtype, rows):
                self._packed[matmul.matrix_key(weight.t())] = PACK_WEIGHT(weight.detach(), rows)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Multiply by the packed weights within the block.

        It is in inference mode if there are any: operations then record neither views nor versions, which is a tenth of
        the time of a pass of a small model. What the block creates must not be used in training.
        """
        with torch.inference_mode(bool(self._packed)), matmul.use_packed(self._packed):
            yield
