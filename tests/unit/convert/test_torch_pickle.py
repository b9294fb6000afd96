"""Files of torch.save are read without running code; only types that checkpoints need are accepted."""

from __future__ import annotations

import argparse
import builtins
import os
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.convert.pickle_bounds import check_pickle
from isthmus.convert.torch_pickle import PLAIN_TYPES, StridedTensor, UnknownObject, read_torch_pickle
from isthmus.errors import DataError, UnsafeInput
from isthmus.hf.tensors.safetensors_format import TensorInfo, TensorReader


def saved(path: Path, content: Any, **how: Any) -> Path:
    torch.save(content, path, **how)
    return path


def repacked(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """The same members; ``change`` maps a name and its bytes to other bytes, or None to omit the member."""
    other = path.with_name("repacked.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w", compression) as new:
        for name in old.namelist():
            if (data := change(name.partition("/")[2], old.read(name))) is not None:
                new.writestr(name, data)
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_offsets_of_all_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(24).view(2, 3, 4).to(dtype),
        "b": torch.zeros((), dtype=dtype),
        "none": torch.empty((0, 3), dtype=dtype),
    }
    result = read_torch_pickle(saved(tmp_path / "x.pt", {"model": tensors, "iteration": 3}))
    assert result["iteration"] == 3
    for name, tensor in tensors.items():
        assert torch.equal(TensorReader().read(result["model"][name]), tensor)


def test_archive_within_a_file(tmp_path: Path) -> None:
    item = saved(tmp_path / "x.pt", torch.arange(7.0)).read_bytes()
    (tmp_path / "many").write_bytes(b"before" * 50 + item + b"PK behind" * 50)
    info = read_torch_pickle(tmp_path / "many", 300, len(item))
    assert torch.equal(TensorReader().read(info), torch.arange(7.0))


def test_views_into_a_larger_storage(tmp_path: Path) -> None:
    full = torch.arange(60.0).view(6, 10)
    result = read_torch_pickle(saved(tmp_path / "x.pt", {"rows": full[2:4], "row": full[5], "one": full[3, 7]}))
    assert torch.equal(TensorReader().read(result["rows"]), full[2:4])
    assert torch.equal(TensorReader().read(result["row"]), full[5])
    assert TensorReader().read(result["one"]) == 37
    assert result["rows"].offset - result["one"].offset == (20 - 37) * 4


@pytest.mark.parametrize("cut", [lambda t: t.T, lambda t: t[:, :2], lambda t: t[::2], lambda t: t[:1].expand(3, 4)])
def test_strided_tensors(cut: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", cut(torch.arange(12.0).view(3, 4)))
    with pytest.raises(DataError, match="not contiguous"):
        read_torch_pickle(path)
    assert isinstance(read_torch_pickle(path, strided=True), StridedTensor)


def test_strides_of_a_single_row_are_ignored(tmp_path: Path) -> None:
    column = torch.arange(5.0)[:, None].T  # one row: its strides say nothing
    assert torch.equal(TensorReader().read(read_torch_pickle(saved(tmp_path / "x.pt", column))), column)


def test_plain_values(tmp_path: Path) -> None:
    factories = {kind.__name__: defaultdict(kind, {"a": kind()}) for kind in (list, dict, int)}
    plain = {
        "few": {1, 2}, "fixed": frozenset("ab"), "bytes": b"\xff\x00", "array": bytearray(b"x"), "number": 1 + 2j,
        "size": torch.Size((2, 3)), "dtype": torch.bfloat16, "device": torch.device("cpu"), "ordered": OrderedDict(a=1),
    }  # fmt: skip
    result = read_torch_pickle(saved(tmp_path / "x.pt", plain | factories))
    assert result == plain | {"list": {"a": []}, "dict": {"a": {}}, "int": {"a": 0}}


def test_parameters_and_buffers(tmp_path: Path) -> None:
    layer = torch.nn.BatchNorm1d(3)
    result = read_torch_pickle(saved(tmp_path / "x.pt", dict(layer.state_dict()) | {"p": layer.weight}))
    assert {name: tuple(info.shape) for name, info in result.items()} == {
        **{name: (3,) for name in ("weight", "bias", "running_mean", "running_var", "p")},
        "num_batches_tracked": (),
    }


class Payload:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((os.system, ("touch ran",)), r"(posix|nt)\.system"),
        ((builtins.eval, ("open('ran', 'w')",)), "builtins.eval"),
        ((builtins.getattr, (torch.Tensor, "numpy")), "builtins.getattr"),
        ((builtins.__import__, ("os",)), "builtins.__import__"),
        ((Path.touch, (Path("ran"),)), "builtins.getattr"),
        ((torch.save, ([], "ran")), "torch.serialization.save"),
        ((torch.load, ("ran",)), "torch.serialization.load"),
    ],
    ids=["system", "eval", "getattr", "import", "method", "save", "load"],
)
def test_payload_does_not_run(call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "x.pt", {"model": torch.zeros(2), "rng": [Payload(*call)]})
    with pytest.raises(UnsafeInput, match=message) as caught:
        read_torch_pickle(path)
    assert caught.value.exit_code == 77 and not Path("ran").exists()


