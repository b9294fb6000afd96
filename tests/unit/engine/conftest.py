"""The tests of upstream's defects need ranks; they share those of tests/ranks."""

from __future__ import annotations

from ranks.fixtures import models, one, samples, two

__all__ = ["models", "one", "samples", "two"]
