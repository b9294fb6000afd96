"""Patterns of Hugging Face names."""

from __future__ import annotations

import pytest

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.matched_tensors import frozen_tensors, trained_tensors, values_by_pattern
from isthmus.families.registry import family_for
from ranks.tiny import tiny_config


def _model(name: str) -> tuple[Family, Architecture]:
    config = tiny_config(name).to_dict()
    family = family_for(config)
    return family, family.to_architecture(config)


@pytest.mark.parametrize(
    ("model", "patterns", "count", "member"),
    [
        ("qwen3", ("model.embed_tokens.*",), 1, "embedding.word_embeddings.weight"),
        ("qwen3", ("model.layers.[01].*",), 16, "decoder.layers.1.mlp.linear_fc1.weight"),
        ("qwen3", ("*.q_proj.*", "*.k_proj.*", "*.v_proj.*"), 4, "decoder.layers.3.self_attention.linear_qkv.weight"),
        ("qwen3_moe", ("*.experts.[0-5].gate_proj.*", "*.experts.*.up_proj.*"), 24, None),
        ("deepseek_v3", ("*.gate.*",), 3, "decoder.layers.1.mlp.router.weight"),
    ],
)
def test_patterns_name_whole_tensors(model: str, patterns: tuple[str, ...], count: int, member: str | None) -> None:
    frozen = frozen_tensors(*_model(model), patterns)
    assert len(frozen) == count
    assert member is None or member in frozen


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("model.embed_token.weight",), ("matches no trained tensor", "model.embed_tokens.weight")),
        (("*.q_proj.*",), ("q_proj.weight, ", "k_proj.weight", "one tensor")),
        (("*",), ("all tensors",)),
    ],
)
def test_patterns_that_cannot_be_frozen(patterns: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        frozen_tensors(*_model("qwen3"), patterns)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_first_matching_pattern_counts() -> None:
    values = {"*.layers.0.mlp.*": 1.0, "*.mlp.*": 2.0}
    result = values_by_pattern(*_model("qwen3"), values, "optim.lr_groups")
    assert result["decoder.layers.0.mlp.linear_fc2.weight"] == 1.0
    assert result["decoder.layers.1.mlp.linear_fc2.weight"] == 2.0


def test_pattern_without_a_trained_tensor() -> None:
    family, arch = _model("qwen3")
    with pytest.raises(UsageError, match="All of them are frozen: leave it out"):
        values_by_pattern(family, arch, {"*": 0.1}, "optim.lr_multipliers", frozen=trained_tensors(family, arch))
