"""Plans: what fits, what is fixed, what is refused, and what is nearest."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import parse_and_run
from isthmus.config.load import load_config
from isthmus.config.model_file import read_model
from isthmus.errors import MissingInput, UsageError
from isthmus.recipes.plan.memory_estimate import estimate_memory
from isthmus.tools.planner.planned_gpus import CONTEXT_BYTES, parse_machine
from isthmus.tools.planner.planning import Plans, make_plans
from isthmus.tools.planner.render import as_command, as_json, as_text, as_words

BASE = ["train.steps=10", "data.seq_length=4096"]


def plans(*words: str, model: str = "llama3.1-8b", gpus: str | None = "8xH100", **options: Any) -> Plans:
    machine = parse_machine(gpus, options.pop("memory", None), options.pop("nodes", 1))
    return make_plans(f"preset:{model}", None, [*BASE, *words], machine, **options)


@pytest.mark.slow
def test_plans_fit_and_are_ordered_by_the_time_of_a_step() -> None:
    results = plans(number=4)
    assert len(results.best) == 4 and results.closest is None
    times = [candidate.time.total_s for candidate in results.best if candidate.time is not None]
    assert len(times) == 4 and times == sorted(times)
    assert all(item.needed_bytes + CONTEXT_BYTES <= results.machine.memory_bytes for item in results.best)
    result = as_json(results)
    for entry in result["plans"]:
        parts = dict(entry["memory_bytes"])
        assert parts.pop("total") == sum(parts.values())
        assert entry["step"]["seconds"] == pytest.approx(sum(entry["step"]["parts_s"].values()), rel=0.01)
    assert result["plans"][0]["step"]["tokens_per_s"] == pytest.approx(16 * 4096 / times[0], rel=1e-6)


def test_a_plan_has_the_memory_that_a_run_checks_and_settings_that_a_run_accepts() -> None:
    from dataclasses import replace

    results = plans("parallel.tp=2", "train.recompute=full")
    (best, *_) = results.best
    run = load_config(
        "pretrain", None, [*BASE, *as_words(best.config).split()], {"model": "m", "out": "o", "data": ["d"]}
    )
    assert (run.parallel.tp, run.train.recompute) == (2, "full")
    plan = replace(results.plan, parallel=run.parallel, world_size=8)
    memory = estimate_memory(plan, run, "bf16", gpu_bytes=results.machine.memory_bytes, compiles=True)
    assert memory == best.memory


@pytest.mark.slow
def test_the_command_of_a_plan_has_recipe_model_ranks_and_every_given_setting(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("data: {files: [chats.jsonl]}\nlora: {alpha: 8}\n")
    overrides = ["lora.rank=8", "lora.targets=[q_proj, v_proj]", "optim.lr=1e-4", "train.global_batch_size=32"]
    results = make_plans("preset:llama3.2-1b", run, overrides, parse_machine("8xH100", None, 1), recipe="sft")
    words = shlex.split(as_command(results, results.best[0], [str(run), *overrides]))
    assert words[:7] == ["isthmus", "sft", str(run), "--model", "preset:llama3.2-1b", "--nproc", "8"]
    config = load_config("sft", run, words[7:], {"model": "preset:llama3.2-1b", "model.init": "random", "out": "o"})
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (8, 8, ("q_proj", "v_proj"))
    assert (config.optim.lr, config.train.global_batch_size) == (1e-4, 32)
    assert config.train.micro_batch_size == results.best[0].config.train.micro_batch_size
    assert len({word.partition("=")[0] for word in words[7:]}) == len(words[7:])


@pytest.mark.slow
def test_the_command_of_several_nodes_starts_torchrun_and_asks_for_data() -> None:
    results = plans(model="llama3.2-1b", gpus="16xMI300X", nodes=None)
    command = as_command(results, results.best[0], BASE)
    start = "torchrun --nnodes 2 --nproc-per-node 8 --node-rank $NODE_RANK --master-addr $MASTER_ADDR"
    assert command.startswith(
        f"{start} --master-port 29500 -m isthmus pretrain --model preset:llama3.2-1b --data DATA "
    )
    assert f"  {command}\n  or: isthmus launch slurm pretrain " in as_text(results, explained=False, given=BASE)


@pytest.mark.parametrize(
    ("gpus", "nodes", "layout"),
    [
        ("16xMI300X", None, (8, 2)),
        ("16xMI300X", 1, (16, 1)),
        ("8xMI300X", None, (8, 1)),
        ("72xGB200", None, (4, 18)),
        ("12xH100", None, (12, 1)),
    ],
)
def test_more_gpus_than_a_node_has_are_several_nodes(gpus: str, nodes: int | None, layout: tuple[int, int]) -> None:
    machine = parse_machine(gpus, None, nodes)
    assert (machine.gpus_per_node, machine.nodes) == layout


@pytest.mark.slow
@pytest.mark.parametrize(("margin", "warned"), [(0.02, True), (0.04, False)])
def test_a_plan_within_3_percent_of_the_memory_is_marked(margin: float, warned: bool) -> None:
    from dataclasses import replace

    results = plans(model="llama3.2-1b")
    memory = int(results.best[0].total_bytes / (1 - margin))
    results = replace(results, machine=replace(results.machine, memory_bytes=memory))
    assert ("within 3% of the memory" in as_text(results, explained=False)) is warned


@pytest.mark.slow
def test_a_hub_id_without_network_is_planned_with_its_preset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert parse_and_run(["plan", "Qwen/Qwen3-8B", "--gpus", "8xH100", "--recipe", "sft", "lora.rank=8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Qwen/Qwen3-8B: qwen3, 8,190,735,360 parameters") and "uses preset:qwen3-8b" in err
    assert "  isthmus sft --model Qwen/Qwen3-8B --data DATA --nproc 8 lora.rank=8 " in out
    with pytest.raises(MissingInput, match="is not in the Hub cache"):
        parse_and_run(["plan", "Qwen/Qwen3-9B", "--gpus", "8xH100"])


@pytest.mark.slow
def test_given_settings_are_fixed_and_impossible_ones_are_refused() -> None:
    results = plans("parallel.tp=4", "parallel.cp=2", "train.micro_batch_size=1", number=9)
    assert {(item.config.parallel.tp, item.config.parallel.cp) for item in results.best} == {(4, 2)}
    assert {item.config.train.micro_batch_size for item in results.best} == {1}
    in_bucket = plans(
        "data.length_buckets=[8192]", "train.global_batch_size=64", model="llama3.2-1b", recipe="sft", number=99
    ).best
    assert {1, 2} >= {item.config.train.micro_batch_size for item in in_bucket}
    assert any(item.config.parallel.dp(8) == 8 for item in in_bucket)
    with pytest.raises(UsageError, match=r"tp=3 does not divide"):
        plans("parallel.tp=3")
    with pytest.raises(UsageError, match=r"A100 80 GB has no fp8 matrix cores\. Use bf16 or fp16 or fp32\."):
        plans("train.precision=fp8", gpus="8xA100")
    for gpus, scaling, reason in (
        ("8xMI300X", "blockwise", "gfx942 has no blockwise FP8 kernels"),
        ("8xB200", "blockwise", "sm_100 has no blockwise FP8 kernels"),
        ("8xH100", "mxfp8", "sm_90 has no mxfp8 matrix cores"),
    ):
        with pytest.raises(UsageError, match=rf"{gpus[2:]} cannot run it, {reason}\. Use tensorwise or rowwise\."):
            plans("train.precision=fp8", f"train.fp8_scaling={scaling}", gpus=gpus)
    with pytest.raises(UsageError, match=r"lora with parallel\.fsdp"):
        plans("lora.rank=8", "parallel.fsdp=true")


@pytest.mark.slow
def test_what_does_not_fit_names_the_closest_layout_and_what_fits() -> None:
    results = plans(model="llama3.1-70b")
    assert not results.best and results.closest is not None and results.closest.config.train.recompute == "full"
    text = as_text(results, explained=False)
    assert "does not fit: at least" in text and "closest: tp=8" in text
    assert any(line.startswith("on 16 x H100 of 79.2 GiB: ") for line in results.suggestions)
    assert any(line.startswith("with lora.rank=16: ") for line in results.suggestions)
    freed = plans("parallel.tp=1", "parallel.pp=1", model="llama3.1-8b", gpus=None, memory="30GiB")
    assert not freed.best and any("x GPU of 30.0 GiB" in line for line in freed.suggestions)


@pytest.mark.slow
def test_experts_latent_attention_and_long_sequences() -> None:
    experts = plans(model="deepseek-v2-lite", gpus="8xMI300X")
    assert any(item.config.parallel.ep > 1 for item in experts.best)
    long = plans("data.seq_length=131072", "train.global_batch_size=8", nodes=2)
    assert long.best and all(item.config.parallel.cp > 1 or item.config.train.recompute == "full" for item in long.best)
    alone = plans("lora.rank=16", gpus=None, memory="80GiB")
    assert alone.best[0].time is None and "no step times" in as_text(alone, explained=True)


@pytest.mark.slow
def test_plans_of_several_nodes_have_copies_of_the_model() -> None:
    """HSDP over the GPUs of 1, 2, 4, ... nodes; a number of ranks may be fixed."""
    layouts = {item.config.parallel.fsdp for item in plans(nodes=8, number=1000).best}
    assert layouts >= {False, True, 8, 16, 32} and 64 not in layouts
    (fixed,) = {item.config.parallel.shards(64) for item in plans("parallel.fsdp=16", nodes=8, number=1000).best}
    assert fixed == 16
    assert not any(item.config.parallel.fsdp not in (False, True) for item in plans(number=1000).best)


@pytest.mark.slow
@pytest.mark.parametrize("override", ["optim.offload=true", "parallel.overlap_grad_reduce=true"])
def test_plans_leave_out_fsdp_with_settings_that_a_run_refuses(override: str) -> None:
    assert any(item.config.parallel.fsdp for item in plans(model="llama3.2-1b", number=30).best)
    assert not any(item.config.parallel.fsdp for item in plans(override, model="llama3.2-1b", number=30).best)
    with pytest.raises(UsageError, match=r"fsdp "):
        plans(override, "parallel.fsdp=true", model="llama3.2-1b")


@pytest.mark.slow
@pytest.mark.sweep_cases("8xH100-3-24")
@pytest.mark.parametrize(("gpus", "nodes", "batch"), [("6xH100", 2, 24), ("8xH100", 3, 24), ("4xGB200", 18, 72)])
def test_numbers_of_gpus_that_are_no_powers_of_two(gpus: str, nodes: int, batch: int) -> None:
    results = plans(model="llama3.2-1b", gpus=gpus, nodes=nodes, number=99)
    assert results.config.train.global_batch_size == batch
    layouts = [item.config.parallel for item in results.best]
    assert any(layout.dp(results.machine.world_size) == results.machine.world_size for layout in layouts)
    assert all(results.machine.gpus_per_node % layout.tp == 0 for layout in layouts)  # within a node


@pytest.mark.slow
def test_16384_ranks_need_few_estimates() -> None:
    results = plans(model="llama3.1-70b", nodes=2048)
    assert results.machine.world_size == 16384 and results.best
    assert results.evaluated < 500
    assert results.config.train.global_batch_size == 1024  # 4 Mi tokens of a step


@pytest.mark.parametrize(
    ("gpus", "memory", "message"),
    [
        (None, None, "Give --gpus, such as 8xMI300X, or --memory"),
        ("8", None, "does not name a GPU"),
        ("0xH100", None, "was not understood"),
        ("8xMI300Z", None, "Did you mean MI300"),
        ("H100x8", None, r"Did you mean 8xH100\?"),
        (None, "much", "was not understood"),
        (None, "512MiB", "is less than the 1 GiB"),
    ],
)
def test_a_machine_that_is_not_understood(gpus: str | None, memory: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_machine(gpus, memory, 1)


@pytest.mark.slow
def test_the_command_reads_a_config_json_and_a_run_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(read_model("preset:llama3.2-1b")))
    run = tmp_path / "run.yaml"
    run.write_text("recipe: dpo\nmodel: gone\ndata: {files: [pairs.jsonl], seq_length: 1024}\nparallel: {tp: 2}\n")
    words = ["plan", str(file), str(run), "--gpus", "2xMI300X", "--top", "2"]
    assert parse_and_run([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipe"] == "dpo" and result["parameters"] == 1_235_814_400
    assert result["plans"][0]["settings"]["parallel.tp"] == 2
    assert parse_and_run([*words, "--explain"]) == 0
    text = capsys.readouterr().out
    assert (
        "gradients: 4 bytes x 617,940,992 trained parameters" in text and "settings of plan 1:\n  parallel.tp=2" in text
    )
    assert parse_and_run(["plan", "preset:llama3.1-70b", "--memory", "10GiB"]) == 1
    assert "does not fit" in capsys.readouterr().out
    with pytest.raises(UsageError, match="which model is the plan for"):
        parse_and_run(["plan", "--gpus", "8xH100"])


@pytest.mark.slow
def test_a_plan_with_vllm_says_that_generation_is_not_in_the_time_of_a_step() -> None:
    note = "without generation and the transfer of weights"
    words = ("rollout.reward=exact_match", "data.seq_length=2048")
    native, vllm = (
        plans(*words, f"rollout.engine={engine}", model="llama3.2-1b", recipe="grpo", number=1)
        for engine in ("native", "vllm")
    )
    assert native.best[0].time is not None and native.best[0].time.parts["generation"] > 0
    assert vllm.best[0].time is not None and vllm.best[0].time.parts.get("generation", 0) == 0
    assert note in as_text(vllm, explained=False) and note not in as_text(native, explained=False)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [128, 2048])
def test_a_plan_of_many_nodes_has_start_saves_failures_and_traffic(nodes: int) -> None:
    words = ("parallel.tp=8", "parallel.pp=16", "parallel.vpp=1", "train.global_batch_size=2048", "parallel.ep=1")
    results = plans(*words, model="llama3.1-405b", gpus="8xH100", nodes=nodes)
    text = as_text(results, explained=False)
    for part in ("a rank of plan 1 sends", "start ", "a checkpoint has 5,682 GB", "a failure every", "goodput"):
        assert part in text
    assert "isthmus launch slurm pretrain --model preset:llama3.1-405b" in text
    assert f"--gpus 8xH100 launch.nodes={nodes}" in text
    entry = as_json(results)["plans"][0]
    json.dumps(entry)
    assert 0.9 < entry["run"]["files"]["goodput"] < entry["run"]["memory"]["goodput"] < 1
    assert set(entry["step"]["sent_bytes"]) >= {"tp", "pp", "dp"}
    assert entry["step"]["sent_bytes"]["tp"]["to_nodes"] == 0 < entry["step"]["sent_bytes"]["dp"]["to_nodes"]


@pytest.mark.slow
def test_one_node_has_no_long_run() -> None:
    assert "run" not in as_json(plans(number=1))["plans"][0]
    assert "goodput" not in as_text(plans(number=1), explained=False)


def test_replicas_send_gradients_and_weights_once_in_a_step() -> None:
    """2 nodes, tp=pp=cp=1: float32 gradients and bf16 weights of the whole model, 15/16 of them from each rank."""
    (best, *_) = plans("parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.fsdp=false", nodes=2).best
    assert best.time is not None
    assert best.time.sent["dp"].total == pytest.approx(6 * 8_030_261_248 * 15 / 16, rel=0.001)


@pytest.mark.slow
def test_racks_change_the_order_of_plans() -> None:
    """With a slow network between racks, the best plan sends less between them."""
    from dataclasses import replace

    machine = parse_machine("8xH100", None, 64)
    racks = replace(machine, rack_nodes=8, oversubscription=64.0)
    words = [*BASE, "train.global_batch_size=512", "parallel.vpp=1", "parallel.cp=1"]
    flat, slow = (make_plans("preset:llama3.1-70b", None, words, each, number=1).best[0] for each in (machine, racks))
    assert flat.time is not None and slow.time is not None
    assert slow.time.total_s > flat.time.total_s
    (again,) = make_plans(
        "preset:llama3.1-70b", None, [*words, *shlex.split(as_words(flat.config))], racks, number=1
    ).best
    assert again.time is not None and again.time.total_s >= slow.time.total_s


@pytest.mark.slow
def test_hsdp_and_context_parallelism_over_nodes_are_among_the_layouts() -> None:
    from isthmus.tools.planner.search import Search

    results = plans("data.seq_length=131072", "parallel.vpp=1", nodes=4)
    search = Search(results.plan, results.config, "bf16", results.machine, {"data.seq_length", "parallel.vpp"})
    layouts = [candidate.config.parallel for candidate in search.fitting]
    assert any(layout.tp * layout.cp > 8 for layout in layouts)
    assert any(type(layout.fsdp) is int and layout.fsdp > 1 for layout in layouts)
