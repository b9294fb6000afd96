"""Every layer is on exactly one stage, and Megatron-Core counts the same layers."""

from __future__ import annotations

import pytest

from isthmus.engine.parallel.pipeline_layout import layers_per_stage, pipeline_layout


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "expected"),
    [
        (8, 4, 1, [2, 2, 2, 2]),
        (9, 4, 1, [2, 2, 3, 2]),
        (11, 4, 1, [3, 3, 3, 2]),
        (5, 2, 1, [3, 2]),
        (3, 3, 1, [1, 1, 1]),
        (8, 2, 2, [2, 2, 2, 2]),
        (61, 16, 1, [3, 3] + [4] * 13 + [3]),
    ],
)
def test_the_last_stage_has_the_fewest_layers(num_layers: int, pp: int, vpp: int, expected: list[int]) -> None:
    assert layers_per_stage(num_layers, pp, vpp) == expected


@pytest.mark.parametrize(("num_layers", "pp"), [(1, 1), (1, 2), (3, 5), (5, 5), (6, 4), (7, 3), (13, 5)])
def test_every_layer_is_on_one_stage(num_layers: int, pp: int) -> None:
    layers = layers_per_stage(num_layers, pp)
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) <= 1
    assert layers[-1] == min(layers)


def test_embedding_and_loss_are_on_the_first_and_last_stage() -> None:
    assert pipeline_layout(4, 1) is None
    assert pipeline_layout(5, 2, mtp_layers=1) == [
        ["embedding", "decoder", "decoder", "decoder"],
        ["decoder", "decoder", "mtp", "loss"],
    ]
    assert pipeline_layout(4, 2, 2) == [["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder", "loss"]]
