"""Ranks for the tests against other projects."""

from __future__ import annotations

from ranks.fixtures import one_rank, two_ranks

__all__ = ["one_rank", "two_ranks"]
