"""Reward models: their config, their class in transformers, their tensors, and a new score head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

from isthmus.convert.weight_source import RandomWeights, WithScoreHead
from isthmus.errors import UsageError
from isthmus.families.registry import all_families, family_for
from isthmus.hf.model_folder import has_class
from isthmus.hf.tiny_model import default_config
from sweep import swept

# deepseek_v2 has no default sizes.
WITHOUT = {*all_families()} - {*NAMES} | {"deepseek_v2"}
MULTIMODAL = {name for name, family in all_families().items() if family.nested is not None}
CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 8, "vocab_size": 11,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.slow
def test_the_classes_are_those_of_transformers() -> None:
    names = {name: family.scored_architecture for name, family in all_families().items() if name not in MULTIMODAL}
    for name, architecture in names.items():
        assert NAMES.get(name, architecture) == architecture
        assert has_class(architecture) == (architecture in NAMES.values())


@pytest.mark.slow_cases("gpt_oss")
@pytest.mark.parametrize("name", swept(sorted({*all_families()} - WITHOUT - MULTIMODAL), ("gpt2", "gpt_oss", "qwen3")))
def test_configs_and_tensors_of_every_family(name: str) -> None:
    family = all_families()[name]
    language_model = family.to_architecture(default_config(name))
    arch = language_model.with_settings({"score_head": True, "tie_embeddings": False})
    config = family.to_hf_config(arch, default_config(name))
    assert config["architectures"] == [NAMES[name]] and len(config["id2label"]) == 1
    assert family.to_architecture(config) == arch
    shapes, base_shapes = family.hf_shapes(arch), family.hf_shapes(language_model)
    assert shapes.keys() - base_shapes.keys() == {"score.weight"} and shapes["score.weight"] == (1, arch.hidden_size)
    assert base_shapes.keys() - shapes.keys() == family.output_names & base_shapes.keys()


def test_a_classifier_of_more_labels_is_refused() -> None:
    classifier = CONFIG | {"architectures": ["Qwen3ForSequenceClassification"]}
    with pytest.raises(UsageError, match="a classifier of 2 labels is not a reward model"):
        family_for(CONFIG).to_architecture(classifier)
    assert family_for(CONFIG).to_architecture(classifier | {"num_labels": 1}).head.score_head


def test_a_new_head_is_random_and_the_rest_is_read() -> None:
    family = family_for(CONFIG)
    arch = family.to_architecture(CONFIG | {"tie_word_embeddings": False})
    source = RandomWeights(family, arch, seed=1)
    scored = arch.with_settings({"score_head": True})
    heads = [WithScoreHead(source, family, scored, seed) for seed in (2, 2, 3)]
    first, same, other = (head.read("score.weight") for head in heads)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert first.std().item() == pytest.approx(0.02, rel=0.3) and heads[0].tensors.keys() == {*family.hf_shapes(scored)}
    norm, into = "model.embed_tokens.weight", torch.zeros(11, 64)
    assert torch.equal(heads[0].read(norm, into=into), source.read(norm)) and into.any()
