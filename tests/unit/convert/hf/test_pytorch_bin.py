"""``pytorch_model*.bin``: read only when asked, whole or in shards, of old and new torch; nothing of them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isthmus.cli.main import main
from isthmus.convert.hf.pytorch_bin import BinWeights
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import verify
from isthmus.errors import DataError, MissingInput, UnsafeInput, UsageError
from ranks.tiny import build_model_folder

BASE = torch.randn(6, 8)
TENSORS = {
    "matrix": BASE,
    "same": BASE,
    "rows": BASE[2:4],
    "columns": BASE[:, 3:5],
    "turned": BASE.t(),
    "spread": torch.tensor([[1.0, 2.0]]).expand(3, 2),
    "half": torch.randn(5).half(),
    "brain": torch.randn(2, 3, 4).bfloat16(),
    "count": torch.tensor(7),
    "mask": torch.ones(2, 2, dtype=torch.bool),
    "none": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.randn(3)),
}


@pytest.fixture(params=[True, False], ids=["zip", "before-1.6"])
def zipped(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def save(value: Any, path: Path, zipped: bool = True) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)


def to_bin(folder: Path, *, zipped: bool = True, shards: int = 1) -> Path:
    """Turn the folder's safetensors into ``.bin`` files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if "lm_head.weight" not in tensors:  # as old versions of transformers wrote tied models
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if shards == 1:
        save(tensors, folder / "pytorch_model.bin", zipped)
        return folder
    files = [f"pytorch_model-{number:05d}-of-{shards:05d}.bin" for number in range(1, shards + 1)]
    weight_map = {name: files[at % shards] for at, name in enumerate(tensors)}
    for file in files:
        save({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file, zipped)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model_folder(tmp_path / "model", "llama", tie_word_embeddings=True)


def test_any_tensor_and_any_slice(tmp_path: Path, zipped: bool) -> None:
    save(TENSORS, tmp_path / "pytorch_model.bin", zipped)
    weights = BinWeights(tmp_path)
    assert list(weights.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (weights.tensors[name].dtype, weights.tensors[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(weights.read(name), tensor) and weights.read(name).is_contiguous()
    for name in ("matrix", "columns", "turned", "spread"):
        index = (slice(1, 3), slice(0, 2))
        assert torch.equal(weights.read(name, index), TENSORS[name][index])
        into = torch.zeros(2, 2, dtype=torch.float64)
        assert torch.equal(weights.read(name, index, into=into), TENSORS[name][index].double())


@pytest.mark.parametrize("shards", [1, 3])
def test_there_and_verified(model: Path, tmp_path: Path, zipped: bool, shards: int) -> None:
    convert(model, tmp_path / "wanted")
    to_bin(model, zipped=zipped, shards=shards)
    convert(model, tmp_path / "there", bin=True)
    verify(tmp_path / "wanted", tmp_path / "there")
    assert verify(model, tmp_path / "there", bin=True).formats == ("hf", "torch_dist")


def test_only_when_asked(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), str(tmp_path / "out"), "--bin"]) == 66
    assert "holds no pytorch_model.bin. Leave --bin out" in capsys.readouterr().err
    to_bin(model)
    assert main(["convert", str(model), str(tmp_path / "out")]) == 66
    assert "isthmus convert SRC DST --to hf --bin" in capsys.readouterr().err
    assert main(["convert", str(model), str(tmp_path / "out"), "--to", "hf", "--bin"]) == 0
    assert [path.name for path in (tmp_path / "out").glob("*model*")] == ["model.safetensors"]
    assert main(["verify", str(model), str(tmp_path / "out"), "--bin"]) == 0
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "out"), "--bin"]) == 66


def test_not_for_checkpoints(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "there")
    with pytest.raises(UsageError, match="is a Megatron checkpoint, and --bin is for Hugging Face folders"):
        convert(tmp_path / "there", tmp_path / "out", bin=True)


