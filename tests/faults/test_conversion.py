"""Conversions that are ended at any point leave no destination or a whole one; damage to what they wrote is seen."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults.command import environment
from faults.fork_server import ForkServer
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models

TARGETS: dict[str, list[str]] = {
    "hf": ["--to", "hf"],
    "torch_dist": ["--to", "torch_dist"],
    "legacy": ["--to", "torch", "--tp", "2"],
}
POINTS = ("first", "middle", "last", "publish", "renamed")


def outcomes(requests: list[dict[str, Any]]) -> list[int]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed_at.py"))],
        input=json.dumps(requests), env=environment(), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found: list[int] = json.loads(done.stdout)
    return found


def request(model: Path, out: Path, target: str, number: int, point: Any) -> dict[str, Any]:
    return {"words": ["convert", str(model), str(out), *TARGETS[target]], "signal": number, "point": point}


def test_killed_anywhere(model: Path, tmp_path: Path) -> None:
    cases = {f"{target}-{point}": (target, point) for target in TARGETS for point in POINTS}
    dice = random.Random(0)
    cases |= {f"{target}-{number}": (target, dice.uniform(0.0, 0.15)) for target in TARGETS for number in range(3)}
    asked = [request(model, tmp_path / name, case[0], signal.SIGKILL, case[1]) for name, case in cases.items()]
    for (name, (target, point)), code in zip(cases.items(), outcomes(asked), strict=True):
        destination, left = tmp_path / name, tmp_path / f".tmp-{name}"
        assert code in (-signal.SIGKILL, 0) and (code or isinstance(point, float)), name
        if isinstance(point, str):
            assert destination.exists() == (point == "renamed") == (not left.exists()), name
        if not destination.exists():
            convert(model, destination, "torch" if target == "legacy" else target)  # type: ignore[arg-type]
        compare_models(model, destination)
        assert not left.exists()


def test_a_signal_that_asks_leaves_nothing(model: Path, tmp_path: Path) -> None:
    cases = {
        f"{target}-{number.name}-{point}": (target, number, point)
        for target in TARGETS
        for number in (signal.SIGTERM, signal.SIGINT)
        for point in ("first", "middle")
    }
    asked = [request(model, tmp_path / name, *case) for name, case in cases.items()]
    assert dict(zip(cases, outcomes(asked), strict=True)) == dict.fromkeys(cases, 130)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def written(model: Path, tmp_path: Path) -> Path:
    for target in ("hf", "torch_dist", "torch"):
        convert(model, tmp_path / target, target)  # type: ignore[arg-type]
    return tmp_path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def place_of(folder: Path, tensor: torch.Tensor) -> tuple[Path, int]:
    """File and first byte of a tensor, whatever the format."""
    wanted = tensor.numpy().tobytes()
    (path,) = (path for path in folder.rglob("*") if path.is_file() and wanted in path.read_bytes())
    return path, path.read_bytes().index(wanted)


@pytest.mark.parametrize("target", ["hf", "torch_dist", "torch"])
def test_one_flipped_bit_is_told_from_a_difference(
    target: str, written: Path, model: Path, isthmus: ForkServer
) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    wanted = json.loads((written / target / "checksums.json").read_text())["tensors"][name]
    tensor = load_file(model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    path, at = place_of(written / target, tensor)
    flip(path, at + tensor.nbytes // 2)
    line = isthmus("verify", model, written / target).error(65)
    found = line.partition(f"{name} with {wanted} and has ")[2][:16]
    assert len(found) == 16 and found != wanted and str(written / target) in line
    # Without the sums there is nothing to say which side is wrong.
    (written / target / "checksums.json").unlink()
    line = isthmus("verify", model, written / target).error(1)
    assert "model.layers.1.mlp.down_proj.weight in 1 of 2048 elements" in line


@pytest.mark.parametrize("file", ["hf/tokenizer.json", "torch_dist/hf/tokenizer.json", "torch/hf/tokenizer.json"])
def test_a_changed_file_beside_the_tensors(file: str, written: Path, model: Path, isthmus: ForkServer) -> None:
    folder = written / file.partition("/")[0]
    sums = json.loads((folder / "checksums.json").read_text())["files"]
    flip(written / file, 100)
    line = isthmus("verify", model, folder).error(65)
    wanted = sums[str((written / file).relative_to(folder))]
    assert f"{written / file} was written with the checksum {wanted} and has " in line
    (written / file).unlink()
    assert f"{wanted} and has nothing" in isthmus("verify", model, folder).error(65)


@pytest.mark.parametrize("target", ["hf", "torch_dist", "torch"])
def test_sums_are_no_must(target: str, written: Path, model: Path, isthmus: ForkServer) -> None:
    assert isthmus("verify", model, written / target, "--json").result["checksums"] == [False, True]
    (written / target / "checksums.json").unlink()
    assert isthmus("verify", model, written / target, "--json").result["checksums"] == [False, False]


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (lambda sums: sums["files"].update({"../x": "0"}), 77, "'../x'"),
        (lambda sums: sums["files"].update({"/etc/passwd": "0"}), 77, "'/etc/passwd'"),
        (lambda sums: sums["files"].update({"away/passwd": "0"}), 77, "'away/passwd'"),
        (lambda sums: sums.update(algorithm="md5"), 65, "'md5'"),
        (lambda sums: sums.update(files=[1]), 65, "not a list of checksums"),
        (lambda sums: sums["tensors"].update({"decoder.more": "0"}), 65, "decoder.more with 0 and has None"),
        (lambda sums: sums["tensors"].popitem(), 65, "with None and has"),
    ],
    ids=["above", "absolute", "link", "algorithm", "form", "more", "less"],
)
def test_a_list_of_sums_that_is_wrong(
    change: Any, code: int, told: str, written: Path, model: Path, isthmus: ForkServer
) -> None:
    path = written / "torch_dist" / "checksums.json"
    (written / "torch_dist" / "away").symlink_to("/etc")
    sums = json.loads(path.read_text())
    change(sums)
    path.write_text(json.dumps(sums))
    assert told in isthmus("verify", model, written / "torch_dist").error(code)
