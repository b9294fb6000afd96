"""Opens the weights of a Hugging Face folder: safetensors or .bin, plain or quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.hf.dequantize import DequantizedWeights
from isthmus.convert.hf.other_forms import other_names, recut_rows, split_experts, transposed_experts
from isthmus.convert.torch_pickle import StridedTensor, read_torch_pickle
from isthmus.convert.weight_source import DerivedWeights, Index, TensorSpec, WeightSource, WithScoreHead
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.model_folder import ModelFolder, read_weight_map
from isthmus.hf.tensors.quantization import parse_quantization
from isthmus.hf.tensors.safetensors_format import TensorInfo, TensorReader

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BIN_FILE = "pytorch_model.bin"
_BIN_INDEX = "pytorch_model.bin.index.json"


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
    if family.nested is not None:
        names = family.nested.renamed(source.tensors)
        if other := next((name for name, new in names.items() if name != new), None):
            source = RenamedWeights(source, names)
            notes.append(f"tensor names of another program are replaced, such as {other} by {names[other]}")
    elif (prefixed := _add_prefix(source, family, folder.config)) is not None:
        prefix, names = prefixed
        source = RenamedWeights(source, names)
        notes.append(f"tensor names lack the prefix '{prefix}', which is added")
    if names := other_names(source, family, folder.config):
        old, new = next(iter(names.items()))
        source = RenamedWeights(source, names)
        notes.append(f"tensor names differ from those of published models, such as {old}, which is {new}")
    if (split := split_experts(source, family)) is not None:
        source = split
        notes.append("the file has one tensor for all experts of a layer: an export has one for each, as transformers")
    arch = family.to_architecture(folder.config, source.tensors or None)
    if (recut := recut_rows(source, family, arch)) is not None:
        source = recut
        notes.append("convolutions are cut into thirds of their rows, as transformers does: an export has them whole")
    if (transposed := transposed_experts(source, family, arch)) is not None:
        source = transposed
        notes.append("the file has experts as [outputs, inputs]: an export has [inputs, outputs], as published files")
    if family.nested is None and (passed := len(family.copied_tensors(source.tensors))):
        patterns = family.passed_through or (f"of layers with {family.passed_layers}",)
        notes.append(
            f"{passed} tensors of MTP layers ({', '.join(patterns)}) are not computed or trained; exports "
            "have them unchanged"
        )
    return OpenedHfWeights(source, arch, tuple(notes))


def with_score_head(opened: OpenedHfWeights, family: Family, seed: int) -> OpenedHfWeights:
    """The weights of a language model as those of a reward model, whose score head is random.

    A UsageError for a multimodal model.
    """
    if family.nested is not None:
        text = family.nested.model_type
        raise UsageError(
            f"{opened.source} is multimodal ({family.name}), and a reward model is a language model. Convert its "
            f"language model first: isthmus convert {opened.source} DIR --to hf --hf-family {text}"
        )
    arch = opened.arch.with_settings({"score_head": True, "tie_embeddings": False})
    if not opened.source.tensors:  # random weights
        return replace(opened, arch=arch)
    return replace(opened, source=WithScoreHead(opened.source, family, arch, seed), arch=arch)


class RenamedWeights(DerivedWeights):
    """Tensors under other names than in their files."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        """``names`` has the new names of tensors of ``source``; others keep theirs."""
        super().__init__(source, {old: {new: source.tensors[old]} for old, new in names.items()})
        self._old = {new: old for old, new in names.items()}

    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
        return self._source.read(self._old[name], index, into=into)


def _add_prefix(source: WeightSource, family: Family, config: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """The base model's prefix (``model.``), if all names lack it, and the names with it; else None."""
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
    return prefix, {name: prefix + name if prefix + name in expected else name for name in present}


def config_dtype(config: Mapping[str, Any], default: torch.dtype) -> torch.dtype:
    """The dtype of the saved weights, or before quantization."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), default)


def has_bin(folder: Path) -> bool:
    return (folder / _BIN_FILE).is_file() or (folder / _BIN_INDEX).is_file()


class BinWeights:
    """Tensors of ``.bin`` files, read slice by slice; tied tensors share their bytes in the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = TensorReader()
        if not has_bin(folder):
            raise MissingInput(f"{folder} has no {_BIN_FILE}. Omit --bin, or give the folder that has it.")
        single = (folder / _BIN_FILE).is_file()
        self._infos = _open_bin(folder / _BIN_FILE) if single else {}
        weight_map = {} if single else read_weight_map(folder / _BIN_INDEX)
        for file in dict.fromkeys(weight_map.values()):
            infos = _open_bin(folder / file)
            if twice := infos.keys() & self._infos.keys():
                raise DataError(f"{folder / file} has {min(twice)}, which another file has too.")
            if absent := [name for name, where in weight_map.items() if where == file and name not in infos]:
                raise DataError(f"{folder / _BIN_INDEX} places {absent[0]} in {file}, which does not have it.")
            self._infos |= infos
        self.tensors: dict[str, TensorSpec] = {
            name: TensorSpec(info.span.dtype if isinstance(info, StridedTensor) else info.dtype, info.shape)
            for name, info in self._infos.items()
        }

    def __str__(self) -> str:
        return str(self._folder)

    def read(self, name: str, index: Index | None = None, *, into: Tensor | None = None) -> Tensor:
        info = self._infos[name]
        if isinstance(info, TensorInfo):
            return self._reader.read(info, index, into=into, name=name)
        part = self._reader.read(info.span, name=name).as_strided(info.shape, info.strides)[index or ...]
        return part.contiguous() if into is None else into.detach().copy_(part)


def _open_bin(path: Path) -> dict[str, TensorInfo | StridedTensor]:
    tensors: Any = read_torch_pickle(path, strided=True)
    if not isinstance(tensors, dict) or not all(
        isinstance(value, TensorInfo | StridedTensor) for value in tensors.values()
    ):
        raise DataError(f"{path} has content that is not tensors by name. Give the file of a model's weights.")
    return tensors
