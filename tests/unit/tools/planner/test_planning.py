"""Plans: what fits, what is fixed, what is refused, and what is nearest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import parse_and_run
from isthmus.config.load import load_config
from isthmus.config.model_file import read_model
from isthmus.errors import UsageError
from isthmus.recipes.plan.memory_estimate import estimate_memory
from isthmus.tools.planner.planned_gpus import CONTEXT_BYTES, parse_machine
from isthmus.tools.planner.planning import Plans, make_plans
from isthmus.tools.planner.render import as_json, as_text, as_words

BASE = ["train.steps=10", "data.seq_length=4096"]


def plans(*words: str, model: str = "llama3.1-8b", gpus: str | None = "8xH100", **options: Any) -> Plans:
    machine = parse_machine(gpus, options.pop("memory", None), options.pop("nodes", 1))
    return make_plans(f"preset:{model}", None, [*BASE, *words], machine, **options)


def test_plans_fit_and_are_ordered_by_the_time_of_a_step() -> None:
    found = plans(number=4)
    assert len(found.best) == 4 and found.closest is None
    times = [candidate.time.total_s for candidate in found.best if candidate.time is not None]
    assert len(times) == 4 and times == sorted(times)
    assert all(each.needed_bytes + CONTEXT_BYTES <= found.machine.memory_bytes for each in found.best)
    result = as_json(found)
    for one in result["plans"]:
        parts = dict(one["memory_bytes"])
        assert parts.pop("total") == sum(parts.values())
        assert one["step"]["seconds"] == pytest.approx(sum(one["step"]["parts_s"].values()), rel=0.01)
    assert result["plans"][0]["step"]["tokens_per_s"] == pytest.approx(16 * 4096 / times[0], rel=1e-6)


def test_a_plan_has_the_memory_that_a_run_checks_and_settings_that_a_run_accepts() -> None:
    from dataclasses import replace

    found = plans("parallel.tp=2", "train.recompute=full")
    (best, *_) = found.best
    run = load_config(
        "pretrain", None, [*BASE, *as_words(best.config).split()], {"model": "m", "out": "o", "data": ["d"]}
    )
    assert (run.parallel.tp, run.train.recompute) == (2, "full")
    plan = replace(found.plan, parallel=run.parallel, world_size=8)
    memory = estimate_memory(plan, run, "bf16", gpu_bytes=found.machine.memory_bytes, compiles=True)
    assert memory == best.memory


def test_given_settings_are_fixed_and_impossible_ones_are_refused() -> None:
    found = plans("parallel.tp=4", "parallel.cp=2", "train.micro_batch_size=1", number=9)
    assert {(one.config.parallel.tp, one.config.parallel.cp) for one in found.best} == {(4, 2)}
    assert {one.config.train.micro_batch_size for one in found.best} == {1}
    in_bucket = plans(
        "data.length_buckets=[8192]", "train.global_batch_size=64", model="llama3.2-1b", recipe="sft", number=99
    ).best
    assert {1, 2} >= {one.config.train.micro_batch_size for one in in_bucket}
    assert any(one.config.parallel.dp(8) == 8 for one in in_bucket)
    with pytest.raises(UsageError, match=r"tp=3 does not divide"):
        plans("parallel.tp=3")
    with pytest.raises(UsageError, match=r"A100 80 GB has no fp8 matrix cores\. Use bf16 or fp16 or fp32\."):
        plans("train.precision=fp8", gpus="8xA100")
    with pytest.raises(UsageError, match=r"lora with parallel\.fsdp=true"):
        plans("lora.rank=8", "parallel.fsdp=true")


def test_what_does_not_fit_names_the_closest_layout_and_what_fits() -> None:
    found = plans(model="llama3.1-70b")
    assert not found.best and found.closest is not None and found.closest.config.train.recompute == "full"
    text = as_text(found, explained=False)
    assert "does not fit: at least" in text and "closest: tp=8" in text
    assert any(line.startswith("on 16 x H100 of 79.2 GiB: ") for line in found.suggestions)
    assert any(line.startswith("with lora.rank=16: ") for line in found.suggestions)
    freed = plans("parallel.tp=1", "parallel.pp=1", model="llama3.1-8b", gpus=None, memory="30GiB")
    assert not freed.best and any("x GPU of 30.0 GiB" in line for line in freed.suggestions)


def test_experts_latent_attention_and_long_sequences() -> None:
    experts = plans(model="deepseek-v2-lite", gpus="8xMI300X")
    assert any(one.config.parallel.ep > 1 for one in experts.best)
    long = plans("data.seq_length=131072", "train.global_batch_size=8", nodes=2)
    assert long.best and all(one.config.parallel.cp > 1 or one.config.train.recompute == "full" for one in long.best)
    alone = plans("lora.rank=16", gpus=None, memory="80GiB")
    assert alone.best[0].time is None and "no step times" in as_text(alone, explained=True)


@pytest.mark.parametrize("given", ["optim.offload=true", "parallel.overlap_grad_reduce=true"])
def test_plans_leave_out_fsdp_with_settings_that_a_run_refuses(given: str) -> None:
    assert any(one.config.parallel.fsdp for one in plans(model="llama3.2-1b", number=30).best)
    assert not any(one.config.parallel.fsdp for one in plans(given, model="llama3.2-1b", number=30).best)
    with pytest.raises(UsageError, match=r"fsdp=true"):
        plans(given, "parallel.fsdp=true", model="llama3.2-1b")


@pytest.mark.parametrize(("gpus", "nodes", "batch"), [("6xH100", 2, 24), ("8xH100", 3, 24), ("4xGB200", 18, 72)])
def test_numbers_of_gpus_that_are_no_powers_of_two(gpus: str, nodes: int, batch: int) -> None:
    found = plans(model="llama3.2-1b", gpus=gpus, nodes=nodes, number=99)
    assert found.config.train.global_batch_size == batch
    layouts = [one.config.parallel for one in found.best]
    assert any(layout.dp(found.machine.world_size) == found.machine.world_size for layout in layouts)
    assert all(found.machine.gpus_per_node % layout.tp == 0 for layout in layouts)  # within a node


def test_16384_ranks_need_few_estimates() -> None:
    found = plans(model="llama3.1-70b", nodes=2048)
    assert found.machine.world_size == 16384 and found.best
    assert found.evaluated < 500
    assert found.config.train.global_batch_size == 1024  # 4 Mi tokens of a step


@pytest.mark.parametrize(
    ("gpus", "memory", "message"),
    [
        (None, None, "Give --gpus, such as 8xMI300X, or --memory"),
        ("8", None, "does not name a GPU"),
        ("0xH100", None, "was not understood"),
        ("8xMI300Z", None, "Did you mean MI300"),
        (None, "much", "was not understood"),
        (None, "512MiB", "is less than the 1 GiB"),
    ],
)
def test_a_machine_that_is_not_understood(gpus: str | None, memory: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_machine(gpus, memory, 1)


def test_the_command_reads_a_config_json_and_a_run_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(read_model("preset:llama3.2-1b")))
    run = tmp_path / "run.yaml"
    run.write_text("recipe: dpo\nmodel: gone\ndata: {files: [pairs.jsonl], seq_length: 1024}\nparallel: {tp: 2}\n")
    words = ["plan", str(file), str(run), "--gpus", "2xMI300X", "--top", "2"]
    assert parse_and_run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == "dpo" and found["parameters"] == 1_235_814_400
    assert found["plans"][0]["settings"]["parallel.tp"] == 2
    assert parse_and_run([*words, "--explain"]) == 0
    text = capsys.readouterr().out
    assert (
        "gradients: 4 bytes x 617,940,992 trained parameters" in text and "settings of plan 1:\n  parallel.tp=2" in text
    )
    assert parse_and_run(["plan", "preset:llama3.1-70b", "--memory", "10GiB"]) == 1
    assert "does not fit" in capsys.readouterr().out
    with pytest.raises(UsageError, match="which model is the plan for"):
        parse_and_run(["plan", "--gpus", "8xH100"])
