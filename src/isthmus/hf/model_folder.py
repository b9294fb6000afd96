"""A Hugging Face model folder, opened without loading weights: config, tensor locations, other files."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any

from torch import Tensor

from isthmus.errors import DataError, MissingInput, UnsafeInput
from isthmus.files import input_files
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.folder_links import check_links, is_within
from isthmus.hf.published_checksums import check_published
from isthmus.hf.tensors.safetensors_format import INDEX_FILE, SINGLE_FILE, TensorInfo, TensorReader, read_header

GENERATION_FILE = "generation_config.json"
ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""In a folder of PEFT, which has LoRA weights and no model."""
_QUANTIZATION, _TEXT = "quantization_config", "text_config"
_AUTO_MAP, TOKENIZER_CONFIG = "auto_map", "tokenizer_config.json"
_MAX_NAME = 255
"""Bytes of a file name."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER_FILES = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.jinja"),
)
SMALL_FILES = (*_TOKENIZER_FILES, "*processor_config.json", GENERATION_FILE, "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Patterns of a model's files other than config and weights."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


class ModelFolder:
    """A model folder; tensors are read in slices from its safetensors files."""

    def __init__(self, path: Path, config: dict[str, Any], *, without_weights: bool = False) -> None:
        self.path = path
        self._without_weights = without_weights
        self.config: dict[str, Any] = {key: value for key, value in config.items() if key != _QUANTIZATION}
        """``config.json`` without ``quantization_config``."""
        self.quantization: dict[str, Any] | None = config.get(_QUANTIZATION)
        """None if the weights are not quantized."""
        if isinstance(text := config.get(_TEXT), dict) and _QUANTIZATION in text:  # of a multimodal model
            self.config[_TEXT] = {key: value for key, value in text.items() if key != _QUANTIZATION}
            self.quantization = self.quantization or text[_QUANTIZATION]
        self._verifier = ChecksumVerifier()
        self._reader = TensorReader(self._verifier)

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFolder:
        """Open the folder at ``path``, with or without weights."""
        folder = Path(path)
        if not folder.is_dir():
            raise MissingInput(f"{folder} is not a folder. Give the folder of a Hugging Face model.")
        if (folder / ADAPTER_FILE).is_file() and not (folder / "config.json").is_file():
            raise MissingInput(_adapter_message(folder))
        if not (folder / "config.json").is_file():
            raise MissingInput(f"{folder} has no config.json. Give the folder of a Hugging Face model.")
        check_small_files(folder)
        return cls(folder, read_json(folder / "config.json"))

    @classmethod
    def from_config(cls, name: str | os.PathLike[str], config: Mapping[str, Any]) -> ModelFolder:
        """A model without weights: ``name`` is its folder, if it has one, or a name for messages."""
        return cls(Path(name), {**config, _QUANTIZATION: None}, without_weights=True)

    def with_config(self, config: Mapping[str, Any]) -> ModelFolder:
        """The same weights under another config."""
        return ModelFolder(self.path, {**config, _QUANTIZATION: self.quantization})

    @property
    def has_weights(self) -> bool:
        """Whether there are safetensors weights; ``.bin`` files are not read."""
        return not self._without_weights and any((self.path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name, in the order of the files; empty without weights."""
        if not self.has_weights:
            return {}
        # transformers also looks for the single file first.
        if (self.path / SINGLE_FILE).is_file():
            return read_header(self.path / SINGLE_FILE, self._verifier)
        return self._read_index()

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """Read a slice of one tensor, see :meth:`isthmus.hf.tensors.safetensors_format.TensorReader.read`."""
        return self._reader.read(self.tensors[name], index, into=into, name=name)

    def check_published(self, *, bin: bool = False, share: int = 0, shares: int = 1) -> str | None:
        """Check weights (``bin``: those in ``.bin`` files) and small files.

        See :func:`isthmus.hf.published_checksums.check_published`.
        """
        if self._without_weights:
            return None
        weights = {*self.path.glob("*.bin")} if bin else {info.file for info in self.tensors.values()}
        weights |= {path for path in (self.path / INDEX_FILE, self.path / "config.json") if path.is_file()}
        return check_published(self.path, weights | {*self.small_files()}, share=share, shares=shares)

    def small_files(self) -> list[Path]:
        """Tokenizer, chat template, processor, generation config and license: what an export copies unchanged."""
        return _files_of(self.path, SMALL_FILES)

    def code_files(self) -> list[Path]:
        """Modelling files that published models bring if transformers has no class of theirs."""
        return _files_of(self.path, ("*.py",))

    def end_tokens(self) -> set[int]:
        """The ``eos_token_id`` of ``generation_config.json``, or of the config without such a file."""
        path = self.path / GENERATION_FILE
        text = self.config.get(_TEXT)
        config = {**text, **self.config} if isinstance(text, dict) else self.config
        value = (read_json(path) if path.is_file() else config).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in listed):
            raise DataError(f"{path}: eos_token_id must be a number or a list of numbers, got {value!r:.60}.")
        return set(listed)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._reader.close()

    def __enter__(self) -> ModelFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_index(self) -> dict[str, TensorInfo]:
        index = self.path / INDEX_FILE
        weight_map = read_weight_map(index)
        tensors: dict[str, TensorInfo] = {}
        for file in dict.fromkeys(weight_map.values()):
            header = read_header(self.path / file, self._verifier)
            if duplicates := tensors.keys() & header.keys():
                raise DataError(
                    f"{self.path / file} contains {min(duplicates)}, which another file also contains. "
                    "Download the model again."
                )
            tensors |= header
        for name, file in weight_map.items():
            if name not in tensors or tensors[name].file != self.path / file:
                raise DataError(f"{index} maps {name} to {file}, which does not contain it. Download the model again.")
        return tensors


