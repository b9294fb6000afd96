"""Tests of upstream defects use the ranks of tests/ranks."""

from __future__ import annotations

from ranks.fixtures import models, one_rank, samples, two_ranks

__all__ = ["models", "one_rank", "samples", "two_ranks"]
