"""Families of multimodal model types whose language model was inferred."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import DataError, UsageError
from isthmus.families.family import Family
from isthmus.families.inferred.family_file import load_family, write_family
from isthmus.families.inferred.nested import read_nested
from isthmus.families.models import llama
from isthmus.families.registry import FAMILIES_ENV, family_for, language_config
from isthmus.tools.learn.family_module import write_module
from isthmus.tools.learn.language_section import LanguageSection, find_section, nested_data
from isthmus.tools.learn.related_family import Unknown, related_candidates

FAMILIES = {"llama": llama.FAMILY}
TEXT: dict[str, Any] = {
    "model_type": "strange_text",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 77,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
WHOLE: dict[str, Any] = {
    "architectures": ["StrangeModel"],
    "model_type": "strange",
    "text_config": TEXT,
    "vision_config": {"hidden_size": 8},
    "image_seq_length": 9,
    "tie_word_embeddings": False,
}
TOWERS = {"vision_tower.patches.weight": (8, 3), "projector.bias": (32,), "newline": (32,)}


def language_shapes() -> dict[str, tuple[int, ...]]:
    shapes = llama.FAMILY.hf_shapes(llama.FAMILY.to_architecture(TEXT | {"tie_word_embeddings": False}))
    return {f"language_model.{name}": shape for name, shape in shapes.items()}


def section(**more: Any) -> LanguageSection:
    modules = ("model.language_model.embed_tokens", "lm_head")
    return find_section("strange", "StrangeModel", WHOLE | more, language_shapes() | TOWERS, False, modules)


def inferred() -> Family:
    unknown = Unknown("strange_text", "StrangeModel", section().config(WHOLE), TEXT, language_shapes())
    data, text = next(related_candidates(unknown, FAMILIES))
    assert text == "llama"
    free = {name: {} for name in unknown.config if name not in ("model_type", "head_dim")}
    language = data | {"settings": free, "fixed": {"head_dim": {"is": 16, "absent": 16}}, "proof": {"seen": True}}
    outer = {"image_seq_length": {"is": 9, "absent": 9}, "tie_word_embeddings": {"is": False, "absent": True}}
    return read_nested(nested_data(section(), language, outer, {"is": None, "absent": None}), FAMILIES)


def test_language_model_and_towers_are_found_by_their_tensors() -> None:
    result = section()
    assert result.nested is not None and result.nested.model_type == "strange_text" and result.nested.tied is False
    assert set(result.nested.towers) == {"vision_tower.*", "projector.*", "newline"}
    assert result.tensors(language_shapes() | TOWERS) == language_shapes()
    assert result.module_names == {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head": "lm_head",
    }
    assert result.config(WHOLE) == TEXT | {"tie_word_embeddings": False}
    assert result.changed(WHOLE, "hidden_size", 64)["text_config"] == TEXT | {"hidden_size": 64}


def test_a_head_that_contradicts_the_config_is_refused() -> None:
    with pytest.raises(UsageError, match="tie_word_embeddings is True, and the model has the opposite"):
        section(tie_word_embeddings=True, text_config=TEXT | {"tie_word_embeddings": True})
    second = {"decoder.embed.weight": (77, 32), "decoder.layers.0.x": (3,)}
    with pytest.raises(UsageError, match=r"one embedding \[77, 32\] beside its layers, and at most one output layer"):
        find_section("strange", "StrangeModel", WHOLE, language_shapes() | second, False, ("", ""))


def test_round_trip_of_config_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = inferred()
    (tmp_path / "strange.json").write_text(write_family(family))
    monkeypatch.setenv(FAMILIES_ENV, str(tmp_path))
    result = family_for(WHOLE)
    arch = result.to_architecture(WHOLE)
    exported = result.to_hf_config(arch, WHOLE)
    assert arch == family.to_architecture(WHOLE) == family_for(exported).to_architecture(exported)
    assert exported["vision_config"] == WHOLE["vision_config"] and exported["text_config"].items() >= TEXT.items()
    assert result.hf_shapes(arch).keys() == language_shapes().keys()
    assert language_config(WHOLE) == TEXT | {"tie_word_embeddings": False}
    (tmp_path / "kept.py").write_text(write_module(family.data or {}))
    remaining = runpy.run_path(str(tmp_path / "kept.py"))["FAMILY"]
    assert remaining.to_architecture(WHOLE) == arch and remaining.placements(arch) == family.placements(arch)
    assert remaining.nested == family.nested and remaining.module_names == family.module_names


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (WHOLE | {"image_seq_length": 3}, "image_seq_length=3 is not supported for strange"),
        (WHOLE | {"logit_cap": 3.0}, "logit_cap is not supported for strange"),
        ({key: value for key, value in WHOLE.items() if key != "tie_word_embeddings"}, "tie_word_embeddings=True"),
        (WHOLE | {"text_config": TEXT | {"model_type": "other"}}, "around a language model of type 'other'"),
        (WHOLE | {"text_config": TEXT | {"cap": 3.0}}, "cap is not supported for strange_text"),
        (WHOLE | {"text_config": TEXT | {"tie_word_embeddings": True}}, "tie_word_embeddings=True is not supported"),
        (WHOLE | {"text_config": TEXT | {"head_dim": 8}}, "head_dim=8 is not supported"),
    ],
)
def test_settings_that_were_not_verified_are_refused(
    config: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange.json").write_text(write_family(inferred()))
    monkeypatch.setenv(FAMILIES_ENV, str(tmp_path))
    with pytest.raises(UsageError, match=what):
        family_for(config).to_architecture(config)


def test_malformed_files(tmp_path: Path) -> None:
    data = dict(inferred().data or {})
    for change, what in (
        ({"nested": {"tied": "no", "towers": [], "module_names": {}}}, "tied must be true, false or null"),
        ({"nested": {"towers": []}}, "KeyError: 'tied'"),
        ({"language": data["language"] | {"like": "nothing"}}, "like the family 'nothing', which this version"),
        ({"format": 7}, "format 7 is not supported"),
    ):
        with pytest.raises(DataError, match=what):
            read_nested(data | change, FAMILIES)
    (tmp_path / "strange.json").write_text("{}")
    with pytest.raises(DataError, match="is not a valid family"):
        load_family(tmp_path / "strange.json", lambda: FAMILIES)
