"""``pytorch_model*.bin`` are read only on request, whole or in shards without running code."""

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
from isthmus.convert.hf.hf_weights import BinWeights
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
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


def to_bin(folder: Path, *, shards: int = 1) -> Path:
    """Turn the folder's safetensors into ``.bin`` files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if "lm_head.weight" not in tensors:  # as old versions of transformers wrote tied models
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    files = [f"pytorch_model-{number:05d}-of-{shards:05d}.bin" for number in range(1, shards + 1)]
    weight_map = {name: files[at % shards] for at, name in enumerate(tensors)}
    for file in files:
        torch.save({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model_folder(tmp_path / "model", "llama", tie_word_embeddings=True)


def test_every_kind_of_tensor_and_slice(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
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


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
def test_bin_files_convert_and_verify(model: Path, tmp_path: Path, shards: int) -> None:
    convert(model, tmp_path / "wanted")
    to_bin(model, shards=shards)
    convert(model, tmp_path / "there", bin=True)
    compare_models(tmp_path / "wanted", tmp_path / "there")
    assert compare_models(model, tmp_path / "there", bin=True).formats == ("hf", "torch_dist")


@pytest.mark.slow
def test_bin_is_read_only_on_request(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), str(tmp_path / "out"), "--bin"]) == 66
    assert "has no pytorch_model.bin. Omit --bin" in capsys.readouterr().err
    to_bin(model)
    assert main(["convert", str(model), str(tmp_path / "out")]) == 66
    assert "isthmus convert SRC DST --to hf --bin" in capsys.readouterr().err
    assert main(["convert", str(model), str(tmp_path / "out"), "--to", "hf", "--bin"]) == 0
    assert [path.name for path in (tmp_path / "out").glob("*model*")] == ["model.safetensors"]
    assert main(["verify", str(model), str(tmp_path / "out"), "--bin"]) == 0
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "out"), "--bin"]) == 66


def test_bin_is_refused_for_checkpoints(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "there")
    with pytest.raises(UsageError, match="is a Megatron checkpoint, and --bin is for Hugging Face folders"):
        convert(tmp_path / "there", tmp_path / "out", bin=True)


class Payload:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.slow_cases("payload1-in-a-shard")
@pytest.mark.parametrize("way", ["zip", "before-1.6", "plain-pickle", "in-a-shard"])
@pytest.mark.parametrize("payload", [Payload(os.system, "touch ran"), Payload(Path.touch, Path("ran"))])
def test_payload_does_not_run(
    way: str, payload: Payload, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = to_bin(model, shards=2 if way == "in-a-shard" else 1) / "pytorch_model.bin"
    if way == "plain-pickle":
        file.write_bytes(pickle.dumps({"weight": payload}))
    elif way == "in-a-shard":
        torch.save({"weight": torch.zeros(2), "more": payload}, model / "pytorch_model-00002-of-00002.bin")
    else:
        torch.save({"weight": torch.zeros(2), "more": payload}, file, _use_new_zipfile_serialization=way == "zip")
    assert main(["convert", str(model), str(tmp_path / "out"), "--bin"]) == (77 if way in ("zip", "in-a-shard") else 65)
    assert not Path("ran").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 1, 30, 200, -2000, -1])
def test_truncated_bin_is_named(model: Path, tmp_path: Path, keep: int) -> None:
    file = to_bin(model) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"pytorch_model\.bin"):
        convert(model, tmp_path / "out", bin=True)


def test_file_of_torch_before_1_6_is_refused(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    torch.save(tensors, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match=r"torch < 1\.6 wrote it\. Load it and save it again with torch >= 1\.6"):
        convert(model, tmp_path / "out", bin=True)


def test_files_without_weights_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    for value in ([torch.zeros(2)], {"weight": 3}, {"model": {"weight": torch.zeros(2)}}):
        torch.save(value, file)
        with pytest.raises(DataError, match="content that is not tensors by name"):
            BinWeights(tmp_path)
    file.write_bytes(pickle.dumps([1, 2]) * 3)
    with pytest.raises(DataError, match="is not a zip archive"):
        BinWeights(tmp_path)
    file.unlink()
    with pytest.raises(MissingInput, match="Omit --bin"):
        BinWeights(tmp_path)


def forge(raw: bytes, old: bytes, new: bytes) -> bytes:
    """The zip archive with other bytes in its pickle, and valid checksums."""
    forged = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(forged, "w") as target:
        for name in source.namelist():
            member = source.read(name)
            assert member.count(old) == name.endswith("data.pkl")
            target.writestr(name, member.replace(old, new))
    return forged.getvalue()


@pytest.mark.parametrize(("size", "stride"), [((2, 2), (3, 1)), ((4,), (1,))], ids=["strided", "contiguous"])
def test_tensor_larger_than_its_storage_is_refused(
    size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    """as_strided would return whatever follows in memory or in the file."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(4, 4).as_strided(size, stride)}, buffer)
    old = b"K\x02K\x02\x86" if len(size) == 2 else b"K\x04\x85"
    new = b"K\x63" + old[2:]
    (tmp_path / "pytorch_model.bin").write_bytes(buffer.getvalue())
    assert BinWeights(tmp_path).tensors["w"].shape == size
    (tmp_path / "pytorch_model.bin").write_bytes(forge(buffer.getvalue(), old, new))
    with pytest.raises(DataError, match="has 16 elements"):
        BinWeights(tmp_path)


def test_wrong_index_is_refused(model: Path, tmp_path: Path) -> None:
    index = to_bin(model, shards=2) / "pytorch_model.bin.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, second = dict.fromkeys(weight_map.values())
    (tmp_path / "away.bin").write_bytes((model / first).read_bytes())
    (model / "link.bin").symlink_to(tmp_path / "away.bin")
    for file, error, message in (
        ("../away.bin", UnsafeInput, "outside the folder"),
        (str(tmp_path / "away.bin"), UnsafeInput, "outside the folder"),
        ("link.bin", UnsafeInput, "a link to a file outside the folder"),
        ("none.bin", DataError, "which does not exist"),
        (second, DataError, "which does not have it"),
    ):
        changed = {name: file if where == first else where for name, where in weight_map.items()}
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(error, match=message):
            BinWeights(model)
