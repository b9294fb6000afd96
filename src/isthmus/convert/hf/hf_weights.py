"""Opens the weights of a Hugging Face folder: safetensors or .bin, plain or quantized."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.hf.dequantize import DequantizedWeights
from isthmus.convert.hf.pytorch_bin import BinWeights
from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tensors.quantization import parse_quantization
from isthmus.hf.tensors.safetensors_format import TensorInfo

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class OpenedHfWeights:
    source: WeightSource
    arch: Architecture
    notes: tuple[str, ...]


def open_weights(folder: ModelFolder, family: Family, *, bin: bool = False) -> OpenedHfWeights:
    """Open the weights of a folder without checking them against the family (``check_coverage`` does that)."""
    notes: list[str] = []
    source: WeightSource = BinWeights(folder.path) if bin else folder
    if folder.quantization is not None:
        quantization, dtype = parse_quantization(folder.quantization), config_dtype(folder.config, torch.bfloat16)
        source = dequantized = DequantizedWeights(source, quantization, dtype)
        if dequantized.num_dequantized:
            notes.append(f"weights are {quantization}: dequantized to {str(dtype).removeprefix('torch.')}")
    prefixed = _add_prefix(source, family, folder.config)
    if prefixed is not None:
        source = prefixed
        notes.append(f"tensor names lack the prefix '{prefixed.prefix}', which is added")
    return OpenedHfWeights(source, family.to_architecture(folder.config, source.tensors or None), tuple(notes))


class PrefixedWeights:
    """Tensors of a separately saved base model, under their names in the whole model."""

    def __init__(self, source: WeightSource, prefix: str, names: Container[str]) -> None:
        """Add the prefix to tensors whose name with prefix is in ``names``."""
        self._source, self._names = source, names
        self.prefix = prefix
        self.tensors: dict[str, TensorSpec | TensorInfo] = {
            prefix + name if prefix + name in names else name: meta for name, meta in source.tensors.items()
        }

    def __str__(self) -> str:
        return str(self._source)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        return self._source.read(name.removeprefix(self.prefix) if name in self._names else name, index, into=into)


def _add_prefix(source: WeightSource, family: Family, config: Mapping[str, Any]) -> PrefixedWeights | None:
    """The source with the base model's prefix (``model.``), if all names lack it; else None."""
    rule = next(rule for rule in family.rules if rule.canonical == "embedding.word_embeddings.weight")
    embedding, present = rule.parts[0].name, source.tensors
    base, _, rest = embedding.partition(".")
    if embedding in present or rest not in present:
        return None
    prefix = f"{base}."
    expected = family.hf_shapes(family.to_architecture(config, {*present, *(prefix + name for name in present)}))
    if any(name in present for name in expected if name.startswith(prefix)):
        return None
    if any(name.removeprefix(prefix) not in present for name in expected):
        return None
    return PrefixedWeights(source, prefix, expected)


def config_dtype(config: Mapping[str, Any], default: torch.dtype) -> torch.dtype:
    """The dtype of the saved weights, or before quantization."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), default)
