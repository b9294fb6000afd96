"""The command for a GPU machine: a dry run of all kinds of parts, its refusals, and its judgement of results."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

PARTS = (
    "tests/test_on_device,llama-1b/isthmus,llama-1b/transformers-flash,llama-1b/plain-compiled,moe-16/isthmus,"
    "chats/isthmus,chats/transformers-padded,moe-layer"
)


@pytest.fixture(autouse=True)
def _benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))


def in_this_process(module: str, spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    result: dict[str, Any] = importlib.import_module(module).run(spec)
    return result


@pytest.mark.benchmarks
def test_dry_run(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(repository / "benchmarks" / "gpu_parts.py"), "--dry", "--out", str(out)]
    done = subprocess.run([*command, "--parts", PARTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((out / "results.json").read_text())
    parts = result["parts"]
    assert list(parts) == PARTS.split(",")
    states = {name: part["state"] for name, part in parts.items()}
    flash = states.pop("llama-1b/transformers-flash")
    assert set(states.values()) == {"done"} and flash == ("done" if _has("flash_attn") else "absent")
    tests = parts["tests/test_on_device"]
    assert tests["passed"] + len(tests["skipped"]) > 10 and not tests["failed"]
    for name in ("llama-1b/isthmus", "llama-1b/plain-compiled", "moe-16/isthmus", "chats/transformers-padded"):
        row = parts[name]
        assert min(row["tokens_per_s"], row["tflops"], row["memory_gib"], row["startup_s"]) > 0, name
        assert sum(row["profile"].values()) == pytest.approx(1, abs=0.05), name
    assert {"attention", "loss", "norms", "optimizer"} <= parts["llama-1b/isthmus"]["profile"].keys()
    # The same weights; only the random tokens differ.
    same_work = [item for item in result["aims"] if item["aim"].startswith(("llama-1b: first", "chats: first"))]
    assert len(same_work) == 2 and all(item["met"] for item in same_work), same_work
    certified = result["certificate"]
    assert certified["platform"] == "cpu" and len(certified["source_sha256"]) == 64
    assert str(tmp_path) not in json.dumps(certified)
    assert "its numbers mean nothing" in (out / "summary.md").read_text()
    gpu_parts: Any = importlib.import_module("gpu_parts")
    more = ["--dry", "--out", str(out), "--parts", "moe-layer,moe-16/transformers", "--limit-s", "0"]
    assert gpu_parts.main(more) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[:2]] == [
        "moe-16/transformers not started: --limit-s 0 is over; the same command continues", "moe-layer done before",
    ]  # fmt: skip


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a machine without a GPU is refused")
def test_a_machine_without_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_parts: Any = importlib.import_module("gpu_parts")
    monkeypatch.setattr(gpu_parts, "call", in_this_process)
    with pytest.raises(SystemExit) as refused:
        gpu_parts.main(["--out", str(tmp_path / "out")])
    assert refused.value.code == 2 and not (tmp_path / "out").exists()
    text = capsys.readouterr().err
    assert text.startswith("gpu_parts.py: no GPU: torch ") and "make gpu-dry" in text


def test_a_python_without_the_packages_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_parts: Any = importlib.import_module("gpu_parts")
    monkeypatch.setattr(gpu_parts, "NEEDED", (*gpu_parts.NEEDED, "no_such_package"))
    with pytest.raises(SystemExit):
        gpu_parts.main([])
    assert f"{sys.executable} has no no_such_package. Collect wheels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--parts", "llama-1b,lama-1b/isthmus"], "not known: lama-1b/isthmus. --list shows the parts"),
        (["--dry", "--record"], "--dry is not a measurement and is not recorded"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        importlib.import_module("gpu_parts").parse(arguments)
    assert refused.value.code == 2 and text in capsys.readouterr().err


def test_a_part_that_fails_is_reported_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_parts: Any = importlib.import_module("gpu_parts")
    calls: list[str] = []
    turns: list[dict[str, Any]] = []

    def fake(module: str, spec: dict[str, Any], **_: Any) -> dict[str, Any]:
        calls.append(module)
        sent = json.loads(json.dumps(spec))
        if module == "gpu_turns.isthmus_turn":
            turns.append(sent)
            raise SystemExit("a reason")
        if module == "gpu_turns.device":
            return {"platform": "cuda", "device": "1 x Test", "device_name": "Test", "devices": 1}
        if module == "gpu_turns.moe_layer_turn" and calls.count(module) == 1:
            raise RuntimeError("first line\nOutOfMemoryError: 3 GiB")
        return (
            {"rows": []}
            if module == "gpu_turns.moe_layer_turn"
            else {"passed": 1, "failed": {"test_a": "no"}, "skipped": {}}
        )

    monkeypatch.setattr(gpu_parts, "call", fake)
    arguments = ["--out", str(tmp_path), "--parts", "moe-layer,tests/test_collectives,llama-1b/isthmus"]
    assert gpu_parts.main(arguments) == 1
    text = (tmp_path / "summary.md").read_text()
    assert "- `llama-1b/isthmus`: failed: SystemExit: a reason" in text
    assert turns[0]["seq_length"] == 8192 and turns[0]["platform"] == "auto" and not turns[0]["dry"]
    assert "- `moe-layer`: failed: OutOfMemoryError: 3 GiB" in text and "- `tests/test_collectives` test_a: no" in text
    assert gpu_parts.main(arguments) == 1  # the test fails again
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert [parts[name]["state"] for name in ("moe-layer", "tests/test_collectives")] == ["done", "failed"]
    monkeypatch.setattr(gpu_parts, "source_sha256", lambda: "0" * 64)
    with pytest.raises(SystemExit) as refused:
        gpu_parts.main(arguments)
    assert refused.value.code == 2


def test_aims_are_judged() -> None:
    summary: Any = importlib.import_module("gpu_turns.summary")
    parts = {
        "llama-1b/isthmus": {"mfu": 0.51, "tokens_per_s": 100.0, "first_loss": 12.0},
        "llama-1b/isthmus-fp8": {"mfu": 0.3, "tokens_per_s": 120.0, "first_loss": 12.0},
        "llama-1b/transformers-compiled": {"mfu": 0.4, "tokens_per_s": 80.0, "first_loss": 12.3},
        "moe-layer": {"rows": [{"contestant": "isthmus", "model": "mixtral", "mfu": 0.39}]},
    }
    values = {aim["aim"]: (aim["got"] and round(aim["got"], 3), aim["met"]) for aim in summary.aims(parts)}
    assert values["llama-1b: MFU in bf16"] == (0.51, True)
    assert values["llama-1b: tokens/s of FP8 / bf16"] == (1.2, False)
    assert values["llama-1b: tokens/s of isthmus / transformers-compiled"] == (1.25, True)
    assert values["MoE layer mixtral: MFU in bf16"] == (0.39, False)
    assert values["llama-1b: first losses of all contestants differ by, relative"] == (0.025, False)
    assert values["layers-8b: MFU in bf16"] == (None, None)


@pytest.mark.parametrize("case", ["llama-1b", "qwen-0.6b"])
def test_plain_model_equals_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    cases: Any = importlib.import_module("gpu_turns.cases")
    spec = {"case": case, "folder": str(tmp_path), "device": "cpu", "dry": True}
    importlib.import_module("gpu_turns.model_folder").run(spec)
    plain = importlib.import_module("gpu_turns.plain_model").load_plain(tmp_path / "model", torch.device("cpu"))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(cases.TINY["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(plain.logits(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_wheels_are_resolved_around_the_torch_of_the_machine(tmp_path: Path, pyproject: dict[str, Any]) -> None:
    wheels: Any = importlib.import_module("gpu_wheels")
    stub = wheels.torch_stub(tmp_path, "2.10.0")
    with zipfile.ZipFile(stub) as archive:
        metadata = archive.read("torch-2.10.0+there.dist-info/METADATA").decode()
    assert "Version: 2.10.0+there" in metadata and "Requires-Dist" not in metadata
    chosen = argparse.Namespace(python_version="3.12", torch="2.10.0", machine="aarch64")
    arguments = wheels.pip_arguments(chosen, tmp_path, tmp_path / "found")
    assert "torch==2.10.0+there" in arguments and "--platform=manylinux_2_28_aarch64" in arguments
    expected = [item for item in pyproject["project"]["dependencies"] if not item.startswith("torch")]
    assert set(expected) <= set(arguments) and not any(item.startswith("torch>") for item in arguments)
    assert "torch==" not in (tmp_path / "constraints.txt").read_text()


def test_the_shares_of_a_step_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step_cost: Any = importlib.import_module("step_cost")
    monkeypatch.setitem(step_cost.MODELS, "llama3-70b", (1, 8192, 8))
    (row,), (no_plan,) = (
        step_cost.plans([model], [gpu], "bf16") for model, gpu in (("llama3-8b", "H100"), ("llama3-70b", "A10"))
    )
    shares = [int(part.rpartition(" ")[2].rstrip("%")) for part in row[-1].split(", ")]
    assert 97 <= sum(shares) <= 103  # rounded
    assert row[0] == "llama3-8b, 8 x H100" and no_plan[1] == "does not fit"
