"""Differences between two lists of logits."""

from __future__ import annotations

import math

import torch

from isthmus.tools.learn.probe_model import max_difference


def test_nan_anywhere_is_an_infinite_difference() -> None:
    ones, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert max_difference([ones, ones + 0.5], [ones, ones]) == 0.5
    assert max_difference([ones, nan], [ones, ones]) == math.inf
    assert max_difference([nan, ones], [ones, ones]) == math.inf