def read_weight_map(index: Path) -> dict[str, str]:
    """Map tensor names to the files next to an index; UnsafeInput for a file outside the folder, also by a link."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DataError(f"{index} has no weight_map of tensor names to file names. Download it again.")
    for file in dict.fromkeys(weight_map.values()):
        windows_path = PureWindowsPath(file)  # accepts both separators, and drives
        if windows_path.drive or windows_path.root or ".." in windows_path.parts or "\0" in file:
            raise UnsafeInput(f"{index} refers to {file!r}, which is outside the folder. Do not use this model.")
        if len(file.encode("utf-8", "replace")) > _MAX_NAME or not (index.parent / file).is_file():
            raise DataError(f"{index} refers to {file:.100}, which does not exist. Download the missing file.")
        if not is_within(index.parent, (index.parent / file).resolve()):
            raise UnsafeInput(
                f"{index} refers to {file!r}, a link to a file outside the folder. "
                "If you trust it, replace the link with the file."
            )
    return weight_map


def check_small_files(folder: Path) -> None:
    """Check that the files without weights in the folder's ``checksums.json`` exist, and their content; also all links.

    Weights are checked when they are read: a copy without them is a tokenizer, or the config of a new model.

    Raises:
        DataError: a file differs, is missing, or the list is damaged.
        UnsafeInput: the list is hostile, or a link leads out of the folder.
        IOFailure: reading failed.
    """
    check_links(folder)
    ChecksumVerifier().check_folder(folder, only=lambda name: not _is_among(name, _WEIGHTS))


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of the tokenizer and its chat template; empty if the folder does not exist."""
    return _files_of(folder, _TOKENIZER_FILES)


def write_model_files(
    folder: Path, source: ModelFolder | None, hf_config: Mapping[str, Any], tokenizer: Sequence[Path] | None = None
) -> None:
    """Write ``config.json`` into ``folder`` and copy the small files of ``source`` unchanged.

    With ``tokenizer``, these files replace the tokenizer files of the source, and ``generation_config.json`` gets the
    token ids of the config. If the source has no ``generation_config.json``, one is written with these ids, since later
    versions of transformers do not read them from the config. A config with ``auto_map`` gets the modelling files that
    it names, of Isthmus or of the source, and loses the key without them. A tokenizer with code keeps it.
    """
    code = _code_files(hf_config, source)
    if code is None:
        hf_config = {key: value for key, value in hf_config.items() if key != _AUTO_MAP}
    write_json(folder / "config.json", hf_config)
    generation = {key: hf_config[key] for key in SPECIAL_TOKENS if hf_config.get(key) is not None}
    if generation:
        write_json(folder / GENERATION_FILE, generation)
    copied = source.small_files() if source else []
    if tokenizer is not None:
        copied = [path for path in copied if not _matches(path.name, _TOKENIZER_FILES)] + [*tokenizer]
    copied += [file for path in copied if path.name == TOKENIZER_CONFIG for file in _tokenizer_code(path)]
    for path in (*copied, *(code or ())):
        shutil.copyfile(path, folder / path.name)
    if tokenizer is not None and any(path.name == GENERATION_FILE for path in copied):
        other_settings = {
            key: value for key, value in read_json(folder / GENERATION_FILE).items() if key not in SPECIAL_TOKENS
        }
        write_json(folder / GENERATION_FILE, other_settings | generation)


def _code_files(hf_config: Mapping[str, Any], source: ModelFolder | None) -> list[Path] | None:
    """The Python files that the ``auto_map`` of a config needs; None if it names files that the source lacks."""
    if (auto_map := hf_config.get(_AUTO_MAP)) is None:
        return []
    if not isinstance(auto_map, Mapping):
        raise DataError(f"config.json: {_AUTO_MAP} must be an object, got {auto_map!r:.60}. Correct it.")
    names = [name for value in auto_map.values() for name in (value if isinstance(value, list) else [value])]
    # A reference to another repository, REPO--MODULE.CLASS, needs no file.
    needed = {f"{name.partition('.')[0]}.py" for name in names if isinstance(name, str) and "--" not in name}
    shim_files = modeling_files()
    if needed <= {path.name for path in shim_files}:
        return shim_files
    source_files = [] if source is None else source.code_files()
    return source_files if needed <= {path.name for path in source_files} else None


def _tokenizer_code(config: Path) -> list[Path]:
    return _files_of(config.parent, ("*.py",)) if _AUTO_MAP in read_json(config) else []


def modeling_files() -> list[Path]:
    """The modelling files of an export that transformers has no class for."""
    return sorted(path for path in (Path(__file__).parent / "shim").glob("*.py") if path.name != "__init__.py")


def _adapter_message(folder: Path) -> str:
    base = read_json(folder / ADAPTER_FILE).get("base_model_name_or_path") or "BASE"
    merged = folder.with_name(f"{folder.resolve().name}-merged")
    return (
        f"{folder} is a LoRA adapter of PEFT for {base} and not a model. Merge it into its base model, then use "
        f"{merged}: isthmus merge {base} {folder} {merged}"
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _files_of(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and _matches(path.name, patterns))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return _is_among(name, patterns) and not _is_among(name, _WEIGHTS)


def _is_among(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def read_json(path: Path) -> dict[str, Any]:
    # transformers writes the default model_max_length of a tokenizer, 1e30, as an integer.
    value = input_files.read_json(path, most_digits=31 if path.name == TOKENIZER_CONFIG else input_files.DIGITS)
    if not isinstance(value, dict):
        raise DataError(f"{path} must be a JSON object, got {type(value).__name__}.")
    return value


def has_class(name: str) -> bool:
    """Whether transformers has a model class of this name."""
    import transformers  # a slow import

    return hasattr(transformers, name)
