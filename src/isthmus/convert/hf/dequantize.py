"""Weights that are stored quantised, presented as the plain tensors that they stand for, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.convert.coverage import told
from isthmus.convert.weight_source import Meta, TensorMeta, WeightSource
from isthmus.errors import DataError
from isthmus.hf.tensors.quantization import Quantization
from isthmus.hf.tensors.safetensors_format import Bounds, bounds_of, steps_of

_TILE_VALUES = 1 << 18
"""So many values are dequantised at a time, which is what bounds the memory that it takes."""


class DequantizedWeights:
    """The tensors of a source with codes and scales replaced by values; all others are as they were."""

    def __init__(self, source: WeightSource, quantization: Quantization, dtype: torch.dtype) -> None:
        """Find what belongs together; the values are presented in ``dtype``.

        Raises:
            DataError: scales are missing, or of a shape that does not fit their codes.
        """
        self._source, self._quantization = source, quantization
        self._codes: dict[str, str] = {}
        self.tensors: dict[str, TensorMeta] = {}
        scales: set[str] = set()
        missing, misshapen = [], []
        for stored, meta in source.tensors.items():
            if meta.dtype != quantization.codes_dtype or not stored.endswith(quantization.codes_suffix):
                self.tensors[stored] = meta
                continue
            name = stored.removesuffix(quantization.codes_suffix)
            scale = source.tensors.get(name + quantization.scales_suffix)
            if scale is None:
                missing.append(name + quantization.scales_suffix)
            elif not quantization.fits(meta.shape, scale.shape, scale.dtype):
                misshapen.append(f"{name + quantization.scales_suffix} is {list(scale.shape)} for {list(meta.shape)}")
            else:
                self._codes[name] = stored
                self.tensors[name] = Meta(dtype, quantization.shape(meta.shape))
                scales.add(name + quantization.scales_suffix)
        if faults := told(missing=missing, misshapen=misshapen):
            raise DataError(f"{source} is not {quantization}, as config.json says: {faults}. Fetch the whole model.")
        for name in scales:
            del self.tensors[name]

    def __str__(self) -> str:
        """Where they come from, for messages."""
        return str(self._source)

    @property
    def num_dequantized(self) -> int:
        """How many of the tensors are stored in codes."""
        return len(self._codes)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """See :class:`~isthmus.convert.weight_source.WeightSource`; only the codes and scales of the slice are read."""
        if name not in self._codes:
            return self._source.read(name, index, into=into)
        meta = self.tensors[name]
        bounds, steps = bounds_of(meta.shape, index), steps_of(index)
        if steps is not None:
            around = self.read(name, tuple(slice(*pair) for pair in bounds))[steps]
            return around if into is None else into.detach().copy_(around)
        shape = tuple(stop - start for start, stop in bounds)
        target = torch.empty(shape, dtype=meta.dtype) if into is None else into.detach()
        if tuple(target.shape) != shape:
            raise ValueError(f"{name}: a slice of shape {shape} does not fit into {tuple(target.shape)}")
        stored = self._codes[name], name + self._quantization.scales_suffix
        for tile in _tiles(bounds, self._quantization.cut_axis):
            places = self._quantization.places(tile)
            codes, scales = (self._source.read(*place) for place in zip(stored, places, strict=True))
            here = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(tile, bounds, strict=True))
            # Rounded first: the numbers are the same wherever they go.
            target[here].copy_(self._quantization.values(codes, scales, tile).to(meta.dtype))
        return target


def _tiles(bounds: Bounds, axis: int) -> Iterator[Bounds]:
    """Cut a slice along its first dimension if it is one of matrices, and each of them along ``axis``."""
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
