"""Router replay: training with the experts that a rollout chose, in every layout, and with a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ranks import grpo_tasks
from ranks.policy_tasks import BATCH, fixed_answers
from ranks.rank_pool import RankPool
from ranks.test_grpo import build_policy, exact_part, steps_of
from ranks.test_layouts import TOLERANCE
from ranks.test_policy_loss import TRAIN as TRAIN_POLICY
from ranks.tiny import build_model_folder, load_network
from ranks.transformers_vllm import TransformersVllm, route

EXPERTS = (2, 6, 2)
"""Layers, experts, experts per token."""


@pytest.fixture(scope="module")
def policy(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("policy") / "model"
    model = build_model_folder(folder, "qwen3_moe", num_hidden_layers=2, norm_topk_prob=True)
    return {"model": model, "samples": samples, "grpo": {}, "experts": EXPERTS, "steps": 1}


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, policy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A step, with its gradients in the file ``saved``."""
    saved = tmp_path_factory.mktemp("alone") / "gradients"
    return one_rank.run(TRAIN_POLICY, **policy, saved=saved) | {"saved": saved}


def test_losses_and_gradients_equal_transformers_with_these_experts(
    policy: dict[str, Any], alone: dict[str, Any]
) -> None:
    """Of the clipped loss."""
    network = load_network(policy["model"], dtype=torch.float32)
    answers, chosen = fixed_answers(steps=1, experts=EXPERTS), list[Tensor]()
    for layer in network.model.layers:
        layer.mlp.gate.forward = partial(route, layer.mlp.gate, lambda logits: chosen.pop(0))
    total, count = torch.zeros(()), 0
    assert answers.routed_experts is not None and answers.old_logps is not None
    for k in range(BATCH):
        tokens = torch.tensor([*answers.prompts[k], *answers.answers[k]])
        chosen += torch.from_numpy(answers.routed_experts[k]).long().unbind(1)
        logps = network(tokens[None, :-1]).logits[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        ratios = (logps[-len(answers.answers[k]) :].double() - torch.from_numpy(answers.old_logps[k])).exp()
        advantage = float(answers.advantages[k])
        total = total - torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.28) * advantage).sum()
        count += len(ratios)
    (total / count).backward()
    assert alone["loss"][0] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    theirs = {name: parameter.grad for name, parameter in network.named_parameters()}
    for name, gradient in load_file(alone["saved"]).items():
        layer, _, expert = name.partition(".mlp.experts.")
        if expert:
            number, kind = int(expert.split(".")[0]), expert.split(".")[1]
            stacked = theirs[f"{layer}.mlp.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"][number]
            expected = stacked if kind == "down_proj" else stacked.chunk(2)[kind == "up_proj"]
        else:
            expected = theirs[name]
        assert float((gradient - expected).abs().max() / expected.abs().max()) < 1e-5, name


@pytest.mark.thorough_cases("micro-batch-1", "dp2", "cp2", "recomputed-pp2")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"micro_batch_size": 1, "packing": False}, id="micro-batch-1"),
        pytest.param(2, {"tp": 2, "sp": True}, id="tp2-sp"),
        pytest.param(2, {"tp": 2, "sp": False, "recompute": "full"}, id="recomputed-tp2"),
        pytest.param(2, {"ep": 2}, id="ep2"),
        pytest.param(2, {"pp": 2}, id="pp2"),
        pytest.param(2, {"pp": 2, "recompute": "full"}, id="recomputed-pp2"),
        pytest.param(2, {"cp": 2}, id="cp2"),
        pytest.param(2, {}, id="dp2"),
    ],
)
def test_layout_equals_a_single_process(
    ranks: int, layout: dict[str, Any], policy: dict[str, Any], alone: dict[str, Any], worlds: dict[int, RankPool]
) -> None:
    result = worlds[ranks].run(TRAIN_POLICY, **policy, **layout)
    for curve in ("loss", "grad_norm"):
        assert result[curve] == pytest.approx(alone[curve], rel=TOLERANCE)
    for load, expected in zip(result["load"], alone["load"], strict=True):
        assert load == pytest.approx(expected, abs=1e-9)
        assert 0.8 < load["replay_differences"] < 1  # of 15 pairs of experts, one is that of the router


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("served") / "model", "qwen3_moe", num_hidden_layers=2)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"Write {n % 3}.", "vowel": "aeiou"[n % 5]}) + "\n" for n in range(16))
    )
    server = TransformersVllm(model)
    settings = {
        "rollout.engine": "vllm",
        "rollout.url": [server.url],
        "rollout.reward": f"{grpo_tasks.__file__}:parity",
        "train.micro_batch_size": 4,
        "train.steps": 4,
        "grpo.updates_per_rollout": 2,
        "grpo.kl_weight": 0.1,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
        "data.valid_fraction": 0,
        "train.eval_every": 0,
    }
    yield {"model": model, "data": prompts, "settings": settings}
    server.close()


@pytest.fixture(scope="module")
def served(one_rank: RankPool, run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    out = tmp_path_factory.mktemp("served") / "run"
    one_rank.run("ranks.grpo_tasks.train", **run, out=out)
    return out


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return steps_of([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def test_training_computes_the_log_probabilities_of_the_server(
    one_rank: RankPool, run: dict[str, Any], served: Path, tmp_path: Path
) -> None:
    rows = rows_of(served)
    assert len(rows) == 4 and all(row["logp_difference_max"] < 1e-5 for row in rows)
    assert all(0.05 < row["moe_replay_differences"] < 0.9 for row in rows)
    settings = run["settings"] | {"rollout.router_replay": False, "train.steps": 1, "grpo.updates_per_rollout": 1}
    (row,) = steps_of(one_rank.run("ranks.grpo_tasks.train", **run | {"settings": settings}, out=tmp_path / "run"))
    assert row["logp_difference_max"] > 1e-3 and "moe_replay_differences" not in row


@pytest.mark.thorough_cases("prompts-not-shared")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"train.share_prefixes": False}, id="prompts-not-shared"),
        pytest.param(2, {"parallel.tp": 2, "parallel.sp": True}, id="tp2-sp"),
    ],
)
def test_a_served_run_in_a_layout(
    ranks: int, layout: dict[str, Any], worlds: dict[int, RankPool], run: dict[str, Any], served: Path, tmp_path: Path
) -> None:
    settings = run["settings"] | layout
    rows = steps_of(worlds[ranks].run("ranks.grpo_tasks.train", **run | {"settings": settings}, out=tmp_path / "run"))
    for row, expected in zip(rows, rows_of(served), strict=True):
        assert row["logp_difference_max"] < 1e-5
        assert row["reward"] == expected["reward"] if "reward" in expected else "reward" not in row
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("done", [1])
def test_a_resumed_run_replays_the_same_experts(
    done: int, one_rank: RankPool, run: dict[str, Any], served: Path, tmp_path: Path
) -> None:
    """In the middle of the updates on a rollout, bit for bit."""
    settings = run["settings"] | {"checkpoint.resume": served / "checkpoints" / f"iter_{done:07d}"}
    rows = steps_of(one_rank.run("ranks.grpo_tasks.train", **run | {"settings": settings}, out=tmp_path / "run"))
    assert [exact_part(row) for row in rows] == [exact_part(row) for row in rows_of(served)[done:]]
