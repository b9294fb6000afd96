"""Configs with small sizes, and other values of settings."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.errors import UsageError
from isthmus.families.models import llama
from isthmus.tools.learn.setting_values import fixed_settings, independent_defaults, other_values
from isthmus.tools.learn.small_config import FIRST, SECOND, check_layers, size_keys, small_config

KINDS = ["sliding_attention"] * 5 + ["full_attention"]
CONFIG: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 1,
    "num_experts": 64,
    "layer_types": KINDS * 4,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "original_max_position_embeddings": 4096},
    "pad_token_id": 151643,
    "use_cache": True,
    "vision_config": {"hidden_size": 1024, "num_hidden_layers": 27},
}


def test_sizes_are_small_and_the_rest_is_kept() -> None:
    small, other = (small_config(CONFIG, sizes[0]) for sizes in (FIRST, SECOND))
    assert small["layer_types"] == KINDS and other["layer_types"] == [*KINDS, KINDS[0]]
    assert (small["num_hidden_layers"], other["num_hidden_layers"]) == (6, 7)
    assert small["num_experts_per_tok"] == 1 and small["use_cache"] is True and small["pad_token_id"] == 0
    assert small["rope_parameters"] == CONFIG["rope_parameters"] | {"original_max_position_embeddings": 16}
    assert small["vision_config"] == {"hidden_size": 32, "num_hidden_layers": 2}
    changed = {name for name in size_keys(CONFIG) if small[name] != other[name]}
    assert changed == size_keys(CONFIG) - {"num_experts_per_tok"}


def test_kinds_of_late_layers() -> None:
    late = CONFIG | {"layer_types": KINDS[:1] * 20 + KINDS[-1:] * 4}
    small, other = (small_config(late, sizes[0]) for sizes in (FIRST, SECOND))
    assert small["layer_types"] == [KINDS[0]] * 3 + [KINDS[-1]]
    assert other["layer_types"] == [KINDS[0]] * 3 + [KINDS[-1]] * 2
    numbers = CONFIG | {"_list": [0] * 23 + [1], "every_layer": [*range(24)]}
    check_layers(numbers)
    assert small_config(numbers, FIRST[0])["every_layer"] == [*range(6)]
    with pytest.raises(UsageError, match="widths have more than 16 different layers, and mappings are verified with"):
        check_layers({"num_hidden_layers": 24, "widths": [*range(1, 25)]})


def test_settings_of_single_layers() -> None:
    single = {"05": {"head_dim": 512, "use_bias": True}, "11": {"head_dim": 512}, "23": {"head_dim": 512}}
    small = small_config(CONFIG | {"per_layer_config": single}, FIRST[0])
    assert small["per_layer_config"] == {"5": {"head_dim": 48, "use_bias": True}}


def test_sections() -> None:
    sections = {"text_config": CONFIG | {"rope_parameters": {"mrope_section": [16, 24, 24]}}}
    sections["vision_config"] = {"num_hidden_layers": 3, "kinds": ["a", "b", "c"], "out_hidden_size": 4096}
    small = small_config(sections, FIRST[0])
    assert small["text_config"]["rope_parameters"]["mrope_section"] == [4, 4, 4]
    assert small["vision_config"] == {"num_hidden_layers": 2, "kinds": ["a", "b"], "out_hidden_size": 64}


def test_other_values() -> None:
    def values(name: str, value: Any) -> list[Any]:
        return other_values(name, value, llama.FAMILY, rotary_pairs=2)

    assert values("flag", True) == [False] and values("number", 3) == [4, 6, 1] and values("number", 1) == [2]
    assert values("layer_types", [1, 2, 3]) == [[2, 3, 1], [3, 2, 1]] and values("layer_types", [1, 1]) == []
    assert "swish" in values("hidden_act", "silu") and values("name", "word") == [] and values("any", None) == []
    ropes = values("rope_parameters", {"rope_type": "default", "rope_theta": 100.0})
    assert [rope["rope_type"] for rope in ropes] == ["default", "linear", "llama3", "yarn", "longrope"]
    assert ropes[0]["rope_theta"] == 10.0 and len(ropes[-1]["short_factor"]) == 2


def test_defaults_that_depend_on_sizes_are_not_constant() -> None:
    defaults = {"hidden_size": 64, "head_dim": 16, "rms_norm_eps": 1e-6}

    def complete(name: str, value: Any) -> dict[str, Any]:
        config = defaults | {name: value}
        return config if name == "head_dim" else config | {"head_dim": config["hidden_size"] // 4}

    assert independent_defaults(defaults, complete) == {"hidden_size", "rms_norm_eps"}


def test_settings_that_are_not_free_keep_their_value() -> None:
    config = {"model_type": "x", "a": 1, "b": [2, 2], "attention_dropout": 0.1, "hidden_size": 8}
    assert fixed_settings(config, {"a": 3}, free={"hidden_size"}) == {
        "a": {"is": 1, "absent": 3},
        "b": {"each": 2, "absent": None},
        "attention_dropout": {"is": 0.0, "absent": None, "training": True},
    }
