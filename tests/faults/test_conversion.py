"""Interrupted conversions leave no destination or a complete one; ``verify`` detects damaged outputs."""

from __future__ import annotations

import json
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults.fork_server import ForkServer
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.files.file_checksums import content_checksum
from ranks.tiny import without_checksums

TARGETS: dict[str, list[str]] = {
    "hf": ["--to", "hf"],
    "torch_dist": ["--to", "torch_dist"],
    "legacy": ["--to", "torch", "--tp", "2"],
}
POINTS = ("first", "middle", "last", "publish", "renamed")
FEW_POINTS: dict[str, list[Any]] = {
    "hf": ["first", "publish", "renamed"],
    "torch_dist": ["middle", "publish", 0.07],
    "legacy": ["last", "renamed"],
}
"""Each point with a target, and each target during and after the stream."""


def outcome(isthmus: ForkServer, model: Path, out: Path, target: str, number: signal.Signals, point: Any) -> int:
    """Exit code of a conversion that sends itself the signal at a point, or has it after a number of seconds."""
    kill_point = json.dumps([point, number, str(out)])
    command = isthmus.start("convert", model, out, *TARGETS[target], KILL_POINT=kill_point)
    if isinstance(point, float):
        time.sleep(point)
        with suppress(ProcessLookupError):  # it may have ended
            command.send(0, number)
    return command.result().returncode


def all_points() -> dict[str, list[Any]]:
    random_state = random.Random(0)
    return {target: [*POINTS, random_state.uniform(0.0, 0.15)] for target in TARGETS}


@pytest.mark.parametrize(
    "points", [pytest.param(FEW_POINTS, id="few"), pytest.param(all_points(), id="all", marks=pytest.mark.thorough)]
)
def test_killed_conversion_leaves_nothing_or_everything(
    points: dict[str, list[Any]], isthmus: ForkServer, model: Path, tmp_path: Path
) -> None:
    cases = {f"{target}-{point}": (target, point) for target in points for point in points[target]}
    for name, (target, point) in cases.items():
        destination, partial = tmp_path / name, tmp_path / f".tmp-{name}"
        code = outcome(isthmus, model, destination, target, signal.SIGKILL, point)
        assert code in (-signal.SIGKILL, 0) and (code or isinstance(point, float)), name
        if isinstance(point, str):
            assert destination.exists() == (point == "renamed") == (not partial.exists()), name
        if not destination.exists():
            convert(model, destination, "torch" if target == "legacy" else target)  # type: ignore[arg-type]
        compare_models(model, destination)
        assert not partial.exists()


@pytest.mark.thorough
def test_terminated_conversion_removes_its_output(isthmus: ForkServer, model: Path, tmp_path: Path) -> None:
    cases = {
        f"{target}-{number.name}-{point}": (target, number, point)
        for target in TARGETS
        for number in (signal.SIGTERM, signal.SIGINT)
        for point in ("first", "middle")
    }
    codes = {name: outcome(isthmus, model, tmp_path / name, *case) for name, case in cases.items()}
    assert codes == dict.fromkeys(cases, 130)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def converted(model: Path, tmp_path: Path) -> Path:
    for target in ("hf", "torch_dist", "torch"):
        convert(model, tmp_path / target, target)  # type: ignore[arg-type]
    return tmp_path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def tensor_offset(folder: Path, tensor: torch.Tensor) -> tuple[Path, int]:
    """The file that contains the bytes of a tensor, and their offset."""
    expected = tensor.numpy().tobytes()
    (path,) = (path for path in folder.rglob("*") if path.is_file() and expected in path.read_bytes())
    return path, path.read_bytes().index(expected)


@pytest.mark.parametrize("target", ["hf", "torch_dist", "torch"])
def test_checksum_tells_damage_from_a_difference(
    target: str, converted: Path, model: Path, isthmus: ForkServer
) -> None:
    tensor = load_file(model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    path, at = tensor_offset(converted / target, tensor)
    flip(path, at + tensor.nbytes // 2)
    line = isthmus("verify", model, converted / target).error(65)
    assert f"{path} is damaged: bytes 0 to " in line and "do not match checksums.json" in line
    assert target == "torch" or "weight" in line
    line = isthmus("verify", model, converted / target, "--trust").error(1)  # only the difference is reported
    assert "model.layers.1.mlp.down_proj.weight in 1 of 2048 elements" in line


@pytest.mark.parametrize("file", ["hf/tokenizer.json", "torch_dist/hf/tokenizer.json", "torch/hf/tokenizer.json"])
def test_changed_file_without_tensors_is_detected(file: str, converted: Path, model: Path, isthmus: ForkServer) -> None:
    folder = converted / file.partition("/")[0]
    flip(converted / file, 100)
    line = isthmus("verify", model, folder).error(65)
    assert f"{converted / file} is damaged: bytes 0 to " in line
    (converted / file).unlink()
    assert f"{converted / file} is missing; checksums.json lists it" in isthmus("verify", model, folder).error(65)


@pytest.mark.parametrize("target", ["hf", "torch_dist", "torch"])
def test_checksums_are_optional(target: str, converted: Path, model: Path, isthmus: ForkServer) -> None:
    assert isthmus("verify", model, converted / target, "--json").result["checksums"] == [False, True]
    without_checksums(converted / target)
    assert isthmus("verify", model, converted / target, "--json").result["checksums"] == [False, False]


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda sums: sums["files"].update({"../x": None}), 77, "'../x'"),
        (lambda sums: sums["files"].update({"/etc/passwd": None}), 77, "'/etc/passwd'"),
        (lambda sums: sums.update(algorithm="md5"), 65, "'md5'"),
        (lambda sums: sums.update(files=[[1]]), 65, "not a list of checksums"),
    ],
    ids=["above", "absolute", "algorithm", "form"],
)
def test_invalid_checksum_file_is_refused(
    change: Any, code: int, message: str, converted: Path, model: Path, isthmus: ForkServer
) -> None:
    path = converted / "torch_dist" / "checksums.json"
    sums = json.loads(path.read_text())
    del sums["checksum"]
    change(sums)
    path.write_text(json.dumps({**sums, "checksum": content_checksum(sums)}))
    assert message in isthmus("verify", model, converted / "torch_dist").error(code)
