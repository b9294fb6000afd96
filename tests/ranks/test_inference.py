"""Scores and greedy answers of the parallel model equal those of transformers, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Decoding
from isthmus.engine.step import Evaluator
from isthmus.recipes.model.load_model import build_from_folder
from ranks.rank_pool import RankPool
from ranks.tiny import VOCAB, build_model_folder

NEW_TOKENS = 5
PROMPTS = [[3, 17, 4, 60, 9], [8], [22, 22, 5, 41, 70, 2, 6, 33, 50], [11, 76]]


def answer(*, model: str, ends: list[int], temperature: float = 0.0, **parallel: Any) -> dict[str, Any]:
    """Task of a rank: scores and continuations of the prompts."""
    built = build_from_folder(model, parallel)
    inference = Inference(Evaluator(built.stages), built.plan.architecture, ParallelConfig(**parallel), batch_tokens=16)
    decoding = Decoding(NEW_TOKENS, ends, temperature, seed=3)
    return {
        "scores": inference.score([(prompt, len(prompt) - 1) for prompt in PROMPTS if len(prompt) > 1]),
        "answers": inference.generate(PROMPTS, decoding),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    # Logits that differ much: float32 rounding must not decide which token is the most probable.
    kinds = {"dense": "qwen3", "moe": "qwen3_moe"}
    return {name: build_model_folder(root / name, kind, initializer_range=0.5) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    values = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        greedy = [
            model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]
        scores = []
        for prompt in (torch.tensor(prompt) for prompt in PROMPTS if len(prompt) > 1):
            logits = model(prompt[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, prompt[1:], reduction="none")
            scores.append([losses.tolist(), logits.argmax(-1).tolist()])
        values[name] = {"answers": greedy, "scores": scores}
    return values


@pytest.mark.parametrize(
    ("ranks", "model", "layout"),
    [
        pytest.param(1, "dense", {}, id="one"),
        pytest.param(4, "dense", {"tp": 2, "sp": True, "pp": 2}, id="tp2-sp-pp2"),
        pytest.param(4, "dense", {"cp": 2}, id="cp2-dp2"),
        pytest.param(4, "dense", {"fsdp": True, "tp": 2}, id="fsdp2-tp2"),
        pytest.param(4, "moe", {"pp": 2, "vpp": 2, "ep": 2}, id="pp2-vpp2-ep2"),
    ],
)
def test_scores_and_greedy_answers_equal_those_of_transformers(
    ranks: int,
    model: str,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    folders: dict[str, Path],
    expected: dict[str, dict[str, Any]],
) -> None:
    expected_values = expected[model]
    # An answer ends with an end token: the third one of the first answer is one.
    end = expected_values["answers"][0][2]
    results = worlds[ranks].run("ranks.test_inference.answer", model=folders[model], ends=[end], **layout)
    cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected_values["answers"]]
    assert results["answers"] == cut and len(cut[0]) < NEW_TOKENS
    for (losses, tokens), (right_losses, right_tokens) in zip(
        results["scores"], expected_values["scores"], strict=True
    ):
        assert tokens == right_tokens
        assert losses == pytest.approx(right_losses, abs=1e-4)


def test_random_answers_do_not_depend_on_the_layout(worlds: dict[int, RankPool], folders: dict[str, Path]) -> None:
    settings = {"model": folders["dense"], "ends": [], "temperature": 2.0}
    alone = worlds[1].run("ranks.test_inference.answer", **settings)["answers"]
    split = worlds[4].run("ranks.test_inference.answer", **settings, tp=2, sp=True, cp=2)["answers"]
    assert split == alone
    assert all(0 <= token < VOCAB for tokens in alone for token in tokens)
    assert len({token for tokens in alone for token in tokens}) > NEW_TOKENS
