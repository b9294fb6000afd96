"""The command for a GPU machine: a dry run of all kinds of parts, its refusals, and its judgement of results."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

PARTS = (
    "probes,tests/loss,llama-1b/isthmus,llama-1b/plain-compiled,llama-1b/trainer-compiled,moe-layer,chats/isthmus,"
    "bandwidth/experts,bandwidth/loss,"
    "chats/transformers-compiled,saves,generation/isthmus,export,qlora-8b"
)


@pytest.fixture(autouse=True)
def _benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))


@pytest.mark.benchmarks
def test_dry_run(repository: Path, tmp_path: Path) -> None:
    """A part of each kind; `make gpu-dry` runs all."""
    out = tmp_path / "out"
    command = [sys.executable, str(repository / "benchmarks" / "gpu_parts.py"), "--dry", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--parts", PARTS], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((out / "results.json").read_text())
    parts, rows = result["parts"], importlib.import_module("gpu_turns.rows")
    assert {part["state"] for part in parts.values()} == {"done"}
    measure: Any = importlib.import_module("gpu_turns.measure")
    for name in ("llama-1b/isthmus", "llama-1b/plain-compiled", "chats/transformers-compiled"):
        row, (profile,) = measure.speed(parts[name]), rows.of_kind(parts[name]["rows"], "profile")
        assert min(row["tokens_per_s"], row["tflops"], row["memory_gib"], row["startup_s"]) > 0, name
        assert sum(profile["shares"].values()) == pytest.approx(1, abs=0.05), name
    summary: Any = importlib.import_module("gpu_turns.summary")
    # The same tokens and the same weights, in another program.
    for case, name in (
        ("llama-1b", "plain-compiled"),
        ("llama-1b", "trainer-compiled"),
        ("chats", "transformers-compiled"),
    ):
        assert summary.not_the_same(parts, case, name) is None, name
    regions = rows.of_kind(parts["bandwidth/experts"]["rows"], "bandwidth")
    assert {"engine.layers.norm._norm_backward", "AdamW"} < {row["name"] for row in regions}
    assert min(row["gb_per_s"] for row in [*regions, *rows.of_kind(parts["bandwidth/loss"]["rows"], "bandwidth")]) > 0
    met = {aim["aim"]: aim["met"] for aim in result["aims"]}
    assert met["saves: losses after a kill and resume differ by, relative"] is True
    assert met["export: tensors equal their source"] is True
    certified = result["certificate"]
    assert certified["platform"] == "cpu" and len(certified["source_sha256"]) == 64
    assert str(tmp_path) not in json.dumps(certified)
    assert "its numbers mean nothing" in (out / "summary.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a machine without a GPU is refused")
def test_a_machine_without_a_gpu_is_refused(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "gpu_parts.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("gpu_parts.py: no GPU: torch "), done.stderr
    assert "make gpu-dry" in done.stderr and not (tmp_path / "out" / "results.json").exists()


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


SCENE = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import gpu_parts, gpu_turns.turn

def processes(run, part):
    yield part.name, "scene", {"name": part.name}

def run(spec):
    from gpu_turns.rows import append
    append("measurement", name="first", value=1.0, unit="GB/s", reachable=None)
    if spec["name"] == "llama-1b/isthmus":
        append("fact", peak_tflops=1.0, warmup_steps=1, timed_steps=8, precision="bf16")
        for step in range(3):
            append("step", time_s=0.5, tokens=10, flops=1.0, loss=2.0, grad_norm=1.0, memory_gib=1.0)
        time.sleep(600)
    if spec["name"] == "moe-layer/run":
        raise ValueError("a reason")

if __name__ == "__main__":
    gpu_parts.Run._processes = processes
    for group in gpu_parts.GROUPS if "SECONDS" in os.environ else ():
        object.__setattr__(group, "seconds", int(os.environ["SECONDS"]))
    from isthmus.platforms.gpu_sensors import GpuReading, Throttle

    class Sensors:
        read = staticmethod(lambda: GpuReading(61.0, float("nan"), 1755.0, Throttle.POWER))

    def opened(run, certified):
        run.sensors = Sensors
        path, device = run.chosen.out / "results.json", {"device": "a GPU", "source_sha256": "0" * 64}
        new = {"certificate": certified | device, "dry": False, "models": {}, "parts": {}}
        return json.loads(path.read_text()) if path.exists() else new
    gpu_parts.Run._open_result = opened
    sys.exit(gpu_parts.main(sys.argv[2:]))
"""
"""A program whose parts are quick, stand still, or fail; processes, limits and results are those of gpu_parts.py."""