def test_dotted_name_is_refused(tmp_path: Path) -> None:
    # Protocol 4 looks attributes of attributes up: torch, then its module os, then system.
    content = b"\x80\x04\x8c\x05torch\x8c\tos.system\x93\x8c\x09touch ran\x85R."
    path = repacked(saved(tmp_path / "x.pt", 0), lambda name, data: content if name == "data.pkl" else data)
    with pytest.raises(UnsafeInput, match=r"torch\.os\.system"):
        read_torch_pickle(path)


@pytest.mark.parametrize("remaining", [0, 10, 200, -30, -1])
def test_truncated_file_is_refused(remaining: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"model": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[:remaining])
    with pytest.raises(DataError, match=r"x\.pt"):
        read_torch_pickle(path)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"model": torch.zeros(1000)})
    same = repacked(path, lambda name, data: data)
    assert isinstance(read_torch_pickle(same)["model"], TensorInfo)
    for message, change, how in [
        (r"data\.pkl is compressed", lambda name, data: data, zipfile.ZIP_DEFLATED),
        ("bytes, 4000 are needed", lambda name, data: data[:-1] if name == "data/0" else data, zipfile.ZIP_STORED),
        ("data/0", lambda name, data: None if name == "data/0" else data, zipfile.ZIP_STORED),
        ("big-endian", lambda name, data: b"big" if name == "byteorder" else data, zipfile.ZIP_STORED),
        ("has no data.pkl", lambda name, data: None if name == "data.pkl" else data, zipfile.ZIP_STORED),
    ]:
        with pytest.raises(DataError, match=message):
            read_torch_pickle(repacked(path, change, how))


def test_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", torch.zeros(1000))

    def longer(name: str, data: bytes) -> bytes:
        return data.replace(b"M\xe8\x03\x85", b"M\xe9\x03\x85") if name == "data.pkl" else data

    with pytest.raises(DataError, match="1000 elements, 1001 are needed"):
        read_torch_pickle(repacked(path, longer))


def test_classes_of_other_packages_are_not_imported(tmp_path: Path) -> None:
    from megatron.core.transformer.enums import AttnBackend

    state = {
        "args": argparse.Namespace(attention_backend=AttnBackend.auto, tensor_model_parallel_size=2),
        "numpy": np.random.RandomState(0).get_state(),
        "scalar": np.float64(2.5),
        "model": torch.ones(2),
    }
    path = saved(tmp_path / "x.pt", {"state": state})
    remaining = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "megatron"}
    try:
        result = read_torch_pickle(path)["state"]
        assert not [name for name in sys.modules if name.partition(".")[0] == "megatron"]
    finally:
        sys.modules.update(remaining)
    assert result["args"].tensor_model_parallel_size == 2
    backend = result["args"].attention_backend
    assert isinstance(backend, UnknownObject) and repr(backend) == "<megatron.core.transformer.enums.AttnBackend>"
    assert isinstance(result["numpy"][1], UnknownObject) and isinstance(result["scalar"], UnknownObject)
    assert isinstance(result["model"], TensorInfo)


def test_plain_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"model": [1, 2]}))
    with pytest.raises(DataError, match="is not a zip archive"):
        read_torch_pickle(tmp_path / "x.pt")


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p9999999999\n"])
def test_memory_of_the_memo_is_bounded(put: bytes, tmp_path: Path) -> None:
    """The unpickler reserves 16 bytes per place, up to the largest."""
    path = saved(tmp_path / "x.pt", {"model": torch.zeros(3), "text": "rrrrrppppp"})
    names = [name for name in zipfile.ZipFile(path).namelist() if name.endswith("data.pkl")]
    raw = zipfile.ZipFile(path).read(names[0])
    check_pickle(raw)
    at = raw.index(b"q\x00")
    with pytest.raises(DataError, match=r"has a memo of \d+ places"):
        check_pickle(raw[:at] + put + raw[at + 2 :])


def test_the_memo_of_any_protocol_is_checked() -> None:
    value = [{"a" * 300: (1, 2**70, 1.5, b"x" * 300, None, True)}, {1, 2}, "é" * 70000, [[]] * 300]
    for protocol in range(6):
        raw = pickle.dumps([value, value], protocol)
        check_pickle(raw)
        ops = list(pickletools.genops(raw))
        for position in [position for _, _, position in ops if position and position < len(raw) - 1][:40]:
            with pytest.raises(DataError, match="memo of 2147483647 places"):
                check_pickle(raw[:position] + b"r\xff\xff\xff\x7f" + raw[position:])


def nested(levels: int, width: int) -> Any:
    value: Any = ()
    for _ in range(levels):
        value = (value,) * width
    return value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(("levels", "width"), [(40, 2), (3, 100), (200, 1)])
def test_the_hash_of_a_key_is_bounded(levels: int, width: int, protocol: int) -> None:
    """40 tuples of two had 2^40 elements, and 100,000 levels overflowed the stack."""
    check_pickle(pickle.dumps({nested(3, 10): [nested(50, 1), nested(1, 1000)]}, protocol))
    with pytest.raises(DataError, match="tuples in tuples"):
        check_pickle(pickle.dumps([nested(levels, width)] * 2, protocol))


def test_a_call_does_not_nest_tuples() -> None:
    with pytest.raises(DataError, match="makes a tuple of tuples"):
        PLAIN_TYPES["builtins", "tuple"]([(), ()])
    assert PLAIN_TYPES["builtins", "tuple"]([1, 2]) == (1, 2)
