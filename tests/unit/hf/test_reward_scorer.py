"""Scores of a reward model equal those of transformers on each text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, IsthmusError, MissingInput, UsageError
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.reward_scorer import RewardScorer
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.recipes.rollout.rewards import check_rewards, load_rewards

Q = [{"role": "user", "content": "the sea?"}]
ANSWERS = ["wide", "the sea is wide and blue", ""]
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_labels": 1,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = train_tokenizer(["the sea is wide and blue"], vocab_size=270)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    settings = SIZES | {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model: Any = Qwen3ForSequenceClassification(Qwen3Config(**settings))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    copy = tmp_path / "reward_model"
    copy.mkdir()
    for path in base.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config(folder: Path) -> RunConfig:
    values = {"recipe": "grpo", "out": "run", "model": {"path": "model"}, "data": {"files": ["data.jsonl"]}}
    return RunConfig.model_validate(values | {"rollout": {"reward": [str(folder)]}})


def expected_scores(folder: Path, texts: list[str]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        rows = [torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]) for text in texts]
        return [float(model(row).logits[0, 0]) for row in rows]


@pytest.mark.slow
def test_messages_are_rendered_with_the_template_of_the_model(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [
        str(tokenizer.apply_chat_template([*Q, {"role": "assistant", "content": answer}], tokenize=False))
        for answer in ANSWERS
    ]
    scores = RewardScorer(ModelFolder.open(base), CPU)([Q] * 3, ANSWERS)
    assert scores == pytest.approx(expected_scores(base, texts), abs=1e-5)
    assert len({*scores}) == 3


@pytest.mark.slow
def test_texts_are_concatenated(base: Path) -> None:
    scores = RewardScorer(ModelFolder.open(base), CPU)(["the sea"] * 3, ANSWERS)
    assert scores == pytest.approx(expected_scores(base, [f"the sea{answer}" for answer in ANSWERS]), abs=1e-5)


def test_batches_are_bounded_by_tokens(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = RewardScorer(ModelFolder.open(base), CPU)
    scores, sizes = scorer(["the sea"] * 3, ANSWERS), list[tuple[int, ...]]()
    monkeypatch.setattr("isthmus.hf.reward_scorer._BATCH_TOKENS", 20)
    scorer._model.register_forward_pre_hook(
        lambda _, arguments, named: sizes.append(tuple(arguments[0].shape)), with_kwargs=True
    )
    assert scorer(["the sea"] * 3, ANSWERS) == pytest.approx(scores, abs=1e-5)
    assert len(sizes) > 1 and all(rows == 1 or rows * length <= 20 for rows, length in sizes)


def test_the_reward_of_a_run(base: Path) -> None:
    check_rewards(config(base))
    records = [{"prompt": Q, "answer": None}] * 3
    table = load_rewards(config(base), CPU).compute(records, ANSWERS, [[1]] * 3)
    assert table.totals.tolist() == RewardScorer(ModelFolder.open(base), CPU)([Q] * 3, ANSWERS)


def test_a_run_folder_has_its_export(base: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hf").symlink_to(base)
    check_rewards(config(tmp_path / "run"))


def test_messages_need_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="has no chat template for prompts of messages"):
        RewardScorer(ModelFolder.open(folder), CPU)([Q], ["a"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is not a reward model: its architecture is Qwen3ForCausalLM"),
        ({"architectures": None}, "is not a reward model: its architecture is nothing"),
        ({"id2label": {"0": "good", "1": "bad"}}, "is a classifier with 2 labels, expected 1"),
        ({"id2label": None}, "is a classifier with 2 labels, expected 1"),
    ],
)
def test_models_without_one_score(folder: Path, changes: dict[str, Any], why: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(UsageError, match=f"^rollout.reward {folder} {why}"):
        check_rewards(config(folder))


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "error", "why"),
    [
        (without_head, DataError, "has no tensor for score.weight"),
        (lambda folder: (folder / "model.safetensors").unlink(), MissingInput, "has no weights"),
        (lambda folder: (folder / "tokenizer.json").unlink(), IsthmusError, "tokenizer"),
    ],
)
def test_damaged_models(folder: Path, damage: Any, error: type[IsthmusError], why: str) -> None:
    damage(folder)
    with pytest.raises(error, match=why):
        load_rewards(config(folder), CPU)
