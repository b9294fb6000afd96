"""What is found about the installed megatron-core agrees with what it does."""

from __future__ import annotations

import inspect

from megatron.core import dist_checkpointing

from isthmus.engine.upstream.megatron_features import saves_common_state_object


def test_common_state_object() -> None:
    """Versions that write common.pt have an argument for its strategy."""
    assert saves_common_state_object() == (
        "common_strategy" not in inspect.signature(dist_checkpointing.save).parameters
    )
