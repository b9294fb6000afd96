"""Sections of a weight in a checkpoint, against Megatron-Core's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from isthmus.engine.parallel.sharded_sections import by_sections
from isthmus.engine.tensor_names import MAMBA2_SECTIONS

try:
    from megatron.core.ssm.utils import _split_tensor_factory  # megatron-core 0.19
except ModuleNotFoundError:
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory


@pytest.mark.parametrize(("module", "rows"), [("in_proj", (8, 8, 3, 3, 2)), ("conv1d", (8, 3, 3))])
@pytest.mark.parametrize("rank", [0, 1])
def test_named_sections_are_those_of_megatron_core(module: str, rows: tuple[int, ...], rank: int) -> None:
    names = MAMBA2_SECTIONS[module]
    weight = torch.arange(sum(rows) * 4.0).view(-1, 4)
    entry = ShardedTensor.from_rank_offsets(f"mixer.{module}.weight", weight, (0, rank, 2), replica_id=(0, 0, 0))
    ours, theirs = by_sections(entry, rows, names), _split_tensor_factory(entry, list(rows), list(names), 0)
    assert _described(ours.build()) == _described(theirs.build())
    assert torch.equal(ours.merge_fn([item.data for item in ours.build()]), weight)


def test_sections_without_names_are_rows_of_one_tensor() -> None:
    entry = ShardedTensor.from_rank_offsets("in_proj.weight", torch.zeros(5, 4), (0, 1, 2), replica_id=(0, 0, 0))
    result = _described(by_sections(entry, (3, 2)).build())
    assert [item[:4] for item in result] == [
        ("in_proj.weight", (3, 4), (10, 4), (3, 0)),
        ("in_proj.weight", (2, 4), (10, 4), (8, 0)),
    ]


def _described(entries: Any) -> list[tuple[Any, ...]]:
    return [
        (entry.key, entry.local_shape, entry.global_shape, entry.global_offset, entry.data.tolist())
        for entry in entries
    ]
