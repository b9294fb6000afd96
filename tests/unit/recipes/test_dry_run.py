"""What ``--dry-run`` finds; tests/faults/test_run.py runs the command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.hf.tiny_model import build_tiny_qwen3
from isthmus.platforms.base import Platform
from isthmus.platforms.described import described_platform
from isthmus.platforms.parts import part_named
from isthmus.recipes import dry_run

CHATS = [{"prompt": f"Say {number}.", "completion": f"It is {number}."} for number in range(64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(
        tmp_path_factory.mktemp("dry") / "tiny", [json.dumps(CHATS)], vocab_size=300, hidden_size=16,
        intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip


def lines_of(
    model: Path | str,
    data: dict[str, Any],
    train: dict[str, Any],
    *,
    machine: Platform | None = None,
    runs_here: bool = True,
    **sections: Any,
) -> list[str]:
    values = {"recipe": "sft", "out": "absent", "model": {"path": str(model)}, "data": {"seq_length": 64} | data}
    config = RunConfig.model_validate(
        values | {"train": {"global_batch_size": 4} | train, "platform": "cpu"} | sections
    )
    lines: list[str] = []
    dry_run.dry_run(config, world_size=1, ranks_here=1, report=lines.append, machine=machine, runs_here=runs_here)
    return lines


@pytest.mark.slow
def test_what_a_login_machine_lacks_is_a_warning(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for train, more, message in (
        ({"precision": "fp8"}, {"platform": "auto"}, "CPUs have no fp8 matmuls"),
        ({}, {"platform": "auto", "optim": {"offload": True}}, "out of GPU memory"),
        ({}, {"platform": "rocm"}, "platform=rocm"),
    ):
        lines = lines_of(model, {"mock": True}, {"steps": 3} | train, runs_here=False, **more)
        (warning,) = [line for line in lines if line.startswith("warning: would fail on this machine")]
        assert message in warning and any("--gpus 8xMI300X" in line for line in lines)
        assert lines[-1].startswith("training: 3 steps")
        with pytest.raises(UsageError, match=re.escape(message)):
            lines_of(model, {"mock": True}, {"steps": 3} | train, **more)
    with pytest.raises(UsageError, match="fp8"):  # the run is to be on a CPU
        lines_of(model, {"mock": True}, {"steps": 3, "precision": "fp8"}, runs_here=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UsageError, match="offload"):
        sections: dict[str, Any] = {"platform": "cpu", "optim": {"offload": True}}
        lines_of(model, {"mock": True}, {"steps": 3}, runs_here=False, **sections)


@pytest.mark.slow
def test_a_run_is_checked_against_another_machine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(gpu: str, memory_gib: float = 64, **train: Any) -> list[str]:
        machine = described_platform(part_named(gpu), 8, int(memory_gib * 2**30))
        return lines_of(
            model, {"mock": True}, {"steps": 3} | train, machine=machine, platform="auto", optim={"offload": True}
        )

    monkeypatch.setattr("isthmus.platforms.base.free_bytes", lambda: 0)  # of this machine
    assert {"platform rocm: 8 x MI300X, from its data sheet", "precision bf16: gfx942 has bf16 matrix cores"} <= set(
        lines("MI300X")
    )
    assert "precision fp8: train.precision" in lines("H100", precision="fp8")
    assert "precision fp32: sm_70 has no bf16 matrix cores" in lines("V100")
    with pytest.raises(UsageError, match="gfx90a has no fp8 matrix cores"):
        lines("MI250X", precision="fp8")
    with pytest.raises(UsageError, match=r"A GPU is 0\.000 GiB"):
        lines("H100", 1e-4)


def test_sizes_are_exact_without_tokenizing(model: Path) -> None:
    size = lines_of(model, {"mock": True}, {"steps": 3})[-1]
    assert size.startswith("training: 3 steps, random tokens, 256 tokens per step; ")
    assert "trainable; 768 tokens in all" in size
    with pytest.raises(UsageError, match="needs validations during training"):
        lines_of(model, {"mock": True, "valid_fraction": 0.0}, {"steps": 3, "eval_every": 1, "early_stopping": 1})


def test_the_learning_rate_and_its_reason_are_said(model: Path) -> None:
    def line(**sections: Any) -> str:
        lines = lines_of(model, {"mock": True}, {"steps": 3}, **sections)
        return next(line for line in lines if line.startswith("learning rate"))

    assert line().startswith("learning rate 2e-05, 3% warm-up: the default of sft of all weights, as")
    assert line(lora={"rank": 2}).startswith(
        "learning rate 0.0002, 3% warm-up: the default of sft with adapters, as in"
    )
    given = line(lora={"rank": 2}, optim={"lr": 1e-3, "warmup_steps": 2})
    assert given == "learning rate 0.001, 2 steps of warm-up (default of sft with adapters: 0.0002, 3%)"


def test_many_epochs_are_said_before_the_data_is_tokenized(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.json"
    data.write_text(json.dumps(CHATS))
    lines = lines_of(model, {"files": [str(data)], "packing": False}, {"steps": 20_000})
    assert any("takes each sample" in line for line in lines)
    assert re.search(r"about 1,\d{3} epochs", lines[-1])


def test_weights_of_the_hub_are_not_downloaded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "chats.json"
    data.write_text(json.dumps(CHATS))
    cached = Path(shutil.copytree(model, tmp_path / "cached"))
    expected: list[bool] = []

    def fetch(name: str, *, weights: bool, **_: Any) -> Path:
        assert name == "org/name"
        expected.append(weights)
        return cached

    monkeypatch.setattr(dry_run, "fetch", fetch)
    few = lines_of("org/name", {"files": [str(data)]}, {"epochs": 2.0}, optim={"warmup_steps": 1000})
    assert not any("Hub cache" in line for line in few) and "about 2 epochs" in few[-1]
    assert any("the run may fail after it has tokenized the data: optim.warmup_steps=1000" in line for line in few)
    (cached / "model.safetensors").unlink()
    lines = lines_of("org/name", {"files": [str(data)]}, {"steps": 2})
    assert lines[0].startswith("org/name: its weights are not in the Hub cache") and expected == [False, False]
    with pytest.raises(MissingInput, match="has no safetensors weights"):  # a folder of the user
        lines_of(cached, {"files": [str(data)]}, {"steps": 2})


def test_the_default_batch_is_smaller_for_few_records(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.json"
    data.write_text(json.dumps(CHATS))

    def lines(train: dict[str, Any], seq_length: int = 64) -> list[str]:
        values = {"recipe": "sft", "out": "absent", "model": {"path": str(model)}, "platform": "cpu"}
        section = {"files": [str(data)], "seq_length": seq_length, "packing": False}
        config = RunConfig.model_validate(values | {"data": section, "train": train})
        reported: list[str] = []
        dry_run.dry_run(config, world_size=1, ranks_here=1, report=reported.append)
        return reported

    few = lines({})
    assert "train.global_batch_size is about 2 instead of the default, since the data has few sequences" in few
    assert "about 32 steps" in few[-1] and not any("HARDLY" in line for line in few)
    given = lines({"global_batch_size": 16})
    assert "about 4 steps" in given[-1]
    assert any("4 steps HARDLY TRAIN the model: the data has 63 sequences and train.global" in line for line in given)