class Payload:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("way", ["zip", "before-1.6", "plain-pickle", "in-a-shard"])
@pytest.mark.parametrize("payload", [Payload(os.system, "touch ran"), Payload(Path.touch, Path("ran"))])
def test_a_payload_does_not_run(
    way: str, payload: Payload, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = to_bin(model, shards=2 if way == "in-a-shard" else 1) / "pytorch_model.bin"
    if way == "plain-pickle":
        file.write_bytes(pickle.dumps({"weight": payload}))
    elif way == "in-a-shard":
        save({"weight": torch.zeros(2), "more": payload}, model / "pytorch_model-00002-of-00002.bin")
    else:
        save({"weight": torch.zeros(2), "more": payload}, file, way == "zip")
    assert main(["convert", str(model), str(tmp_path / "out"), "--bin"]) == 77
    assert not Path("ran").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 1, 30, 200, -2000, -1])
def test_a_file_cut_short_is_named(model: Path, tmp_path: Path, zipped: bool, keep: int) -> None:
    file = to_bin(model, zipped=zipped) / "pytorch_model.bin"
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    with pytest.raises(DataError, match=r"pytorch_model\.bin") as caught:
        convert(model, tmp_path / "out", bin=True)
    if keep in (-1, -2000) and not zipped:
        assert f"{len(raw)} bytes are needed, it has {len(raw) + keep}" in str(caught.value)


def test_what_is_no_weights(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    for value in ([torch.zeros(2)], {"weight": 3}, {"model": {"weight": torch.zeros(2)}}):
        save(value, file, zipped)
        with pytest.raises(DataError, match="other things than tensors by name"):
            BinWeights(tmp_path)
    file.write_bytes(pickle.dumps([1, 2]) * 3)
    with pytest.raises(DataError, match=r"nothing that torch\.save wrote"):
        BinWeights(tmp_path)
    file.unlink()
    with pytest.raises(MissingInput, match="Leave --bin out"):
        BinWeights(tmp_path)


def forge(raw: bytes, zipped: bool, old: bytes, new: bytes) -> bytes:
    """Another word in the pickle, with the sums of a zip put right."""
    if not zipped:
        assert raw.count(old) == 1
        return raw.replace(old, new)
    forged = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(forged, "w") as target:
        for name in source.namelist():
            member = source.read(name)
            assert member.count(old) == name.endswith("data.pkl")
            target.writestr(name, member.replace(old, new))
    return forged.getvalue()


@pytest.mark.parametrize(("size", "stride"), [((2, 2), (3, 1)), ((4,), (1,))], ids=["strided", "contiguous"])
def test_a_tensor_that_claims_more_than_there_is(
    size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path, zipped: bool
) -> None:
    """What as_strided makes of it would be whatever lies behind in memory or in the file."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(4, 4).as_strided(size, stride)}, buffer, _use_new_zipfile_serialization=zipped)
    old = b"K\x02K\x02\x86" if len(size) == 2 else b"K\x04\x85"
    new = b"K\x63" + old[2:]
    (tmp_path / "pytorch_model.bin").write_bytes(buffer.getvalue())
    assert BinWeights(tmp_path).tensors["w"].shape == size
    (tmp_path / "pytorch_model.bin").write_bytes(forge(buffer.getvalue(), zipped, old, new))
    with pytest.raises(DataError, match="has 16 elements"):
        BinWeights(tmp_path)


def test_an_index_that_lies(model: Path, tmp_path: Path) -> None:
    index = to_bin(model, shards=2) / "pytorch_model.bin.index.json"
    truth = json.loads(index.read_text())["weight_map"]
    first, second = dict.fromkeys(truth.values())
    (tmp_path / "away.bin").write_bytes((model / first).read_bytes())
    (model / "link.bin").symlink_to(tmp_path / "away.bin")
    for file, error, told in (
        ("../away.bin", UnsafeInput, "outside of the folder"),
        (str(tmp_path / "away.bin"), UnsafeInput, "outside of the folder"),
        ("link.bin", UnsafeInput, "a link out of the folder"),
        ("none.bin", DataError, "which is not there"),
        (second, DataError, "which does not hold it"),
    ):
        lies = {name: file if where == first else where for name, where in truth.items()}
        index.write_text(json.dumps({"weight_map": lies}))
        with pytest.raises(error, match=told):
            BinWeights(model)
