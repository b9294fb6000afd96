"""All benchmarks run, report their claims, and their certificates contain no local paths."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CERTIFICATE = {"date", "commit", "dirty", "command", "platform", "cpu", "cores", "python", "packages"}


QUICK = ("--quick", "--rounds", "1", "--threads", "1")


def run(repository: Path, out: Path, script: str, *arguments: str, common: Sequence[str] = QUICK) -> dict[str, Any]:
    command = [sys.executable, str(repository / "benchmarks" / script), *common]
    done = subprocess.run(
        [*command, "--out", str(out), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["certificate"].keys() >= CERTIFICATE
    assert str(out.parent) not in json.dumps(result)
    return result


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [{"role": "user", "content": "Continue counting."}, {"role": "assistant", "content": ""}]
    with path.open("w") as file:
        for number in range(40):
            answer = " ".join(str(number + offset) for offset in range(1, 4 + number % 7))
            file.write(json.dumps({"messages": [turns[0], turns[1] | {"content": answer}]}) + "\n")
    return path


@pytest.mark.benchmarks
def test_fine_tuning(repository: Path, chats: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(chats), "--precision", "fp32", "--only", "isthmus"]
    result = run(repository, tmp_path / "sft.json", "sft_cpu.py", *arguments)
    rows = {row["contestant"]: row for row in result["rows"]}
    assert list(rows) == ["isthmus"]
    assert all(row["tokens_per_s"] > 0 and row["peak_rss_gib"] > 0 for row in rows.values())
    assert 0 < rows["isthmus"]["executed_share_of_ceiling"] < rows["isthmus"]["all_logits_share_of_ceiling"]
    assert rows["isthmus"]["executed_share_of_ceiling"] <= rows["isthmus"]["executed_share_of_torch_mm"]
    shares = [rows["isthmus"][f"executed_share_of_{library}_beside"] for library in ("torch_mm", "faster")]
    assert shares[0] >= shares[1] > 0
    assert sum(result["profile"]["isthmus fp32"]["percent"].values()) == pytest.approx(100, abs=0.1)


@pytest.mark.benchmarks
@pytest.mark.parametrize("quantize", [[], ["--quantize", "nf4"]])
def test_lora(quantize: list[str], repository: Path, tmp_path: Path) -> None:
    arguments = ["--only", "isthmus,trainer-padded,trl", "--samples", "8"]
    result = run(repository, tmp_path / "lora.json", "lora.py", *arguments, *quantize)
    losses = [row["first_loss"] for row in result["rows"]]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-4) and len(result["claims"]) == 2


@pytest.mark.benchmarks
def test_prepare_engines(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'isthmus[ray]'")
    result = run(repository, tmp_path / "engines.json", "prepare_engines.py")
    assert result["kills"] == result["kills"] | {"kills": 1, "tokens_lost": 0, "same_bytes": True}
    assert [row["engine"] for row in result["rows"]] == ["local", "ray"]


@pytest.mark.benchmarks
def test_large_index(repository: Path, tmp_path: Path) -> None:
    result = run(repository, tmp_path / "index.json", "large_index.py")
    assert [row["step"] for row in result["rows"]] == ["open", "windows", "split", "pack"]
    assert [claim["holds"] for claim in result["claims"][:2]] == [True, True]


@pytest.mark.benchmarks
def test_loading(repository: Path, tmp_path: Path) -> None:
    arguments = ["--precision", "fp32", "--only", "isthmus-training,from-pretrained-own"]
    result = run(repository, tmp_path / "load.json", "load_weights.py", *arguments)
    rows = {row["contestant"]: row for row in result["rows"]}
    assert all(row["time_s"] > 0 for row in rows.values())
    assert rows["isthmus-training"]["weight_bytes"] == rows["from-pretrained-own"]["weight_bytes"]


@pytest.mark.benchmarks
def test_conversion(repository: Path, tmp_path: Path) -> None:
    contestants = ["cp", "hf-to-torch_dist", "verify"]
    arguments = ["--models", "1.5gb", "--only", ",".join(contestants), "--work", str(tmp_path)]
    result = run(repository, tmp_path / "convert.json", "convert.py", *arguments)
    rows = {row["contestant"]: row for row in result["rows"]}
    assert list(rows) == contestants
    assert all(row["time_s"] > row["import_s"] >= 0 and row["gb_per_s"] > 0 for row in rows.values())
    assert rows["hf-to-torch_dist"]["time_vs_cp"] == pytest.approx(
        rows["hf-to-torch_dist"]["time_s"] / rows["cp"]["time_s"], rel=1e-4
    )
    assert [(claim["wanted"], claim["holds"]) for claim in result["claims"] if "memory" in claim["claim"]] == [
        ("<= 1.0", True)
    ] * 2
    assert not list(tmp_path.glob("isthmus-bench-*"))


@pytest.mark.benchmarks
def test_preparing(repository: Path, tmp_path: Path) -> None:
    result = run(repository, tmp_path / "prepare.json", "prepare.py", "--only", "encode-batch,isthmus")
    tokens = {(row["data"], row["contestant"]): row["tokens"] for row in result["rows"]}
    assert tokens["chat", "isthmus"] == tokens["chat", "encode-batch"] > 0
    num_documents = result["data"]["text"]["records"]
    assert (
        tokens["text", "isthmus"] == tokens["text", "encode-batch"] + num_documents > tokens["text-quarter", "isthmus"]
    )
    assert [claim["claim"].split(":")[0] for claim in result["claims"]][:2] == ["text", "chat"]


@pytest.mark.benchmarks
def test_moe_layer(repository: Path, tmp_path: Path) -> None:
    result = run(repository, tmp_path / "moe.json", "moe_layer.py")
    rows = [(row["model"], row["precision"], row["contestant"]) for row in result["rows"]]
    assert len(set(rows)) == len(rows) == 2 * 2 * 6
    assert all(row["time_s"] > 0 and row["tokens"] == 32 for row in result["rows"])
    layers = [row for row in result["rows"] if row["contestant"] != "matmuls only"]
    assert max(row["max_difference_from_isthmus"] for row in layers if row["precision"] == "fp32") < 1e-5


@pytest.mark.benchmarks
def test_layers(repository: Path, tmp_path: Path) -> None:
    result = run(repository, tmp_path / "layers.json", "layers.py")
    rows = [(row["kind"], row["precision"], row["contestant"]) for row in result["rows"]]
    assert len(set(rows)) == len(rows) == 2 * (3 * 3 + 2)  # megatron-core has no layer with latent attention
    assert all(row["time_s"] > 0 and row["tokens"] == 64 for row in result["rows"])
    layers = [row for row in result["rows"] if row["contestant"] != "matmuls only"]
    assert max(row["max_difference_from_isthmus"] for row in layers if row["precision"] == "fp32") < 1e-5


@pytest.mark.benchmarks
def test_generation(repository: Path, tmp_path: Path) -> None:
    contestants = ["isthmus", "generate", "generate_batch", "recomputed"]
    options = ("--precision", "fp32", "--models", "demo", "--contestants", ",".join(contestants))
    rows = run(repository, tmp_path / "generation.json", "generation.py", *options)["rows"]
    assert [row["contestant"] for row in rows] == contestants
    assert all(row["time_s"] > 0 and row["same_answers"] for row in rows)


@pytest.mark.benchmarks
def test_grpo(repository: Path, tmp_path: Path) -> None:
    rows = run(repository, tmp_path / "grpo.json", "grpo.py")["rows"]
    assert [row["contestant"] for row in rows] == ["isthmus", "trl"]
    assert all(row["step_s"] > 0 and row["answer_tokens"] == 4 for row in rows)


@pytest.mark.benchmarks
def test_vllm_rollouts(repository: Path, tmp_path: Path) -> None:
    (row,) = run(repository, tmp_path / "vllm.json", "vllm_rollouts.py", "--only", "native-fp32")["rows"]
    assert [step["step"] for step in row["steps"]] == [1, 2] and len(row["answers"]) == 2
    assert all(step["logp_difference_max"] < 1e-5 and step["weights_s"] < 1 for step in row["steps"])


@pytest.mark.benchmarks
def test_first_line(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "line.json"
    command = [sys.executable, str(repository / "benchmarks" / "first_line.py"), "--rounds", "1", "--out", str(out)]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    result = json.loads(out.read_text())
    assert 0 < result["first_line_s"] < result["second_line_s"]


@pytest.mark.benchmarks
def test_tune(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "tune.json"
    command = [sys.executable, str(repository / "benchmarks" / "tune.py"), "--quick", "--out", str(out)]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    result = json.loads(out.read_text())
    assert [row["precision"] for row in result["rows"]] == ["fp32", "bf16"]
    assert all(row["default_ms"] > 0 and row["tuned_ms"] > 0 and len(row["matmuls"]) == 15 for row in result["rows"])


@pytest.mark.benchmarks
def test_shared_cores(repository: Path, chats: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(chats), "--steps", "4", "--others", "0", "--only", "isthmus-1"]
    result = run(repository, tmp_path / "shared.json", "shared_cores.py", *arguments)
    (row,) = result["rows"]
    assert (row["contestant"], row["others"]) == ("isthmus-1", 0) and row["tokens_per_s"] > 0


def test_costs_per_tensor_and_per_gb_are_fitted(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    spec = importlib.util.spec_from_file_location("convert_benchmark", repository / "benchmarks" / "convert.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = [(311, 1.5e9), (278, 6.0e9), (20001, 13e6)]
    rows = [
        {"contestant": "verify", "tensors": n, "bytes": size, "import_s": 0.1, "time_s": 0.1 + n * 2e-4 + size * 7e-10}
        for n, size in sizes
    ]
    cost = module.costs(rows)["verify"]
    assert (cost["ms_per_tensor"], cost["s_per_gb"]) == pytest.approx((0.2, 0.7))
    assert cost["projected_deepseek_v3"] == pytest.approx({"one_disk_s": 508, "16_workers_s": 18 + 490 / 16})
    assert "verify" not in module.costs(rows[:2])


def test_unknown_contestant_is_refused(repository: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "load_weights.py"), "--only", "isthmos"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "not known: isthmos" in done.stderr


@pytest.mark.benchmarks
def test_asynchronous_checkpoints(repository: Path, tmp_path: Path) -> None:
    result = run(repository, tmp_path / "async.json", "async_checkpoint.py")
    behind, here = result["runs"]
    assert behind["steps_during_write"] > 0 == here["steps_during_write"] and behind["blocked_s"] < here["blocked_s"]


@pytest.mark.benchmarks
def test_copies_in_memory(repository: Path, tmp_path: Path) -> None:
    result = run(repository, tmp_path / "copies.json", "memory_copies.py")
    runs = {row["contestant"]: row for row in result["runs"]}
    assert len(runs) == 4 and all(row["saves"] == 2 and row["write_s"] > 0 for row in runs.values())
    # A machine has the files of both ranks.
    assert runs["copy in memory"]["bytes_in_a_folder"] >= runs["files"]["bytes_in_a_folder"] * 0.9


@pytest.mark.benchmarks
def test_coverage(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "coverage.json"
    command = [sys.executable, str(repository / "benchmarks" / "coverage.py"), "--quick", "--out", str(out)]
    state = ["--state", str(tmp_path / "state.json")]
    assert subprocess.run([*command, *state], capture_output=True, timeout=300).returncode == 0
    result = json.loads(out.read_text())
    assert result["certificate"].keys() >= CERTIFICATE and str(tmp_path) not in json.dumps(result)
    rows = {row["type"]: row for row in result["rows"]}
    assert {name: row["result"] for name, row in rows.items()} == {
        "llama": "native", "mixtral": "native", "ovis2": "refused", "rwkv": "refused"
    }  # fmt: skip
    assert all(row["max_abs_difference"] < 1e-4 for row in rows.values() if row["result"] != "refused")
    # With the state, nothing is measured again.
    assert subprocess.run([*command, *state], capture_output=True, timeout=300).returncode == 0
    assert json.loads(out.read_text())["rows"] == result["rows"]


@pytest.mark.benchmarks
def test_same_numbers(repository: Path, tmp_path: Path) -> None:
    """A tree equals itself, and a changed number is found."""
    script = [sys.executable, str(repository / "benchmarks" / "same_numbers.py")]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    subprocess.run([*script, "inputs", "--out", str(tmp_path / "inputs")], check=True, timeout=300)
    for out in (first, second):
        tree = ["--source", str(repository), "--inputs", str(tmp_path / "inputs"), "--out", str(out)]
        subprocess.run([*script, "run", *tree, "--only", "label smoothing"], check=True, timeout=300)
    compare = [*script, "compare", str(first), str(second)]
    assert subprocess.run(compare, timeout=60).returncode == 0
    case = json.loads(second.read_text())
    case["train sft label smoothing"]["numbers"][0]["loss"] = (1.0).hex()
    second.write_text(json.dumps(case))
    changed = subprocess.run(compare, capture_output=True, text=True, timeout=60)
    assert changed.returncode == 1 and "DIFFERENT  train sft label smoothing  /numbers/0/loss" in changed.stdout
    speed = ["speed", str(repository), str(repository), "--inputs", str(tmp_path / "inputs"), "--rounds", "1"]
    printed = subprocess.run([*script, *speed], check=True, capture_output=True, text=True, timeout=300).stdout
    assert [line.split()[0] for line in printed.splitlines()] == ["startup_s", "tokens_per_s"]


@pytest.mark.benchmarks
def test_kernels_of_a_step(repository: Path, tmp_path: Path) -> None:
    small = ("--models=", "--traced", "qwen3-0.6b", "--tokens", "256")
    kernels = run(repository, tmp_path / "kernels.json", "step_cost.py", common=small)["kernels"]
    layer = kernels["a layer of qwen3-0.6b, forward and backward"]
    assert layer["outside of regions"] >= 14 and layer["compiled regions"] > 0 and layer["synchronizations"] == 0
    assert kernels["the rest of a step"]["synchronizations"] == 1


@pytest.mark.benchmarks
def test_region_calls(repository: Path, tmp_path: Path) -> None:
    result = run(repository, tmp_path / "regions.json", "region_calls.py", common=("--rounds", "2"))
    assert len(result["microseconds"]) == 6
    assert all(time > 0 for times in result["microseconds"].values() for time in times.values())
    assert result["ratio to isthmus"]["isthmus"] == 1
