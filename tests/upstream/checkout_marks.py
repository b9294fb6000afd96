"""What the tests of Megatron-LM's code need."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

MEGATRON_LM = os.environ.get("MEGATRON_LM", "")
needs_checkout = pytest.mark.skipif(
    not MEGATRON_LM, reason="no Megatron-LM: set MEGATRON_LM to a checkout of core_v0.16.1"
)
needs_packages = pytest.mark.skipif(
    find_spec("einops") is None or find_spec("six") is None,
    reason="Megatron-LM imports einops and six: pip install einops six",
)
