"""Refuses NaN and infinity that a computation on finite values makes, such as a cast beyond the range of a dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import DataError, UsageError


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; one pass over memory, a tenth of the time of ``torch.isfinite``."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor if tensor.dtype.itemsize > 1 else tensor.float())  # NaN propagates
    return bool(torch.isfinite(low) & torch.isfinite(high))


def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether finite values of ``source`` can be beyond the range of ``target``."""
    floats = source.is_floating_point and target.is_floating_point
    return floats and torch.finfo(target).max < torch.finfo(source).max


def check_cast(name: str, result: Tensor, values: Tensor) -> None:
    """UsageError if ``result``, a cast of ``values``, is not finite where these are."""
    if not narrows(values.dtype, result.dtype) or is_finite(result):
        return
    lost = torch.isfinite(values) & ~torch.isfinite(result)
    if lost.any():
        largest, dtype = float(values[lost].abs().max()), str(result.dtype).removeprefix("torch.")
        raise UsageError(
            f"{name} has {largest:.6g}, and the largest value of {dtype} is {torch.finfo(result.dtype).max:.6g}. "
            "Choose another dtype: bfloat16 or float32."
        )


def check_merge(name: str, result: Tensor, base: Tensor, adapter: object) -> None:
    """DataError if ``result``, ``base`` with an adapter merged into it, is not finite where the base is.

    ``base`` has the shape of the result, or one value.
    """
    if result is not base and not is_finite(result) and (torch.isfinite(base) & ~torch.isfinite(result)).any():
        raise DataError(
            f"{name} is not finite after {adapter} is merged into it: the adapter has NaN, infinity or values that "
            "are too large. Train it again, or use an earlier checkpoint of it."
        )
