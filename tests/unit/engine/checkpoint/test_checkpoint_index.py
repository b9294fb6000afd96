"""The parts of all ranks cover each tensor once, or nothing is published."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from isthmus.engine.checkpoint.checkpoint_index import (
    CheckpointIndex,
    TensorParts,
    compressed_index,
    covers_once,
    merged_index,
)
from isthmus.errors import IsthmusError

Box = tuple[tuple[int, int, int], tuple[int, int, int]]


def cut(offset: tuple[int, ...], size: tuple[int, ...], random: np.random.Generator) -> list[Box]:
    """A block in random smaller blocks."""
    axes = [axis for axis, length in enumerate(size) if length > 1]
    if not axes or (math.prod(size) < 300 and random.random() < 0.2):
        return [(offset, size)]  # type: ignore[list-item]
    axis = int(random.choice(axes))
    at = int(random.integers(1, size[axis]))
    first, second = list(size), list(size)
    first[axis], second[axis] = at, size[axis] - at
    moved = list(offset)
    moved[axis] += at
    return cut(offset, tuple(first), random) + cut(tuple(moved), tuple(second), random)


def parts_of(boxes: list[Box], shape: tuple[int, ...]) -> TensorParts:
    offsets, sizes = (np.array([box[n] for box in boxes], np.int64) for n in (0, 1))
    return TensorParts(torch.float32, shape, offsets, sizes, np.zeros((len(boxes), 3), np.int64))


@pytest.mark.parametrize("seed", range(5))
def test_only_a_partition_covers_a_tensor_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = (3, 40, 17)
    boxes = cut((0, 0, 0), shape, random)
    assert len(boxes) > 10 and covers_once(parts_of(boxes, shape))
    number = int(random.integers(len(boxes)))
    offset, size = boxes[number]
    grown = (size[0], size[1] + 1, size[2])
    others = [*boxes[:number], *boxes[number + 1 :]]
    for wrong in (
        others,
        [*boxes, boxes[number]],
        [*others, boxes[(number + 1) % len(boxes)]],
        [*others, (offset, grown)],
        [*others, ((offset[0], offset[1] - 1, offset[2]), size)],
    ):
        assert not covers_once(parts_of(wrong, shape))


def test_gap_and_overlap_of_the_same_size_are_found() -> None:
    """Each half of the rows is written by column halves, one of them twice: as many elements as the tensor has."""
    boxes: list[Box] = [((0, 0, 0), (1, 2, 2)), ((0, 0, 2), (1, 2, 2)), ((0, 2, 0), (1, 2, 2)), ((0, 2, 0), (1, 2, 2))]
    assert not covers_once(parts_of(boxes, (1, 4, 4)))


def rank(number: int, *, name: str = "weight") -> CheckpointIndex:
    """One of two ranks, with half of the rows."""
    offsets, sizes = np.array([[2 * number, 0]]), np.array([[2, 3]])
    parts = TensorParts(torch.bfloat16, (4, 3), offsets, sizes, np.array([[0, 8, 20]]))
    return CheckpointIndex([f"__{number}_0.distcp"], {name: parts}, {f"rng_state/{number}": (0, 28, 5)})


def test_ranks_are_joined() -> None:
    index = merged_index(compressed_index(rank(number)) for number in (0, 1))
    assert index.files == ["__0_0.distcp", "__1_0.distcp"] and index.num_parts == 4
    assert index.tensors["weight"].places.tolist() == [[0, 8, 20], [1, 8, 20]]
    assert index.objects == {"rng_state/0": (0, 28, 5), "rng_state/1": (1, 28, 5)}
    assert index.ends() == {"__0_0.distcp": 33, "__1_0.distcp": 33}
    assert CheckpointIndex.from_bytes(memoryview(index.to_bytes())).to_bytes() == index.to_bytes()
    assert index.tensors["weight"].within((1, 1), (2, 1)).tolist() == [0, 1]
    assert index.tensors["weight"].within((2, 0), (2, 3)).tolist() == [1]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (lambda: [rank(0)], "6 elements of weight of the checkpoint, which has 12"),
        (lambda: [rank(0), rank(0)], "two ranks have written rng_state/0"),
        (lambda: [rank(0), rank(1, name="other")], "6 elements of other"),
    ],
)
def test_incomplete_parts_are_refused(ranks: Callable[[], list[CheckpointIndex]], message: str) -> None:
    with pytest.raises(IsthmusError, match=message):
        merged_index(map(compressed_index, ranks()))
