"""Safetensors written in slices, by several processes, are the files that the library itself writes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.errors import IOFailure, NoSpace, OutputExists
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.staged_folder import StagedFolder
from isthmus.hf.tensors.parallel_writer import SafetensorsPlan, SafetensorsWriter
from isthmus.hf.tensors.safetensors_format import CastBuffer

TENSORS = {
    "z.weight": torch.randn(8, 6),
    "b.weight": torch.randn(6, 4).bfloat16(),
    "é.bias": torch.randn(9).bfloat16(),
    "a.weight": torch.randn(5, 3),
}


def specs() -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def test_bytes_equal_safetensors_library(tmp_path: Path) -> None:
    plan = SafetensorsPlan(specs())
    plan.create(tmp_path)
    with SafetensorsWriter(plan, tmp_path) as writer:
        assert sum(writer.write(name, None, tensor) for name, tensor in TENSORS.items()) == plan.total_bytes
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_slices_of_rows_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(CastBuffer, "limit_bytes", buffer_bytes)
    plan = SafetensorsPlan(specs())
    plan.create(tmp_path)
    wide = TENSORS["z.weight"].double().repeat(1, 2)
    with SafetensorsWriter(plan, tmp_path) as writer:
        writer.write("z.weight", (slice(0, 8), slice(4, 6)), wide[:, 4:6])
        writer.write("z.weight", (slice(0, 8), slice(0, 4)), wide[:, :4])
        writer.write("b.weight", (slice(2, 6),), TENSORS["b.weight"][2:])
        writer.write("b.weight", (slice(0, 2), slice(0, 4)), TENSORS["b.weight"][:2])
        with pytest.raises(ValueError, match="not a slice"):
            writer.write("b.weight", (slice(0, 2),), TENSORS["b.weight"])
    got = load_file(tmp_path / "model.safetensors")
    assert torch.equal(got["z.weight"], TENSORS["z.weight"])
    assert torch.equal(got["b.weight"], TENSORS["b.weight"])


def test_several_files_with_an_index(tmp_path: Path) -> None:
    plan = SafetensorsPlan(specs(), max_shard_bytes=100)
    plan.create(tmp_path)
    with SafetensorsWriter(plan, tmp_path) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, None, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 48 + 24 + 9 + 15, "total_size": plan.total_bytes}
    assert index["weight_map"]["z.weight"] == "model-00001-of-00003.safetensors"
    (tmp_path / "config.json").write_text("{}")
    opened = ModelFolder.open(tmp_path)
    assert all(torch.equal(opened.read(name), tensor) for name, tensor in TENSORS.items())


def _write_columns(folder: Path, rank: int) -> None:
    plan = SafetensorsPlan(specs())
    with SafetensorsWriter(plan, folder) as writer:
        part = torch.arange(48.0).reshape(8, 6)[:, rank * 2 : rank * 2 + 2]
        writer.write("z.weight", (slice(0, 8), slice(rank * 2, rank * 2 + 2)), part)


@pytest.mark.processes
def test_several_processes_write_one_file(tmp_path: Path) -> None:
    SafetensorsPlan(specs()).create(tmp_path)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_write_columns, args=(tmp_path, rank)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["z.weight"], torch.arange(48.0).reshape(8, 6))


def test_full_disk_reports_needed_and_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSpace, match=r"no space left to write .*: 0\.00 GiB needed, [\d.]+ GiB free"):
        with StagedFolder(tmp_path / "out") as staged:
            SafetensorsPlan(specs()).create(staged.path)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_io_failures(tmp_path: Path) -> None:
    plan = SafetensorsPlan(specs())
    plan.create(tmp_path)
    with pytest.raises(IOFailure, match="File exists"):
        plan.create(tmp_path)
    with pytest.raises(IOFailure, match="No such file"):
        SafetensorsWriter(plan, tmp_path / "nowhere").write("a.weight", None, TENSORS["a.weight"])


def test_file_systems_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    plan = SafetensorsPlan(specs())
    plan.create(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size == plan.file_bytes["model.safetensors"]


def test_staged_folder_is_atomic(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with StagedFolder(out) as staged:
        (staged.path / "file").write_text("x")
        assert StagedFolder(out).path == staged.path
        assert not out.exists()
    assert (out / "file").read_text() == "x"
    assert list(out.parent.iterdir()) == [out]
    with pytest.raises(OutputExists, match="exists already"):
        StagedFolder(out).create()
    with pytest.raises(KeyboardInterrupt), StagedFolder(tmp_path / "other") as staged:
        raise KeyboardInterrupt
    assert not staged.path.exists() and not staged.destination.exists()


def test_staged_folder_removes_files_of_a_killed_process(tmp_path: Path) -> None:
    first = StagedFolder(tmp_path / "out")
    first.create()
    (first.path / "half").write_text("x")
    with StagedFolder(tmp_path / "out") as staged:
        assert list(staged.path.iterdir()) == []
    assert (tmp_path / "out").is_dir()


def test_staged_folder_keeps_a_destination_created_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(OutputExists), StagedFolder(tmp_path / "out") as staged:
        (tmp_path / "out").mkdir()
    assert not staged.path.exists()
