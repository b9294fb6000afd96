"""Families that are another one with a few other traits, names and settings."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import DataError, UsageError
from isthmus.families.family import Family
from isthmus.families.inferred.family_file import load_family, write_family
from isthmus.families.models import granite, llama, qwen3
from isthmus.families.registry import FAMILIES_ENV, all_families, family_for
from isthmus.tools.learn.family_module import write_module
from isthmus.tools.learn.related_family import Unknown, read_related, related_candidates, settings_read

FAMILIES = {family.name: family for family in (llama.FAMILY, qwen3.FAMILY, granite.FAMILY)}
CONFIG: dict[str, Any] = {
    "model_type": "strange",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 77,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "embedding_multiplier": 3.0,
}


def unknown(family: Family, root: str = "model.", **settings: Any) -> Unknown:
    """A model type with the tensors of a family, whose names begin with another root."""
    config = CONFIG | settings
    shapes = family.hf_shapes(family.to_architecture(config))
    renamed = {name.replace("model.", root): shape for name, shape in shapes.items()}
    return Unknown("strange", "StrangeForCausalLM", config, CONFIG, renamed)


def candidates(of: Unknown) -> list[tuple[dict[str, Any], str]]:
    return list(related_candidates(of, FAMILIES))


@pytest.mark.slow
def test_families_with_the_same_tensors_come_first_and_then_changes_of_one_trait() -> None:
    descriptions = [text for _, text in candidates(unknown(qwen3.FAMILY))]
    assert descriptions[0] == "qwen3"
    assert {"qwen3, rotary_interleaved True", "qwen3, norm_zero_centered True"} <= set(descriptions)
    assert not any(text in ("llama", "granite") for text in descriptions)
    changed = {text: data for data, text in candidates(unknown(llama.FAMILY))}
    data = changed["llama, rotary_interleaved True"]
    plain = read_related(changed["llama"], FAMILIES).to_architecture(CONFIG)
    assert read_related(data, FAMILIES).to_architecture(CONFIG) == plain.with_settings({"rotary_interleaved": True})


@pytest.mark.slow
def test_a_setting_that_a_family_does_not_read_is_read_as_in_another() -> None:
    results = [
        data for data, text in candidates(unknown(llama.FAMILY)) if data["settings_of"] and data["like"] == "llama"
    ]
    assert results[0]["settings_of"] == {"embedding_multiplier": ["granite", "keys"]}
    assert read_related(results[0], FAMILIES).to_architecture(CONFIG).embedding.embedding_multiplier == 3.0


@pytest.mark.slow
def test_other_names_of_tensors_and_settings() -> None:
    of = unknown(llama.FAMILY, "transformer.")
    config = {("n_embd" if name == "hidden_size" else name): value for name, value in of.config.items()}
    data, text = candidates(replace(of, config=config))[0]
    assert text == "llama" and data["keys"] == {"hidden_size": "n_embd"}
    assert data["tensor_names"] == {"model.": "transformer."}
    family = read_related(data, FAMILIES)
    assert family.hf_shapes(family.to_architecture(config)) == of.shapes


@pytest.mark.slow
def test_settings_of_later_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = candidates(unknown(llama.FAMILY))[0][0]
    read = settings_read(read_related(data, FAMILIES), CONFIG)
    assert {"hidden_size", "rms_norm_eps", "rope_parameters"} <= read and "embedding_multiplier" not in read
    data["settings"] = {name: {} for name in read} | {"rms_norm_eps": {"default": 0.125}}
    data["fixed"] = {"embedding_multiplier": {"is": 3.0, "absent": 3.0}}
    (tmp_path / "strange.json").write_text(write_family(read_related(data, FAMILIES)), encoding="utf-8")
    monkeypatch.setenv(FAMILIES_ENV, str(tmp_path))
    config = {name: value for name, value in CONFIG.items() if name != "rms_norm_eps"}
    assert family_for(CONFIG).to_architecture(CONFIG).norm.norm_epsilon == 1e-5
    assert family_for(config).to_architecture(config).norm.norm_epsilon == 0.125
    assert family_for(config).to_hf_config(family_for(config).to_architecture(config))["rms_norm_eps"] == 0.125
    with pytest.raises(UsageError, match=r"embedding_multiplier=4.0 is not supported"):
        family_for(CONFIG).to_architecture(CONFIG | {"embedding_multiplier": 4.0})
    with pytest.raises(UsageError, match="lacks head_dim, which transformers derives"):
        family_for(CONFIG).to_architecture({name: value for name, value in CONFIG.items() if name != "head_dim"})
    with pytest.raises(UsageError, match="novelty is not supported for strange"):
        family_for(CONFIG | {"novelty": 1})


@pytest.mark.slow
def test_infinite_numbers_in_a_module(tmp_path: Path) -> None:
    fixed = {"limits": {"is": [0.0, math.inf], "absent": None}}
    data = candidates(unknown(llama.FAMILY))[0][0] | {"fixed": fixed}
    (tmp_path / "strange.py").write_text(write_module(data), encoding="utf-8")
    family = runpy.run_path(str(tmp_path / "strange.py"))["FAMILY"]
    assert [0.0, math.inf] in family.fixed["limits"].allowed


@pytest.mark.slow
def test_a_module_imports_the_families_of_folders(tmp_path: Path) -> None:
    data = candidates(unknown(llama.FAMILY))[0][0] | {"settings_of": {"layer_input_size": ["gemma4_text", "derived"]}}
    (tmp_path / "strange.py").write_text(write_module(data), encoding="utf-8")
    family = runpy.run_path(str(tmp_path / "strange.py"))["FAMILY"]
    assert family.derived["layer_input_size"] is all_families()["gemma4_text"].derived["layer_input_size"]


@pytest.mark.slow
def test_a_module_like_a_family_of_another_package_is_refused() -> None:
    data = candidates(unknown(llama.FAMILY))[0][0] | {"like": "acme"}
    with pytest.raises(UsageError, match="the family acme is that of another package"):
        write_module(data)


@pytest.mark.slow
@pytest.mark.sweep_cases("change2-TypeError")
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"like": "absent"}, "like the family 'absent'"), ({"format": 9}, "format 9"), ({"traits": 3}, "TypeError")],
)
def test_damaged_files(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    data = candidates(unknown(llama.FAMILY))[0][0]
    path = tmp_path / "strange.json"
    path.write_text(write_family(replace(llama.FAMILY, data=data | change)), encoding="utf-8")
    with pytest.raises(DataError, match=reason):
        load_family(path, all_families)
