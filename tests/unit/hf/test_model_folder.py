"""Model folders: what is read is what safetensors reads, and what is damaged is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.errors import DataError, MissingInput, UnsafeInput
from isthmus.files.file_checksums import write_checksums
from isthmus.hf.model_folder import ModelFolder, write_model_files
from isthmus.hf.tensors.safetensors_format import CastBuffer, TensorInfo

TENSORS = {
    "a.weight": torch.randn(7, 5, dtype=torch.float32),
    "b.weight": torch.randn(6, 4).bfloat16(),
    "c.bias": torch.arange(9, dtype=torch.float16),
    "d.cube": torch.randn(3, 4, 5).bfloat16(),
    "e.scalar": torch.tensor(3.5),
    "f.empty": torch.empty(0, 4),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def shard(folder: Path, weight_map: dict[str, str] | None = None) -> None:
    (folder / "model.safetensors").unlink()
    placed = {"model-1.safetensors": ["a.weight", "c.bias"], "model-2.safetensors": ["b.weight"]}
    for file, names in placed.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    weight_map = weight_map or {name: file for file, names in placed.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_whole_tensors_and_slices(model: Path) -> None:
    with ModelFolder.open(model) as opened:
        assert opened.has_weights
        assert opened.config == {"model_type": "llama"}
        assert opened.tensors.keys() == load_file(model / "model.safetensors").keys()
        for name, tensor in TENSORS.items():
            assert opened.tensors[name].dtype == tensor.dtype
            assert opened.tensors[name].shape == tuple(tensor.shape)
            assert torch.equal(opened.read(name), tensor)
        for name, index in [
            ("a.weight", (slice(2, 5),)),
            ("a.weight", (slice(0, 7), slice(1, 3))),
            ("b.weight", (slice(3, 3), slice(0, 4))),
            ("c.bias", (slice(4, None),)),
            ("d.cube", (slice(1, 3), slice(2, 4), slice(0, 5))),
            ("d.cube", (slice(1, 3), slice(0, 4), slice(2, 4))),
        ]:
            assert torch.equal(opened.read(name, index), TENSORS[name][index])


@pytest.mark.parametrize("buffer_bytes", [1, 24, 1 << 20])
def test_reading_into_casts_and_strides(model: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(CastBuffer, "limit_bytes", buffer_bytes)
    opened = ModelFolder.open(model)
    cast = torch.zeros(6, 4, dtype=torch.float64)
    assert opened.read("b.weight", into=cast).data_ptr() == cast.data_ptr()
    assert torch.equal(cast, TENSORS["b.weight"].double())
    wide = torch.zeros(7, 9)
    opened.read("a.weight", (slice(0, 7), slice(1, 4)), into=wide[:, 2:5])
    assert torch.equal(wide[:, 2:5], TENSORS["a.weight"][:, 1:4])
    assert not wide[:, 5:].any()
    parameter = torch.nn.Parameter(torch.zeros(7, 5))
    opened.read("a.weight", into=parameter)
    assert torch.equal(parameter, TENSORS["a.weight"])
    with pytest.raises(ValueError, match="does not fit"):
        opened.read("a.weight", into=torch.zeros(7, 4))
    with pytest.raises(IndexError):
        opened.read("a.weight", (slice(0, 8),))


def test_shards_in_file_order(model: Path) -> None:
    shard(model)
    opened = ModelFolder.open(model)
    assert list(opened.tensors) == ["a.weight", "c.bias", "b.weight"]
    assert torch.equal(opened.read("b.weight"), TENSORS["b.weight"])


def test_missing_folder_config_and_weights(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="nowhere is not a folder"):
        ModelFolder.open(tmp_path / "nowhere")
    with pytest.raises(MissingInput, match=r"has no config\.json"):
        ModelFolder.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    opened = ModelFolder.open(tmp_path)
    assert not opened.has_weights
    assert opened.tensors == {}


@pytest.mark.parametrize("text", ["{", "[1]", "\x00\xff"])
def test_config_must_be_an_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"config\.json"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("keep", [5, 8, 200, -1])
def test_truncated_file_is_reported_with_its_sizes(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    with pytest.raises(DataError, match=rf"model\.safetensors .*\b{keep % len(raw)}\b") as caught:
        _ = ModelFolder.open(model).tensors
    if keep == -1:
        assert f"truncated: expected {len(raw)} bytes, the file has {len(raw) - 1}" in str(caught.value)


def forge(header: str | bytes, body: int = 8) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + bytes(body)


@pytest.mark.parametrize(
    "raw",
    [
        (1 << 60).to_bytes(8, "little") + b"{}",
        forge("[]"),
        forge(b"\xff\xfe"),
        forge("[" * 100_000),
        forge('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'),
        forge('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}', 12),
        forge('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 9),
        forge('{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}'),
        forge('{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}'),
        forge('{"a": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}'),
        forge('{"a": {"dtype": "F32", "shape": [2]}}'),
        forge('{"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}'),
        forge('{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "a": {}}'),
        forge(
            '{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},'
            ' "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}'
        ),
    ],
)
def test_malformed_headers(model: Path, raw: bytes) -> None:
    (model / "model.safetensors").write_bytes(raw)
    with pytest.raises(DataError, match=r"model\.safetensors"):
        _ = ModelFolder.open(model).tensors


@pytest.mark.parametrize(
    ("weight_map", "error", "message"),
    [
        ({"a.weight": "model-9.safetensors"}, DataError, r"refers to model-9\.safetensors, which does not exist"),
        ({"b.weight": "model-1.safetensors"}, DataError, "maps b.weight to model-1.safetensors, which does not"),
        ({"a.weight": "../model-1.safetensors"}, UnsafeInput, "outside the folder"),
        ({"a.weight": "/etc/passwd"}, UnsafeInput, "outside the folder"),
        ({"a.weight": "C:model"}, UnsafeInput, "outside the folder"),
        ({"a.weight": "..\\model"}, UnsafeInput, "outside the folder"),
        ({"a.weight": 3}, DataError, "weight_map"),
    ],
)
def test_wrong_index(model: Path, weight_map: dict[str, str], error: type[Exception], message: str) -> None:
    shard(model, weight_map)
    with pytest.raises(error, match=message):
        _ = ModelFolder.open(model).tensors


def test_link_to_a_file_outside_the_folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shard(model)
    away = tmp_path_factory.mktemp("away")
    (model / "model-1.safetensors").rename(away / "real.safetensors")
    (model / "model-1.safetensors").symlink_to(away / "real.safetensors")
    with pytest.raises(
        UnsafeInput, match=r"model-1\.safetensors is a link to .*real.safetensors, a file outside the folder.*replace"
    ):
        _ = ModelFolder.open(model).tensors
    (model / "model-1.safetensors").unlink()
    (away / "real.safetensors").rename(model / "real.safetensors")
    (model / "model-1.safetensors").symlink_to("real.safetensors")
    assert torch.equal(ModelFolder.open(model).read("a.weight"), TENSORS["a.weight"])


def test_links_of_the_hub_cache(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shard(model)
    cache = tmp_path_factory.mktemp("models--some--model")
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in list(model.iterdir()):
        path.rename(blobs / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{path.name}-hash")
    assert torch.equal(ModelFolder.open(snapshot).read("b.weight"), TENSORS["b.weight"])
    (blobs / "model-2.safetensors-hash").rename(cache / "elsewhere")
    (snapshot / "model-2.safetensors").unlink()
    (snapshot / "model-2.safetensors").symlink_to("../../elsewhere")
    with pytest.raises(UnsafeInput, match=r"is a link to \.\./\.\./elsewhere, a file outside the folder"):
        _ = ModelFolder.open(snapshot).tensors


def test_config_has_no_quantization_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}')
    opened = ModelFolder.open(model)
    assert (opened.config, opened.quantization) == ({"model_type": "llama"}, {"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (((0, 8), (4, 8)), "b has 4 bytes and must start at byte 8, but its data_offsets are 4 to 8"),
        (((0, 8), (9, 13)), "b has 4 bytes and must start at byte 8, but its data_offsets are 9 to 13"),
        (((0, 8), (8, 13)), "b has 4 bytes and must start at byte 8, but its data_offsets are 8 to 13"),
        (((0, 4), (4, 8)), "a has 8 bytes and must start at byte 0, but its data_offsets are 0 to 4"),
    ],
    ids=["overlap", "gap", "too-long", "too-short"],
)
def test_gaps_and_overlaps_of_tensors(model: Path, offsets: tuple[tuple[int, int], ...], message: str) -> None:
    sizes = {"a": 8, "b": 4}
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": place}
        for (name, size), place in zip(sizes.items(), offsets, strict=True)
    }
    (model / "model.safetensors").write_bytes(forge(json.dumps(header), offsets[-1][1]))
    with pytest.raises(DataError, match=message):
        _ = ModelFolder.open(model).tensors


@pytest.mark.slow
def test_flipped_header_bits_are_detected_or_change_a_name(model: Path) -> None:
    """A name is for whoever knows the model to refuse; types, sizes and places have to agree with each other."""
    # An empty tensor has no bytes that its shape could contradict.
    save_file({name: tensor for name, tensor in TENSORS.items() if tensor.numel()}, model / "model.safetensors")
    raw = (model / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    intact = ModelFolder.open(model).tensors

    def places(tensors: dict[str, TensorInfo]) -> list[tuple[torch.dtype, tuple[int, ...], int]]:
        return [(info.dtype, info.shape, info.offset) for info in tensors.values()]

    for bit in range(0, 8 * length, 3):
        flipped = bytearray(raw[:length])
        flipped[bit // 8] ^= 1 << bit % 8
        (model / "model.safetensors").write_bytes(bytes(flipped) + raw[length:])
        try:
            damaged = ModelFolder.open(model).tensors
        except DataError as error:
            assert "model.safetensors" in str(error)
        else:
            assert places(damaged) == places(intact)


def test_the_small_files_of_a_checked_folder_can_be_used_without_weights(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = shutil.copytree(model, tmp_path_factory.mktemp("copy") / "model")
    write_checksums(copy)
    for path in copy.glob("*.safetensors"):
        path.unlink()
    assert not ModelFolder.open(copy).has_weights
    (copy / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"config.json has 2 bytes; checksums.json lists it with \d+ bytes"):
        ModelFolder.open(copy)


def test_only_small_files_are_copied(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = ["LICENSE", "chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.json"]
    expected += ["tokenizer.model", "vocab.json"]
    for name in [*expected, "README.md", "pytorch_model.bin", "training_args.bin", "other.json", "tokenizer.pt"]:
        (model / name).write_text(name)
    (model / "tokenizer").mkdir()
    opened = ModelFolder.open(model)
    assert [path.name for path in opened.small_files()] == expected
    target = tmp_path_factory.mktemp("export")
    write_model_files(target, opened, {"b": 1, "a": "é"})
    assert sorted(path.name for path in target.iterdir()) == sorted([*expected, "config.json"])
    assert (target / "merges.txt").read_bytes() == b"merges.txt"
    assert (target / "config.json").read_text(encoding="utf-8") == '{\n  "a": "é",\n  "b": 1\n}\n'
