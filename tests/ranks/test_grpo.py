"""GRPO in every layout equals GRPO in one process: the same answers, rewards and losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from ranks import grpo_tasks
from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder

TRAIN = "ranks.grpo_tasks.train"
EXACT = ("reward", "answer_tokens", "answer_tokens_max", "truncated", "groups_without_variance", "loss_tokens")


def build_policy(folder: Path, family: str, **sizes: Any) -> Path:
    tokenizer = train_tokenizer(["the sea and the sky"], vocab_size=270)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    build_model_folder(folder, family, vocab_size=len(tokenizer), **ends, **sizes)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"prompt": f"Write {n % 3 + 1} of the letter.", "vowel": "aeiou"[n % 5]} for n in range(16)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return {
        "dense": build_policy(folder / "dense", "qwen3"),
        "experts": build_policy(folder / "experts", "qwen3_moe", num_hidden_layers=2),
        "adapters": folder / "dense",
    }


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, models: dict[str, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: one_rank.run(
            TRAIN, model=model, data=prompts, out=folder / name, settings=SETTINGS | FURTHER.get(name, {})
        )
        for name, model in models.items()
    }


SETTINGS: dict[str, Any] = {"train.micro_batch_size": 4, "grpo.kl_weight": 0.1}
FURTHER: dict[str, dict[str, Any]] = {"adapters": {"lora.rank": 4, "optim.lr": 1e-2}}
"""Settings by model."""


def steps_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "loss" in row]


def assert_same_run(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row, other in zip(steps_of(rows), steps_of(expected), strict=True):
        assert {name: row[name] for name in EXACT} == {name: other[name] for name in EXACT}
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert row["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-6)
    valid, other_valid = ([row["valid_reward"] for row in r if "valid_reward" in row] for r in (rows, expected))
    assert valid == pytest.approx(other_valid, abs=1e-12)


@pytest.mark.thorough_cases("lora-tp2", "micro-batch-1-unpacked", "cp2", "dp2", "fsdp2", "hsdp")
@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [
        pytest.param("dense", 1, {"train.micro_batch_size": 1, "data.packing": False}, id="micro-batch-1-unpacked"),
        pytest.param("dense", 1, {"train.share_prefixes": False}, id="prompts-not-shared"),
        pytest.param("dense", 2, {"parallel.tp": 2, "parallel.sp": True}, id="tp2-sp"),
        pytest.param("dense", 2, {"parallel.pp": 2}, id="pp2"),
        pytest.param("dense", 2, {}, id="dp2"),
        pytest.param("dense", 2, {"parallel.cp": 2}, id="cp2"),
        pytest.param("dense", 2, {"parallel.fsdp": True}, id="fsdp2"),
        pytest.param("dense", 4, {"parallel.fsdp": 2, "train.micro_batch_size": 2}, id="hsdp"),
        pytest.param("experts", 2, {"parallel.ep": 2}, id="ep2"),
        pytest.param("adapters", 2, {"parallel.tp": 2}, id="lora-tp2"),
    ],
)
def test_layout_equals_a_single_process(
    model: str,
    ranks: int,
    layout: dict[str, Any],
    models: dict[str, Path],
    prompts: Path,
    alone: Any,
    worlds: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    settings = SETTINGS | FURTHER.get(model, {}) | layout
    rows = worlds[ranks].run(TRAIN, model=models[model], data=prompts, out=tmp_path / "run", settings=settings)
    assert_same_run(rows, alone[model])


@pytest.mark.parametrize("model", ["dense", "experts", "adapters"])
def test_generation_and_training_agree(model: str, alone: Any) -> None:
    rows = steps_of(alone[model])
    assert all(row["logp_difference_max"] < 1e-5 for row in rows)
    # The reference is the starting policy: of adapters, the base model.
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 1e-6


@pytest.mark.thorough_cases("all-1", "all-2", "dynamic-2")
@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True], ids=["all", "dynamic"])
def test_resumed_run_repeats_rollouts_bitwise(
    done: int, dynamic: bool, one_rank: RankPool, models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    """Also in the middle of the updates on a rollout."""
    settings = SETTINGS | {
        "grpo.updates_per_rollout": 2,
        "grpo.dynamic_sampling": dynamic,
        "rollout.reward": f"{grpo_tasks.__file__}:parity",
        "train.steps": 4,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
    }
    run = {"model": models["dense"], "data": prompts}
    expected = one_rank.run(TRAIN, **run, out=tmp_path / "run", settings=settings)
    first_updates = [row["step"] for row in steps_of(expected) if {"reward", "generation_s"} <= row.keys()]
    assert first_updates == [1, 3]
    resume = {"checkpoint.resume": tmp_path / "run" / "checkpoints" / f"iter_{done:07d}"}
    rows = one_rank.run(TRAIN, **run, out=tmp_path / "resumed", settings=settings | resume)
    assert [exact_part(row) for row in steps_of(rows)] == [exact_part(row) for row in steps_of(expected)[done:]]


def exact_part(row: dict[str, Any]) -> dict[str, Any]:
    """What does not measure time or memory."""
    measured = ("_s", "device", "memory_gib", "checksum")
    return {name: value for name, value in row.items() if not name.endswith(measured)}


def test_dynamic_sampling_replaces_groups_without_variance(
    one_rank: RankPool, models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | {
        "grpo.dynamic_sampling": True,
        "rollout.group_size": 2,
        "rollout.reward": f"{grpo_tasks.__file__}:parity",
    }
    rows = steps_of(one_rank.run(TRAIN, model=models["dense"], data=prompts, out=tmp_path / "run", settings=settings))
    assert any(row["groups_without_variance"] > 0 for row in rows)
    assert all(row["reward_std"] > 0 and row["loss_tokens"] > 0 for row in rows)


AHEAD: dict[str, Any] = {
    "rollout.ahead": 1,
    "rollout.reward": f"{grpo_tasks.__file__}:parity",
    "grpo.correction": "token",
    "train.steps": 4,
    "train.micro_batch_size": 4,
    "optim.lr": 3e-3,
    "optim.schedule": "constant",
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
}


@pytest.fixture(scope="module")
def ahead(
    one_rank: RankPool, models: dict[str, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Run folders by updates per rollout."""
    folder = tmp_path_factory.mktemp("ahead")
    for updates in (1, 2):
        settings = AHEAD | {"grpo.updates_per_rollout": updates}
        one_rank.run(TRAIN, model=models["dense"], data=prompts, out=folder / str(updates), settings=settings)
    return {updates: folder / str(updates) for updates in (1, 2)}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return steps_of([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


@pytest.mark.thorough_cases("2")
@pytest.mark.parametrize("updates", [1, 2])
def test_one_step_off_policy_equals_a_loop_written_by_hand(
    updates: int, one_rank: RankPool, ahead: dict[int, Path], models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    settings = AHEAD | {"grpo.updates_per_rollout": updates}
    run = {"model": models["dense"], "data": prompts, "out": tmp_path / "run", "settings": settings}
    losses, answers = one_rank.run("ranks.grpo_tasks.one_step_off_policy", **run)
    rows = rows_of(ahead[updates])
    assert [row["loss"] for row in rows] == losses
    # After the first update on a rollout, a checkpoint has the next one.
    first_updates = range(1, 4, updates)
    folders = [ahead[updates] / "checkpoints" / f"iter_{step:07d}" for step in first_updates]
    saved = one_rank.run("ranks.grpo_tasks.next_answers", checkpoints=folders)
    expected = [*answers[1:], None] if updates == 2 else answers[1:]
    assert saved == expected


def test_a_rollout_ahead_differs_from_training_by_its_age_alone(ahead: dict[int, Path]) -> None:
    """Generation is compared with the weights that generated; the correction is that for later weights."""
    rows = rows_of(ahead[1])
    assert all(row["logp_difference_max"] < 1e-5 for row in rows)
    assert rows[0]["correction_mean"] == pytest.approx(1, abs=1e-5)
    assert all(abs(row["correction_mean"] - 1) > 1e-4 for row in rows[1:])
    assert all(row["ratio_mean"] == 1 for row in rows)


@pytest.mark.thorough_cases("tp2-sp", "dp2")
@pytest.mark.parametrize(
    "layout", [{"parallel.tp": 2, "parallel.sp": True}, {"parallel.pp": 2}, {}], ids=["tp2-sp", "pp2", "dp2"]
)
def test_layout_equals_a_single_process_one_step_off_policy(
    layout: dict[str, Any],
    two_ranks: RankPool,
    ahead: dict[int, Path],
    models: dict[str, Path],
    prompts: Path,
    tmp_path: Path,
) -> None:
    settings = AHEAD | layout
    rows = two_ranks.run(TRAIN, model=models["dense"], data=prompts, out=tmp_path / "run", settings=settings)
    for row, other in zip(steps_of(rows), rows_of(ahead[1]), strict=True):
        assert {name: row[name] for name in EXACT} == {name: other[name] for name in EXACT}
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert row["correction_mean"] == pytest.approx(other["correction_mean"], rel=1e-4)


def test_a_state_that_leaves_during_generation_changes_nothing(
    one_rank: RankPool, ahead: dict[int, Path], models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    run = {"model": models["dense"], "data": prompts, "out": tmp_path / "run"}
    rows = one_rank.run("ranks.grpo_tasks.train_with_offload", **run, settings=AHEAD | {"rollout.offload": True})
    assert [exact_part(row) for row in steps_of(rows)] == [exact_part(row) for row in rows_of(ahead[1])]


@pytest.mark.thorough_cases("2-1", "1-1", "2-2")
@pytest.mark.parametrize(("updates", "done"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_resumed_run_repeats_rollouts_of_earlier_weights_bitwise(
    updates: int,
    done: int,
    one_rank: RankPool,
    ahead: dict[int, Path],
    models: dict[str, Path],
    prompts: Path,
    tmp_path: Path,
) -> None:
    checkpoint = ahead[updates] / "checkpoints" / f"iter_{done:07d}"
    settings = AHEAD | {"grpo.updates_per_rollout": updates, "checkpoint.resume": checkpoint}
    rows = one_rank.run(TRAIN, model=models["dense"], data=prompts, out=tmp_path / "run", settings=settings)
    assert [exact_part(row) for row in steps_of(rows)] == [exact_part(row) for row in rows_of(ahead[updates])[done:]]


@pytest.mark.thorough_cases("alone", "pp2", "dp2", "fsdp2", "hsdp", "ep2", "lora-tp2")
@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [
        pytest.param("dense", 1, {}, id="alone"),
        pytest.param("dense", 2, {"parallel.tp": 2}, id="tp2"),
        pytest.param("dense", 2, {"parallel.pp": 2}, id="pp2"),
        pytest.param("dense", 2, {}, id="dp2"),
        pytest.param("dense", 2, {"parallel.fsdp": True}, id="fsdp2"),
        pytest.param("dense", 4, {"parallel.fsdp": 2, "train.micro_batch_size": 2}, id="hsdp"),
        pytest.param("experts", 2, {"parallel.ep": 2}, id="ep2"),
        pytest.param("adapters", 2, {"parallel.tp": 2}, id="lora-tp2"),
    ],
)
def test_a_finished_run_with_more_steps_is_a_longer_run(
    model: str,
    ranks: int,
    layout: dict[str, Any],
    one_rank: RankPool,
    worlds: dict[int, RankPool],
    ahead: dict[int, Path],
    models: dict[str, Path],
    prompts: Path,
    tmp_path: Path,
) -> None:
    """The last checkpoint has the weights that generate the next rollout, in any layout."""
    run = {"model": models[model], "data": prompts}
    settings = AHEAD | FURTHER.get(model, {})
    worlds[ranks].run(TRAIN, **run, out=tmp_path / "run", settings=settings | layout | {"train.steps": 2})
    rows = steps_of(one_rank.run(TRAIN, **run, out=tmp_path / "run", settings=settings))
    if model == "dense":
        expected = rows_of(ahead[1])
    else:
        expected = steps_of(one_rank.run(TRAIN, **run, out=tmp_path / "longer", settings=settings))
    if ranks == 1:
        assert [exact_part(row) for row in rows] == [exact_part(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert {name: row[name] for name in EXACT} == {name: other[name] for name in EXACT}
        assert row["correction_mean"] == pytest.approx(other["correction_mean"], rel=1e-4)


@pytest.mark.thorough_cases("2")
@pytest.mark.parametrize("updates", [1, 2])
def test_a_stop_request_abandons_answers_of_earlier_weights(
    updates: int, one_rank: RankPool, ahead: dict[int, Path], models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    """The resumed run generates them again."""
    task, run = "ranks.grpo_tasks.train_beside", {"model": models["dense"], "data": prompts, "out": tmp_path / "run"}
    settings = AHEAD | {"grpo.updates_per_rollout": updates, "checkpoint.every": 0, "checkpoint.grace_s": 1e-6}
    message = one_rank.run(task, **run, settings=settings, stops_at=3)  # after an evaluation and the first rollout
    part = f"the rollout of step {updates + 1} was not completed"
    assert message.startswith(f"stopped after step {updates} of 4 as requested ({part}); the state is saved.")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "rollout"]
    assert f"the answers of the rollout of step {updates + 1} are abandoned" in event["text"]
    rows = steps_of(one_rank.run(task, **run, settings=settings))
    compared = [[exact_part(row) for row in part] for part in (rows, rows_of(ahead[updates]))]
    assert compared[0] == compared[1]


@pytest.mark.thorough_cases("pp2")
@pytest.mark.parametrize("layout", [{"parallel.pp": 2}, {"parallel.tp": 2, "parallel.sp": True}], ids=["pp2", "tp2-sp"])
def test_the_first_layer_that_differs_is_named(
    layout: dict[str, Any], two_ranks: RankPool, models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | layout | {"train.steps": 1}
    run = {"model": models["dense"], "data": prompts, "out": tmp_path / "run", "settings": settings}
    (row,) = steps_of(two_ranks.run(TRAIN, **run, disturbed_layer=1))
    assert row["logp_difference_max"] > 1e-3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "logp difference"]
    assert (event["layer"], event["first_token"]) == (1, 0)
    assert "The first difference is in layer 1 at token 1 of the answer" in event["text"]


def test_a_fault_of_a_rollout_ahead_is_named(
    one_rank: RankPool, models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    run = {"model": models["dense"], "data": prompts, "out": tmp_path / "run", "settings": AHEAD | {"train.steps": 2}}
    one_rank.run(TRAIN, **run, disturbed_layer=1)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "logp difference"] == [1, 2]
