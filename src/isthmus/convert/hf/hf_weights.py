"""The weights of a Hugging Face folder as its family names them, however the folder stores and names them itself."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.hf.dequantize import DequantizedWeights
from isthmus.convert.hf.pytorch_bin import BinWeights
from isthmus.convert.weight_source import TensorMeta, WeightSource
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tensors.quantization import quantization_of

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HfWeights:
    """Weights, the model that they and the config make, and what was decided about them, a line each, for the user."""

    source: WeightSource
    arch: Architecture
    said: tuple[str, ...]


def open_weights(folder: ModelFolder, family: Family, *, bin: bool = False) -> HfWeights:
    """Open the weights of a folder; whether they are those of the family is for ``check_coverage`` to say.

    Args:
        folder: the model.
        family: what the tensors are called.
        bin: read its ``pytorch_model*.bin`` instead of safetensors.

    Raises:
        UsageError: the weights are quantised in a way that is not read, or the model is not one that is built.
        MissingInput, DataError, UnsafeInput: files are absent, damaged, or would run code.
    """
    said: list[str] = []
    source: WeightSource = BinWeights(folder.path) if bin else folder
    if folder.quantization is not None:
        quantization, dtype = quantization_of(folder.quantization), named_dtype(folder.config, torch.bfloat16)
        source = dequantized = DequantizedWeights(source, quantization, dtype)
        if dequantized.num_dequantized:
            said.append(f"weights are {quantization}: dequantised to {str(dtype).removeprefix('torch.')}")
    completed = _completed(source, family, folder.config)
    if completed is not None:
        source = completed
        said.append(f"names of tensors lack '{completed.prefix}': taken as if they had it")
    return HfWeights(source, family.to_architecture(folder.config, source.tensors or None), tuple(said))


class PrefixedWeights:
    """Tensors of which the base model was saved alone, under the names that they have in the whole model."""

    def __init__(self, source: WeightSource, prefix: str, names: Container[str]) -> None:
        """Names among ``names`` that begin with ``prefix`` are those of the tensors without it."""
        self._source, self._names = source, names
        self.prefix = prefix
        self.tensors: dict[str, TensorMeta] = {
            prefix + name if prefix + name in names else name: meta for name, meta in source.tensors.items()
        }

    def __str__(self) -> str:
        """Where they come from, for messages."""
        return str(self._source)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """See :class:`~isthmus.convert.weight_source.WeightSource`."""
        return self._source.read(name.removeprefix(self.prefix) if name in self._names else name, index, into=into)


def _completed(source: WeightSource, family: Family, config: Mapping[str, Any]) -> PrefixedWeights | None:
    """The source with what the base model is called (``model.``) before its names, if all of the model is there so."""
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


def named_dtype(config: Mapping[str, Any], otherwise: torch.dtype) -> torch.dtype:
    """What a config says that the model computes in, which is what its weights were saved in or quantised from."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), otherwise)
