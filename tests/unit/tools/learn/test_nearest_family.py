"""The family that an error of ``--learn`` names."""

from __future__ import annotations

from typing import Any

from isthmus.families.registry import all_families
from isthmus.tools.learn.related_family import nearest_family

FAMILIES = all_families()
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128},
    **{"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu"},
}
GRANITE: dict[str, Any] = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    **{"attention_bias": False, "mlp_bias": False},
}


def test_the_nearest_family_has_the_settings_of_the_config() -> None:
    relative = nearest_family({**SIZES, **GRANITE}, FAMILIES)
    assert relative.family == "granite" and relative.unread == ()


def test_settings_that_differ_are_named() -> None:
    config = {name: value for name, value in (SIZES | GRANITE).items() if name != "logits_scaling"}
    relative = nearest_family(config | {"novelty": 1}, FAMILIES)
    assert relative.family == "granite"
    assert relative.description == (
        "The nearest family is granite, which does not read novelty and reads logits_scaling, which the config lacks."
    )


def test_settings_without_effect_do_not_count() -> None:
    config = {**SIZES, **GRANITE, "hidden_dropout": 0.1, "eos_token_id": 2, "router_aux_loss_coef": 0.1}
    assert nearest_family(config, FAMILIES).unread == ()


def test_a_config_that_no_family_can_read() -> None:
    assert nearest_family({"n_embd": "wide", "n_layer": None}, FAMILIES).missing != ()
