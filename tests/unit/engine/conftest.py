"""Tests of upstream defects use the ranks of tests/ranks."""

from __future__ import annotations

from ranks.fixtures import models, one, samples, two

__all__ = ["models", "one", "samples", "two"]
