"""Damaged files are named, with the expected and the actual value."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.convert.canonical import unique_placements
from isthmus.convert.open_model import Format, open_model
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.errors import DataError, IsthmusError, MissingInput, UnsafeInput
from isthmus.files.checked_files import trusting
from isthmus.files.file_checksums import hash_file
from ranks.tiny import build_model_folder, without_checksums


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model_folder(tmp_path / "model", "llama", tie_word_embeddings=False, num_hidden_layers=1)


@pytest.fixture
def index(model: Path, tmp_path: Path) -> Path:
    """The index of a ``torch_dist`` checkpoint."""
    convert(model, tmp_path / "megatron")
    return without_checksums(tmp_path / "megatron") / "release" / ".metadata"


def flip(file: Path, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    file.write_bytes(raw)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    opened = open_model(folder)
    shapes = {
        name: placed.rule.canonical_shape(opened.arch)
        for name, placed in unique_placements(opened.family, opened.arch).items()
    }
    return {name: opened.weights.read(name, slice(0, shape[0])) for name, shape in shapes.items()}


@pytest.mark.slow_cases("torch_dist")
@pytest.mark.parametrize("to", ["hf", "torch_dist", "torch"])
def test_checksum_detects_one_flipped_bit(to: Format, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "copy", to)
    norm = all_tensors(model)["decoder.final_layernorm.weight"].numpy().tobytes()
    (file,) = (path for path in (tmp_path / "copy").rglob("*") if path.is_file() and norm in path.read_bytes())
    flip(file, 8 * file.read_bytes().index(norm))
    # A tiny file is one block, which the first tensor that is read fails.
    place = {"hf": ", in the header or .+,", "torch_dist": r", in [\w.]+,", "torch": ""}[to]
    message = rf"{file.name} is damaged: bytes 0 to \d+{place} do not match checksums\.json.*--trust"
    for read in (lambda: compare_models(model, tmp_path / "copy"), lambda: convert(tmp_path / "copy", tmp_path / "b")):
        with pytest.raises(DataError, match=message):
            read()
    with trusting():
        convert(tmp_path / "copy", tmp_path / "b")


@pytest.mark.slow
def test_flipped_bits_of_the_metadata_are_detected_or_harmless(index: Path) -> None:
    raw, full = index.read_bytes(), all_tensors(index.parents[1])
    refused = 0
    for bit in range(5, 8 * len(raw), len(raw) // 4):
        flip(index, bit)
        try:
            result = all_tensors(index.parents[1])
        except IsthmusError as error:
            assert error.exit_code in (65, 77)
            refused += 1
        else:
            assert result.keys() == full.keys()
            assert all(torch.equal(result[name], tensor) for name, tensor in full.items())
        index.write_bytes(raw)
    assert refused > 12


def entry(index: Any, suffix: str) -> Any:
    """The storage info of the tensor whose key has this suffix."""
    return next(info for index_, info in index.storage_data.items() if index_.fqn.endswith(suffix))


def _overlap(index: Any) -> None:
    entry(index, "linear_proj.weight").offset = entry(index, "linear_fc2.weight").offset + 8
    entry(index, "linear_proj.weight").relative_path = entry(index, "linear_fc2.weight").relative_path


def _gap(index: Any) -> None:
    (chunk,) = index.state_dict_metadata["embedding.word_embeddings.weight"].chunks
    object.__setattr__(chunk, "sizes", torch.Size((70, 32)))


def _twice(index: Any) -> None:
    chunks = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks
    chunks.append(chunks[0])


def _none(index: Any) -> None:
    index.state_dict_metadata["decoder.final_layernorm.weight"].chunks.clear()


def _outside(index: Any) -> None:
    (chunk,) = index.state_dict_metadata["decoder.final_layernorm.weight"].chunks
    object.__setattr__(chunk, "offsets", torch.Size((8,)))


def _huge(index: Any) -> None:
    """Tensor and chunk agree, as where they share their size in the pickle."""
    meta = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    meta.size = torch.Size((1 << 40, *meta.size[1:]))
    object.__setattr__(meta.chunks[0], "sizes", meta.size)


def _no_grid(index: Any) -> None:
    meta = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    meta.size = torch.Size((1 << 40,) * 3)
    meta.chunks = [
        type(meta.chunks[0])(torch.Size((number,) * 3), torch.Size((1 << 39,) * 3)) for number in range(3000)
    ]


def _no_dtype(index: Any) -> None:
    index.state_dict_metadata["embedding.word_embeddings.weight"].properties.dtype = "float"


def _no_properties(index: Any) -> None:
    del index.state_dict_metadata["embedding.word_embeddings.weight"].properties


@pytest.mark.slow_cases("_no_grid-the chunks of decoder.layers.mlp.linear_fc2.weight are no grid")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_overlap, r"__0_\d\.distcp: two tensors overlap, one ends at \d+, one starts at \d+"),
        (_gap, "the chunks of embedding.word_embeddings.weight have 2240 elements of 2464"),
        (_twice, "the chunks of decoder.layers.mlp.linear_fc2.weight have 3072 elements of 1536"),
        (_none, "the chunks of decoder.final_layernorm.weight have 0 elements of 32"),
        (_outside, "the chunks of decoder.final_layernorm.weight have 32 elements of 32"),
        (_huge, "a chunk of decoder.layers.mlp.linear_fc2.weight is in none of its files"),
        (_no_grid, "the chunks of decoder.layers.mlp.linear_fc2.weight are no grid"),
        (_no_dtype, "embedding.word_embeddings.weight is of type 'float'"),
        (_no_properties, "is not checkpoint metadata .*properties"),
    ],
)
def test_inconsistent_metadata_is_refused(change: Callable[[Any], None], message: str, index: Path) -> None:
    content = pickle.loads(index.read_bytes())
    change(content)
    index.write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=message):
        all_tensors(index.parents[1])


def test_truncated_file_is_named_with_both_sizes(index: Path) -> None:
    file = index.parent / "__0_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw[:-7])
    with pytest.raises(DataError, match=rf"__0_0\.distcp has {len(raw) - 7} bytes, {len(raw)} are needed"):
        all_tensors(index.parents[1])


@pytest.mark.slow_cases("torch_dist")
@pytest.mark.parametrize("to", ["hf", "torch_dist", "torch"])
def test_conversions_record_what_they_read(to: Format, model: Path, tmp_path: Path) -> None:
    """The same files have the same hashes, with and without checksums of their own."""

    def recorded(source: Path, name: str) -> dict[str, Any]:
        convert(source, tmp_path / name, "hf")
        record: dict[str, Any] = json.loads((tmp_path / name / "checksums.json").read_text())["about"]["read"]
        return record

    convert(model, tmp_path / "source", to)
    with_checksums = recorded(tmp_path / "source", "a")
    without = recorded(without_checksums(tmp_path / "source"), "b")
    assert with_checksums == without and len(with_checksums) == {"hf": 3, "torch_dist": 4, "torch": 3}[to]
    for name, file in without.items():
        path = tmp_path / "source" / name
        assert file == {"bytes": path.stat().st_size, "xxh3_64_of_blocks": hash_file(path).digest}


@pytest.mark.slow_cases("torch_dist")
@pytest.mark.parametrize("to", ["hf", "torch_dist", "torch"])
def test_no_damaged_place_is_silent(to: Format, model: Path, tmp_path: Path) -> None:
    """A small form of benchmarks/flips.py, which the campaign of 1,000 places runs with all commands."""
    convert(model, tmp_path / "copy", to)
    convert(tmp_path / "copy", tmp_path / "expected", "hf")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()}
    files = sorted(path for path in (tmp_path / "copy").rglob("*") if path.is_file())
    chance, refused = random.Random(3), 0
    for number in range(16):
        path = files[number % len(files)]
        sound = path.read_bytes()
        at = chance.randrange(len(sound))
        flipped = sound[:at] + bytes([sound[at] ^ 1 << chance.randrange(8)]) + sound[at + 1 :]
        path.write_bytes(flipped if number % 4 else sound[:at])
        try:
            convert(tmp_path / "copy", tmp_path / f"{number}", "hf")
            values = {path.name: path.read_bytes() for path in (tmp_path / f"{number}").iterdir()}
            assert values == expected, (path, at)
        except (DataError, UnsafeInput, MissingInput) as error:
            assert path.name in str(error) or path.parent.name in str(error)
            refused += 1
        path.write_bytes(sound)
    assert refused > 8
