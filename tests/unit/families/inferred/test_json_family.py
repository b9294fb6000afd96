"""Inferred families: matched by names and shapes, written to a file, read back, and validated."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import DataError, UsageError
from isthmus.families.inferred.family_file import load_family, write_family
from isthmus.families.inferred.json_family import parse_formula, read_family
from isthmus.families.registry import FAMILIES_ENV, all_families, family_for
from isthmus.tools.learn.candidates import Candidates
from isthmus.tools.learn.config_inference import ConfigInference
from isthmus.tools.learn.tensor_matching import match_tensors

CONFIG: dict[str, Any] = {
    "model_type": "strange",
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_something": None,
    "attention_dropout": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SIZES = {"V": 101, "H": 64, "F": 88, "P": 96, "N": 4, "G": 2, "D": 16}
LAYER = {
    "mixer.wq.weight": (64, 64),
    "mixer.wk.weight": (32, 64),
    "mixer.wv.weight": (32, 64),
    "mixer.wo.weight": (64, 64),
    "ffn.w1.weight": (88, 64),
    "ffn.w2.weight": (64, 88),
    "ffn.w3.weight": (88, 64),
    "attention_norm.weight": (64,),
    "ffn_norm.weight": (64,),
}
TENSORS: dict[str, tuple[int, ...]] = {
    "tok_embeddings.weight": (101, 64),
    "output.weight": (101, 64),
    "norm.weight": (64,),
} | {f"blocks.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}


def _candidates(tensors: dict[str, tuple[int, ...]] = TENSORS, **changes: Any) -> Candidates:
    settings = ConfigInference(CONFIG | changes, CONFIG)
    return Candidates(settings, match_tensors(tensors, SIZES), {"rms_norm_eps"}, "StrangeForCausalLM")


def _data() -> dict[str, Any]:
    return copy.deepcopy(_candidates().family_data({}))


def test_likeliest_candidate_matches_unknown_names() -> None:
    candidates = _candidates()
    family = read_family(candidates.family_data({}))
    arch = family.to_architecture(CONFIG)
    assert family.hf_shapes(arch) == TENSORS
    placed = {name: place.hf for name, place in family.placements(arch).items()}
    layer = "blocks.1."
    assert placed["decoder.layers.1.self_attention.linear_qkv.weight"] == tuple(
        f"{layer}mixer.{item}.weight" for item in ("wq", "wk", "wv")
    )
    assert placed["decoder.layers.1.mlp.linear_fc1.weight"] == (f"{layer}ffn.w1.weight", f"{layer}ffn.w3.weight")
    assert placed["decoder.layers.1.pre_mlp_layernorm.weight"] == (f"{layer}ffn_norm.weight",)
    assert (arch.pattern.form, arch.norm.normalization, arch.mlp.gated, arch.head.tie_embeddings) == (
        "pre",
        "RMSNorm",
        True,
        False,
    )


def test_open_choices_are_few_and_all_different() -> None:
    candidates = _candidates()
    ends, feed_forward, attention = (list(stage.options(candidates._likeliest())) for stage in candidates.stages)
    assert (len(ends), len(feed_forward), len(attention)) == (8, 2 * 6 * 3, 4 * 4)
    assert {pick["activation"] for pick in feed_forward} == {"silu", "gelu", "gelu_tanh"}
    stage = candidates.stages[1]
    zeroed = [name for name in TENSORS if candidates.is_zeroed(stage)(name)]
    assert zeroed == ["blocks.0.mixer.wo.weight", "blocks.1.mixer.wo.weight"]


def test_file_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = read_family(_data())
    path = tmp_path / "strange.json"
    path.write_text(write_family(family), encoding="utf-8")
    read = load_family(path, all_families)
    assert read.data == family.data and read.rules == family.rules
    assert load_family(path, all_families) is read
    with pytest.raises(UsageError, match="isthmus convert --learn"):
        family_for(CONFIG)
    monkeypatch.setenv(FAMILIES_ENV, str(tmp_path))
    assert family_for(CONFIG) is read
    assert family_for(CONFIG | {"model_type": "llama"}).data is None
    with pytest.raises(UsageError, match="clip is not supported for strange: the family was inferred"):
        family_for(CONFIG | {"clip": 8.0})
    with pytest.raises(DataError, match="is the family of strange"):
        family_for(CONFIG | {"model_type": "stranger"}, path)
    with pytest.raises(UsageError, match="no family has the model_type"):
        family_for(CONFIG | {"model_type": f"../{tmp_path.name}/strange"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden_act": "gelu"}, "hidden_act=gelu"), ({"use_something": 8.0}, "use_something=8.0")],
)
def test_other_values_of_fixed_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    family = read_family(_data())
    with pytest.raises(UsageError, match=f"{message} is not supported for strange: the family was inferred"):
        family.to_architecture(CONFIG | changes)
    larger = family.to_architecture(CONFIG | {"hidden_size": 128, "num_hidden_layers": 3, "rms_norm_eps": 1e-3})
    assert (larger.attention.kv_channels, larger.num_layers, larger.norm.norm_epsilon) == (32, 3, 1e-3)
    with pytest.raises(UsageError, match="attention_dropout"):
        family.check_training(CONFIG)


def test_config_round_trip() -> None:
    family = read_family(_data())
    written = family.to_hf_config(family.to_architecture(CONFIG), CONFIG)
    assert {key: written[key] for key in CONFIG} == CONFIG


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format",), 2),
        (("surprise",), 1),
        (("traits", "colour"), "red"),
        (("rules", 0, "parts", 0, 0), "{layer.__class__}"),
        (("rules", 0, "parts", 0, 1), "V+1"),
        (("rules", 0, "shard"), "diagonal"),
        (("rules", 0, "when"), "__class__"),
        (("keys", "num_layers", "as"), "anything"),
        (("derived", "kv_channels"), "__import__('os')"),
        (("window", "style"), "sometimes"),
        (("rules",), None),
        (("name",), 3),
    ],
)
def test_invalid_files_are_rejected(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    data = _data()
    inner = data
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = value
    path = tmp_path / "strange.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(DataError, match="is not a valid family"):
        load_family(path, all_families)


@pytest.mark.parametrize(("text", "value"), [("a", 12), ("a/b", 4), ("2*b", 6), ("a*b**0.5", 6.0), ("7", 7)])
def test_formulas(text: str, value: float) -> None:
    assert parse_formula(text, {"b": 3})({"a": 12}) == value
    with pytest.raises(DataError, match="must be a number"):
        parse_formula("c", {})({"c": "12"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.mixer.decay": (64,), "blocks.1.mixer.decay": (64,)}, "mixer.decay .64. has no role"),
        ({"blocks.1.ffn.w4.weight": (88, 64)}, "layers 0 and 1 differ in their tensors"),
        ({"output.bias": (101,)}, "output.bias .101. has no role"),
        ({"blocks.0.third_norm.weight": (64,), "blocks.1.third_norm.weight": (64,)}, "a layer has 3 norms"),
    ],
)
def test_unknown_tensors_are_rejected(change: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _candidates(TENSORS | change)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({"depths": [1, 2]}, "depths differs by layer"),
        ({"vision_config": {"depth": 2}}, "vision_config is an object"),
    ],
)
def test_unsupported_configs_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConfigInference(CONFIG | changes, CONFIG)


def test_live_numbers_must_have_a_known_meaning() -> None:
    settings = ConfigInference(CONFIG | {"clip": 8.0}, CONFIG | {"clip": None})
    assert settings.numbers() == ["rms_norm_eps", "clip"]
    settings.check_meanings({"rms_norm_eps"})
    with pytest.raises(UsageError, match="clip=8\\.0 changes the logits"):
        settings.check_meanings({"clip"})
