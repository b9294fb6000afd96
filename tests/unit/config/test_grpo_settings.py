"""Settings of grpo: names of rewards, and values that would have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config.load import load_config
from isthmus.config.schema.grpo import SHIPPED_REWARDS, RolloutConfig
from isthmus.errors import UsageError
from isthmus.recipes.rollout import rewards


def test_names_of_rewards_are_unique() -> None:
    settings = ("a.py:score", "b.py:score", "runs/my-model", "other/my-model/", "format:a/<b:c>", "exact_match:gold")
    names = RolloutConfig(reward=settings).reward_names
    assert names == ("score", "score-2", "my-model", "my-model-2", "format", "exact_match")
    settings = ("my.rewards:score", "score-2", "folder/score-2", "x/y.py:score", "format:a", "format:b")
    names = RolloutConfig(reward=settings).reward_names
    assert names == ("score", "score-2", "score-2-2", "score-3", "format", "format-2")


def test_all_rewards_of_isthmus_have_their_names() -> None:
    assert set(rewards._SHIPPED) == set(SHIPPED_REWARDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grpo.max_generations": 3}, "needs dynamic_sampling=true"),
        ({"grpo.correction_cap": 2.0}, "needs a correction"),
        ({"grpo.kl_estimator": "k1"}, "kl_estimator=k1 needs kl_weight above 0"),
        ({"grpo.kl_ratio": False}, "kl_ratio=False needs kl_weight above 0"),
        ({"grpo.kl_ratio": False, "grpo.kl_weight": 0.1, "grpo.loss": "rloo"}, "and another loss than rloo"),
        ({"rollout.batch_size": 8, "rollout.engine": "vllm"}, "is for engine=native"),
        ({"rollout.url": ["http://a:1"]}, "is for engine=vllm"),
        ({"rollout.transfer": "group"}, "transfer=group is for running servers, and there is no url"),
        ({"rollout.reward_weights": [1.0, 2.0]}, "give one for each"),
        ({"train.global_batch_size": 12}, "multiple of rollout.group_size=8; use 8 or 16"),
        ({"rollout.ahead": 1}, "gradient is biased; set grpo.correction=token"),
        ({"rollout.ahead": 2, "grpo.correction": "token"}, "rollout.ahead"),
        ({"rollout.offload": True, "rollout.engine": "vllm"}, "got engine=vllm, whose memory does not change"),
        ({"rollout.router_replay": True}, "router_replay=true is for engine=vllm, got native"),
        ({"rollout.max_new_tokens": 4096}, "leaves no room for a prompt"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    flags = {"model": "m", "out": "o", "data": ["d.jsonl"], "rollout.reward": "exact_match"}
    with pytest.raises(UsageError, match=message):
        load_config("grpo", None, flags=flags | settings)
