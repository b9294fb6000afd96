"""Settings of grpo: names of rewards, and values that would have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config.load import load_config
from isthmus.config.schema.grpo import RolloutConfig
from isthmus.errors import UsageError


def test_names_of_rewards_are_unique() -> None:
    rewards = ("a.py:score", "b.py:score", "runs/my-model", "other/my-model", "format:<a>", "exact_match:gold")
    names = RolloutConfig(reward=rewards).reward_names
    assert names == ("score", "score-2", "my-model", "my-model-2", "format", "exact_match")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grpo.max_generations": 3}, "needs dynamic_sampling=true"),
        ({"grpo.correction_cap": 2.0}, "needs a correction"),
        ({"rollout.batch_size": 8, "rollout.engine": "vllm"}, "is for engine=native"),
        ({"rollout.url": ["http://a:1"]}, "is for engine=vllm"),
        ({"rollout.reward_weights": [1.0, 2.0]}, "give one for each"),
        ({"train.global_batch_size": 12}, "multiple of rollout.group_size=8; use 8 or 16"),
        ({"rollout.ahead": 1}, "gradient is biased; set grpo.correction=token"),
        ({"rollout.ahead": 2, "grpo.correction": "token"}, "rollout.ahead"),
        ({"rollout.offload": True, "rollout.engine": "vllm"}, "got engine=vllm, whose memory does not change"),
        ({"rollout.max_new_tokens": 4096}, "leaves no room for a prompt"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    flags = {"model": "m", "out": "o", "data": ["d.jsonl"], "rollout.reward": "exact_match"}
    with pytest.raises(UsageError, match=message):
        load_config("grpo", None, flags=flags | settings)
