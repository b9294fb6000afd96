"""Lengths of the samples for comparing logits."""

from __future__ import annotations

import pytest

from isthmus.convert.verify.compare_logits import random_samples, sample_lengths
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.rotary import RopeScaling
from isthmus.families.registry import all_families
from ranks.tiny import SIZES

PLAIN = all_families()["llama"].to_architecture({"model_type": "llama", "rms_norm_eps": 1e-6, **SIZES})
WINDOW = PLAIN.with_settings({"sliding_window": 100})
SCALED = PLAIN.with_settings(
    {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=200)}
)
LINEAR = PLAIN.with_settings({"rope_scaling": RopeScaling(kind="linear", factor=8.0)})
LEARNED = PLAIN.with_settings({"position": "learned", "max_position_embeddings": 48})


@pytest.mark.parametrize(
    ("a", "b", "tokens", "lengths"),
    [
        (PLAIN, PLAIN, None, (64, 64)),
        (PLAIN, PLAIN, 7, (7, 7)),
        (PLAIN, WINDOW, None, (64, 164)),
        (WINDOW, PLAIN, 101, (101, 101)),
        (SCALED, WINDOW, None, (64, 264)),
        (LINEAR, LINEAR, None, (64, 64)),
        (PLAIN, LEARNED, None, (48, 48)),
        (LEARNED, LEARNED.with_settings({"sliding_window": 20}), 10, (10, 30)),
    ],
)
def test_long_sample_exceeds_windows_and_contexts(
    a: Architecture, b: Architecture, tokens: int | None, lengths: tuple[int, int]
) -> None:
    assert sample_lengths(a, b, 10**6, tokens) == (lengths, "")


def test_expensive_long_sample_is_reported() -> None:
    assert sample_lengths(WINDOW, WINDOW, 10**10, None) == (
        (64, 64),
        "; --tokens 164 would reach beyond the window or original context of 100",
    )
    (_, second), note = sample_lengths(PLAIN.with_settings({"sliding_window": 30000}), PLAIN, 10, None)
    assert second == 64 and "--tokens 30064" in note  # few parameters, and yet scores of 30,000 by 30,000


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="there are 48 positions"):
        sample_lengths(PLAIN, LEARNED, 10**6, 49)


def test_samples_are_reproducible_and_within_the_vocabulary() -> None:
    (both,), (again,) = random_samples(77, (64, 64)), random_samples(77, (64, 64))
    assert both.shape == (2, 64) and both.equal(again) and 0 <= both.min() and both.max() < 77
    assert not both[0].equal(both[1])
    assert [sample.shape for sample in random_samples(77, (8, 30))] == [(1, 8), (1, 30)]
