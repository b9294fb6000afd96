"""Advantages of each loss, from rewards of two groups; the expected numbers are computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from isthmus.config.schema.grpo import GrpoConfig
from isthmus.recipes.rollout.advantages import advantages, has_variance, length_penalties

REWARDS = np.array([1.0, 0.0, 0.0, 3.0, 2.0, 2.0, 2.0, 2.0])
"""Two groups of four, means 1 and 2."""
CENTERED = np.array([0.0, -1.0, -1.0, 2.0, 0.0, 0.0, 0.0, 0.0])


def test_divided_by_the_deviation_of_the_group() -> None:
    expected = CENTERED / (math.sqrt(6 / 3) + 1e-4)  # a group of equal rewards has no advantages
    assert advantages(REWARDS, 4, GrpoConfig(loss="grpo")) == pytest.approx(expected)


def test_not_divided() -> None:
    assert advantages(REWARDS, 4, GrpoConfig(loss="dr_grpo")) == pytest.approx(CENTERED)


def test_divided_by_the_deviation_of_all_rewards() -> None:
    settings = GrpoConfig(loss="grpo", scale_advantages="batch")
    variance = np.sum((REWARDS - 1.5) ** 2) / 7
    assert advantages(REWARDS, 4, settings) == pytest.approx(CENTERED / (math.sqrt(variance) + 1e-4))


def test_normalized_over_the_batch() -> None:
    expected = CENTERED / (math.sqrt(6 / 7) + 1e-4)
    assert advantages(REWARDS, 4, GrpoConfig(loss="reinforce_pp")) == pytest.approx(expected)


def test_relative_to_the_others_of_the_group() -> None:
    others = np.array([3 / 3, 4 / 3, 4 / 3, 1 / 3, 2, 2, 2, 2])
    assert advantages(REWARDS, 4, GrpoConfig(loss="rloo")) == pytest.approx(REWARDS - others)


@pytest.mark.parametrize("loss", ["grpo", "rloo"])
def test_an_answer_without_a_reward_has_no_part(loss: str) -> None:
    rewards = np.array([1.0, 0.0, math.nan, 2.0])
    expected = advantages(np.array([1.0, 0.0, 2.0]), 3, GrpoConfig(loss=loss))  # type: ignore[arg-type]
    result = advantages(rewards, 4, GrpoConfig(loss=loss))  # type: ignore[arg-type]
    assert result[2] == 0 and result[[0, 1, 3]] == pytest.approx(expected)


def test_groups_without_variance() -> None:
    rewards = np.array([1.0, 1.0, 0.0, 1.0, math.nan, 1.0, math.nan, math.nan])
    assert has_variance(rewards, 2).tolist() == [False, True, False, False]


def test_penalty_of_long_answers() -> None:
    lengths = np.array([50, 80, 90, 100])
    assert length_penalties(lengths, 100, 20).tolist() == [0, 0, -0.5, -1]
    assert length_penalties(lengths, 100, 0).tolist() == [0, 0, 0, 0]
