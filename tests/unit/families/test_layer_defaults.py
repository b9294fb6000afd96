"""Kinds of layers that a config class computes when the config does not list them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from isthmus.errors import UsageError
from isthmus.families.models import qwen3_moe
from isthmus.families.rules.expert_tensors import sparse_step
from isthmus.families.rules.sliding_window import read_window

CONFIG: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "num_hidden_layers": 10, "hidden_size": 32, "vocab_size": 64},
    **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


def first_two_every_fourth_and_last(_hf: Mapping[str, Any], layers: int) -> Collection[int]:
    return {0, 1, *range(1, layers, 4), layers - 1}


@pytest.mark.parametrize(("layers", "full"), [(7, (0, 1, 5, 6)), (10, (0, 1, 5, 9)), (12, (0, 1, 5, 9, 11))])
def test_a_pattern_knows_the_number_of_layers(layers: int, full: tuple[int, ...]) -> None:
    assert read_window("pattern", {}, 512, layers, first_two_every_fourth_and_last) == (512, full)


def test_a_pattern_knows_the_config() -> None:
    def listed(hf: Mapping[str, Any], _layers: int) -> Collection[int]:
        return [int(layer) for layer in hf["global_layers"]]

    assert read_window("pattern", {"global_layers": [2]}, 512, 4, listed) == (512, (2,))


def test_layers_that_the_config_lists_are_not_those_of_the_pattern() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read_window("pattern", {"layer_types": kinds}, 512, 3, first_two_every_fourth_and_last) == (512, (1,))


def test_chunks_without_a_pattern_are_in_all_layers() -> None:
    assert read_window("chunks", {"attention_chunk_size": 8}, None, 3) == (8, ())


def test_windows_of_another_kind_than_chunks_are_refused() -> None:
    with pytest.raises(UsageError, match="sliding_attention is not supported"):
        read_window("chunks", {"attention_chunk_size": 8, "layer_types": ["sliding_attention"]}, None, 1)


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({}, (0, 1)),
        ({"mlp_only_layers": None}, (0, 1)),
        ({"mlp_only_layers": []}, ()),
        ({"mlp_only_layers": [3]}, (3,)),
        ({"decoder_sparse_step": 4}, (0, 1, 2, 4, 5, 6, 8, 9)),
    ],
)
def test_dense_layers_of_a_config_without_a_list(settings: dict[str, Any], dense: tuple[int, ...]) -> None:
    family = replace(qwen3_moe.FAMILY, derived={"moe.dense_layers": sparse_step(dense=(0, 1))})
    arch = family.to_architecture(CONFIG | settings)
    assert arch.moe is not None and arch.moe.dense_layers == dense
    assert family.to_architecture(family.to_hf_config(arch)) == arch


def test_a_default_of_the_step() -> None:
    family = replace(qwen3_moe.FAMILY, derived={"moe.dense_layers": sparse_step(step=5)})
    moe = family.to_architecture(CONFIG).moe
    assert moe is not None and moe.dense_layers == (0, 1, 2, 3, 5, 6, 7, 8)
