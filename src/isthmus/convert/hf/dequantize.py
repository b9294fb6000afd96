"""Dequantizes weights slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.convert.coverage import describe_problems
from isthmus.convert.weight_source import DerivedWeights, Index, TensorSpec, WeightSource
from isthmus.errors import DataError
from isthmus.hf.tensors.finite import is_finite
from isthmus.hf.tensors.quantization import Quantization
from isthmus.hf.tensors.safetensors_format import Bounds, bounds_of, steps_of

_TILE_VALUES = 1 << 18
"""Values dequantized at a time, to bound memory."""


class DequantizedWeights(DerivedWeights):
    """A source with values in place of codes and scales; other tensors are unchanged."""

    def __init__(self, source: WeightSource, quantization: Quantization, dtype: torch.dtype) -> None:
        """Match codes with scales, both of which must be complete; values have ``dtype``."""
        self._quantization = quantization
        self._codes: dict[str, str] = {}  # name of the values -> name of the codes
        made: dict[str, dict[str, TensorSpec]] = {}
        missing, misshapen = [], []
        for codes_name, meta in source.tensors.items():
            if meta.dtype != quantization.codes_dtype or not codes_name.endswith(quantization.codes_suffix):
                continue
            name = codes_name.removesuffix(quantization.codes_suffix)
            scale_name = name + quantization.scales_suffix
            scale = source.tensors.get(scale_name)
            if scale is None:
                missing.append(scale_name)
            elif not quantization.matches(meta.shape, scale.shape, scale.dtype):
                misshapen.append(f"{scale_name} is {list(scale.shape)} for {list(meta.shape)}")
            else:
                self._codes[name] = codes_name
                made |= {codes_name: {name: TensorSpec(dtype, quantization.shape(meta.shape))}, scale_name: {}}
        if problems := describe_problems(missing=missing, misshapen=misshapen):
            raise DataError(f"{source} is not {quantization} as in config.json: {problems}. Fetch the whole model.")
        super().__init__(source, made)

    @property
    def num_dequantized(self) -> int:
        return len(self._codes)

    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
        """Reads only the codes and scales of the slice."""
        meta = self.tensors[name]
        bounds, steps = bounds_of(meta.shape, index), steps_of(index)
        if steps is not None:
            around = self.read(name, tuple(slice(*pair) for pair in bounds))[steps]
            return around if into is None else into.detach().copy_(around)
        shape = tuple(stop - start for start, stop in bounds)
        target = torch.empty(shape, dtype=meta.dtype) if into is None else into.detach()
        if tuple(target.shape) != shape:
            raise ValueError(f"{name}: a slice of shape {shape} does not fit into {tuple(target.shape)}")
        names = self._codes[name], name + self._quantization.scales_suffix
        for tile in _tiles(bounds, self._quantization.split_axis):
            indices = self._quantization.source_indices(tile)
            codes, scales = (self._source.read(*pair) for pair in zip(names, indices, strict=True))
            at = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(tile, bounds, strict=True))
            # Round first, so that values do not depend on the target's dtype.
            values = self._quantization.dequantize(codes, scales, tile).to(meta.dtype)
            if not is_finite(values) and is_finite(codes) and is_finite(scales):
                raise DataError(
                    f"{name} has values beyond the range of {str(meta.dtype).removeprefix('torch.')}: "
                    f"{names[1]} is too large. Was it changed? Fetch the whole model."
                )
            target[at].copy_(values)
        return target


def _tiles(bounds: Bounds, axis: int) -> Iterator[Bounds]:
    """Split a slice into matrices, and each matrix along ``axis``."""
    if len(bounds) > 2:
        (first, last), *rest = bounds
        yield from (((at, at + 1), *tile) for at in range(first, last) for tile in _tiles(tuple(rest), axis))
        return
    start, stop = bounds[axis]
    values = math.prod(high - low for low, high in bounds)
    step = max(1, _TILE_VALUES * (stop - start) // max(1, values))
    for low in range(start, stop, step):
        tile = list(bounds)
        tile[axis] = (low, min(stop, low + step))
        yield tuple(tile)