@pytest.fixture
def scene(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "scene.py").write_text(SCENE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), str(repository / "benchmarks"), str(repository / "src")])
    )
    parts = "probes,llama-1b/isthmus,moe-layer,export"
    return [
        sys.executable,
        "scene.py",
        str(repository / "benchmarks"),
        "--parts",
        parts,
        "--out",
        str(tmp_path / "out"),
    ]


def test_a_run_of_parts_is_cut_and_continued(scene: list[str], tmp_path: Path) -> None:
    """What was measured before the cut is kept, what does not fit is named, and a failure does not stop the rest."""
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    first = run([*scene, "--limit-s", "9"])
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    # 9 s are less than the estimate of each part.
    assert first.returncode == 1 and {part["state"] for part in parts.values()} == {"left out"}
    assert "probes/run" in first.stdout and "left out: it takes about 45 s, " in first.stdout
    assert "- `export/run`: left out: it takes about 180 s" in (tmp_path / "out" / "summary.md").read_text()
    with subprocess.Popen([*scene, "--limit-s", "600"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        _wait_for(tmp_path / "out" / "results.json", '"loss"', times=3)
        process.terminate()
        assert process.wait(30) == 143
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert parts["probes/run"]["state"] == "done" and parts["llama-1b/isthmus"]["state"] == "cut"
    summary = (tmp_path / "out" / "summary.md").read_text()
    (line,) = [item for item in summary.splitlines() if "| llama-1b | isthmus | 20 (cut after 2 timed steps) |" in item]
    assert line.endswith("| 1755, 61 |")  # the power is unknown
    others = [item for item in scene if item != scene[4]]
    others.insert(4, "probes,moe-layer,export")
    last = run([*others, "--limit-s", "600"])
    assert last.returncode == 1 and "done before" in last.stdout
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {"probes/run": "done", "llama-1b/isthmus": "cut", "moe-layer/run": "failed", "export/run": "done"}
    assert "- `moe-layer/run`: ValueError: a reason" in (tmp_path / "out" / "summary.md").read_text()


def test_the_limit_ends_a_part(scene: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS", "1")
    started_s = time.monotonic()
    subprocess.run([*scene, "--limit-s", "10"], cwd=tmp_path, capture_output=True, timeout=60)
    assert time.monotonic() - started_s < 10
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {
        "probes/run": "done", "llama-1b/isthmus": "cut", "moe-layer/run": "left out", "export/run": "left out",
    }  # fmt: skip
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "- `export/run`: left out: it takes about 1 s, 0 s remained" in summary


def test_a_killed_run_has_its_results(scene: list[str], tmp_path: Path) -> None:
    """And leaves no process that uses the GPU."""
    with subprocess.Popen([*scene, "--limit-s", "600"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        _wait_for(tmp_path / "out" / "summary.md", "| 20 (running after 2 timed steps) |")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert "| first | 1 GB/s |" in (tmp_path / "out" / "summary.md").read_text()
    deadline_s = time.monotonic() + 30
    while any(
        Path("/proc", pid).exists() and "zombie" not in Path("/proc", pid, "status").read_text() for pid in children
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _wait_for(path: Path, text: str, times: int = 1) -> None:
    deadline_s = time.monotonic() + 60
    while not (path.exists() and path.read_text().count(text) >= times):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_tests_have_an_outcome_each(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that passed before a cut do not run again."""
    rows: Any = importlib.import_module("gpu_turns.rows")
    file, path = tmp_path / "test_three.py", tmp_path / "rows.jsonl"
    file.write_text(
        "import pathlib, pytest\n"
        "def test_a(record_property): record_property('graphs', 2)\n"
        "def test_b(): assert pathlib.Path('there').exists(), 'not there'\n"
        "def test_c(): pytest.skip('two GPUs')\n"
    )
    monkeypatch.setenv(rows.ROWS, str(path))
    monkeypatch.setenv("PYTHONPATH", str(repository / "benchmarks"))
    command = [sys.executable, "-m", "pytest", file.name, "-p", "gpu_turns.outcomes", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    first = rows.of_kind(rows.read(path), "test")
    assert [row["outcome"] for row in first] == ["passed", "failed", "skipped"]
    assert first[0]["recorded"] == {"graphs": 2} and "not there" in first[1]["why"] and "two GPUs" in first[2]["why"]
    (tmp_path / "there").touch()
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert [row["name"] for row in rows.of_kind(rows.read(path), "test")[3:]] == ["test_three.py::test_b"]


SANITIZER = """#!/bin/sh
while [ "$1" != --log-file ]; do options="$options $1"; shift; done
log=$2; shift 2
echo "========= Invalid __global__ read of size 4 bytes" > "$log"
echo "========= ERROR SUMMARY: $ERRORS errors" >> "$log"
echo "$options" > options
exec "$@"
"""
"""A program with the arguments and the report of compute-sanitizer, which finds as many errors as it is told."""


@pytest.mark.parametrize("errors", [0, 2])
def test_memory_errors_are_counted(errors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer, tests_turn, rows = (
        importlib.import_module(f"gpu_turns.{name}") for name in ("sanitizer_turn", "tests_turn", "rows")
    )
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    for name in sanitizer.FILES:
        (folder / f"test_{name}.py").write_text(
            "import os\n"
            "def test_values(): assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
            "def test_memory_peak(): assert False\n"
        )
    program = tmp_path / sanitizer.PROGRAM
    program.write_text(SANITIZER)
    program.chmod(0o755)
    for module in (sanitizer, tests_turn):
        monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    benchmarks = Path(tests_turn.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(benchmarks))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ERRORS", str(errors))
    monkeypatch.setenv(rows.ROWS, str(tmp_path / "rows.jsonl"))
    spec = {"log": str(tmp_path / "tests.txt")}
    if errors:
        with pytest.raises(RuntimeError, match="memcheck: 2 errors, the first is: Invalid __global__ read of size 4"):
            sanitizer.run(spec)
    else:
        sanitizer.run(spec)
    written = rows.read(tmp_path / "rows.jsonl")
    assert [row["outcome"] for row in rows.of_kind(written, "test")] == ["passed"] * len(sanitizer.FILES)
    (row,) = rows.of_kind(written, "sanitizer")
    assert row["errors"] == errors and "--tool memcheck" in (tmp_path / "options").read_text()
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(importlib.import_module("gpu_turns.cases").Absent, match="compute-sanitizer is not installed"):
        sanitizer.run(spec)


def test_bytes_of_a_region() -> None:
    """A tensor that is passed twice, an expanded dimension and a result that is a view count once or not at all."""
    moved: Any = importlib.import_module("gpu_turns.bandwidth_turn").moved_bytes
    x, scale = torch.zeros(6, 4), torch.zeros(6, 1)
    assert moved((x, x, 1e-5), x + 1) == 2 * 6 * 4 * 4
    assert moved((x, scale.expand(6, 4), None), (x.view(24), x.half())) == 6 * 4 * 4 + 6 * 4 + 6 * 4 * 2
    assert moved((x[:, :2],), torch.zeros(6)) == 6 * 2 * 4 + 6 * 4


def _run(losses: list[float], *, norm: float = 1.0, seconds: float = 1.0, flops: float = 1e12) -> dict[str, Any]:
    steps = [
        {"kind": "step", "at_s": 0, "time_s": seconds, "tokens": 100, "flops": flops, "loss": loss, "grad_norm": norm,
         "memory_gib": 1} for loss in losses
    ]  # fmt: skip
    fact = {"kind": "fact", "peak_tflops": 2.0, "warmup_steps": 3, "timed_steps": 8, "precision": "bf16"}
    return {"state": "done", "seconds": 1.0, "sensors": [], "rows": [fact, *steps]}


def test_aims_are_judged() -> None:
    """The speed of a contestant that trained something else counts for nothing."""
    summary: Any = importlib.import_module("gpu_turns.summary")
    losses = [12.0 - 0.1 * step for step in range(11)]
    parts = {
        "llama-1b/isthmus": _run(losses),
        "llama-1b/isthmus-again": _run(losses, seconds=0.5),
        "llama-1b/isthmus-fp8": _run(losses, seconds=0.6),
        "llama-1b/transformers-compiled": _run([*losses[:10], losses[10] * 1.003], seconds=0.1),
        "llama-1b/trainer-compiled": _run([loss * 1.0015 for loss in losses], seconds=1.5),
        "layers-8b/isthmus": _run(losses),
        "layers-8b/trainer-compiled": _run(losses, norm=1.02),
        "moe-layer/run": {"rows": [{"kind": "layer", "contestant": "isthmus", "model": "mixtral", "mfu": 0.39}]},
        "generation/isthmus": {"rows": _generated(71.0)},
        "generation/transformers-compiled": {"rows": _generated(80.0)},
    }
    values = {aim["aim"]: (aim["got"] and round(aim["got"], 3), aim["met"]) for aim in summary.aims(parts)}
    assert values["llama-1b: MFU in bf16"] == (0.5, True)
    assert values["llama-1b: tokens/s of FP8 / bf16"] == (1.111, False)  # of the mean of both runs in bf16
    assert values["llama-1b: tokens/s of isthmus / transformers-compiled"] == (None, None)
    assert values["llama-1b: tokens/s of isthmus / trainer-compiled"] == (2.25, True)
    assert values["layers-8b: tokens/s of isthmus / trainer-compiled"] == (None, None)
    assert values["MoE layer mixtral: MFU in bf16"] == (0.39, False)
    assert values["generation of 1 answers: share of the bound"] == (0.71, True)
    assert values["generation of 1 answers: tokens/s of isthmus / transformers-compiled"] == (0.887, False)
    assert values["qwen-0.6b: tokens/s of isthmus / transformers-compiled"] == (None, None)
    assert summary.not_the_same(parts, "llama-1b", "transformers-compiled").startswith("loss of step 11 is ")
    assert summary.not_the_same(parts, "layers-8b", "trainer-compiled") == "first gradient norm 1.02, Isthmus has 1"


def _generated(rate: float) -> list[dict[str, Any]]:
    return [{"kind": "generation", "sequences": 1, "tokens": rate, "time_s": 1.0, "bound_tokens_per_s": 100.0}]


@pytest.mark.slow
def test_broken_attention_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights the first loss is that of a uniform guess in any case, but gradient norms differ."""
    cases, measure, rows, plain_model, workload = (
        importlib.import_module(f"gpu_turns.{name}") for name in ("cases", "measure", "rows", "plain_model", "workload")
    )
    monkeypatch.setenv(rows.ROWS, str(tmp_path / "rows.jsonl"))
    fields = {"weights": str(tmp_path / "model"), "tokens": str(tmp_path / "tokens"), "platform": "cpu", "dry": True}
    turn = cases.Turn(**fields, seq_length=32, accumulation=1, timed_steps=8, profiled_steps=0, model="plain")
    workload.run({"model": "llama-1b", "weights": turn.weights, "turn": turn.spec(), "device": "cpu", "dry": True})
    runs = []
    for causal in (True, False):
        attend = F.scaled_dot_product_attention
        monkeypatch.setattr(
            plain_model.F, "scaled_dot_product_attention",
            lambda *a, causal=causal, attend=attend, is_causal, **k: attend(*a, is_causal=causal, **k),
        )  # fmt: skip
        model = plain_model.load_plain(tmp_path / "model", torch.device("cpu"))
        optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-4), []
        for step in torch.load(tmp_path / "tokens" / "steps.pt"):
            loss = model(step[0]["ids"][None], step[0]["labels"][None]) / 32
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append({"loss": loss.item(), "grad_norm": norm.item()})
        runs.append(steps)
        monkeypatch.setattr(plain_model.F, "scaled_dot_product_attention", attend)
    assert abs(runs[1][0]["loss"] / runs[0][0]["loss"] - 1) < measure.LOSS_TOLERANCE["bf16"]
    assert measure.difference(runs[0], runs[0], "bf16") is None
    assert "gradient norm" in measure.difference(runs[0], runs[1], "bf16")


@pytest.mark.parametrize("case", ["llama-1b", "qwen-0.6b"])
def test_plain_model_equals_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    cases: Any = importlib.import_module("gpu_turns.cases")
    monkeypatch.setenv(importlib.import_module("gpu_turns.rows").ROWS, str(tmp_path / "rows.jsonl"))
    spec = {"model": case, "weights": str(tmp_path / "model"), "turn": None, "device": "cpu", "dry": True}
    importlib.import_module("gpu_turns.workload").run(spec)
    plain = importlib.import_module("gpu_turns.plain_model").load_plain(tmp_path / "model", torch.device("cpu"))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(cases.TINY["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(plain.logits(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_quick_parts_fit_into_their_time() -> None:
    """With a minute for the set-up and the folder of a model."""
    gpu_parts, table = (importlib.import_module(name) for name in ("gpu_parts", "gpu_turns.parts"))
    estimate = sum(part.group.seconds for part in table.PARTS if part.quick)
    assert estimate + 60 <= gpu_parts.QUICK_S
    chosen: Any = gpu_parts.parse(["--quick"])
    assert chosen.limit_s == gpu_parts.QUICK_S == 540 and all(part.quick for part in chosen.selected)


def test_the_shares_of_a_step_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step_cost: Any = importlib.import_module("step_cost")
    monkeypatch.setitem(step_cost.MODELS, "llama3-70b", (1, 8192, 8))
    (row,), (no_plan,) = (
        step_cost.plans([model], [gpu], "bf16") for model, gpu in (("llama3-8b", "H100"), ("llama3-70b", "A10"))
    )
    shares = [int(part.rpartition(" ")[2].rstrip("%")) for part in row[-1].split(", ")]
    assert 97 <= sum(shares) <= 103  # rounded
    assert row[0] == "llama3-8b, 8 x H100" and no_plan[1] == "does not fit"
