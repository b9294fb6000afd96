"""Configs of Ling: versions of its class, modelling files of its own, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.convert.hf.other_forms import other_names
from isthmus.errors import DataError, UsageError
from isthmus.families.registry import all_families, family_for
from isthmus.hf.model_folder import ModelFolder, write_json, write_model_files
from ranks.tiny import build_model_folder, tiny_config
from ranks.tiny_families.bailing_moe import FIRST, SECOND

CODE = {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"}


def config(family: str, **settings: Any) -> dict[str, Any]:
    return tiny_config(family).to_dict() | settings


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_exports_keep_class_and_auto_map(name: str) -> None:
    hf = tiny_config("bailing_moe", partial_rotary_factor=1.0).to_dict() | {"architectures": [name], "auto_map": CODE}
    family = family_for(hf)
    arch = family.to_architecture(hf)
    assert arch.moe is not None and arch.moe.score == ("softmax" if name == FIRST else "sigmoid")
    assert arch.moe.expert_bias == arch.attention.qk_norm == (name == SECOND)
    written = family.to_hf_config(arch, hf)
    assert (written["architectures"], written["auto_map"]) == ([name], CODE)
    fresh = family.to_hf_config(arch)
    assert fresh["architectures"] == [name] and "auto_map" not in fresh
    assert family.to_architecture(written) == family.to_architecture(fresh) == arch


@pytest.mark.parametrize("absent", ["rms_norm_eps", "rope_theta", "num_experts_per_tok"])
def test_version_1_has_other_defaults(absent: str) -> None:
    """Those of version 2 are not used for it."""
    hf = config("bailing_moe", partial_rotary_factor=1.0, rope_theta=1e4, num_experts=16)
    settings = {key: value for key, value in hf.items() if key not in (absent, "rope_parameters")}
    assert family_for(settings).to_architecture(settings | {"architectures": [SECOND]}).moe is not None
    with pytest.raises(UsageError, match=f"lacks {absent}, whose default in {FIRST}"):
        family_for(settings).to_architecture(settings | {"architectures": [FIRST]})


@pytest.mark.parametrize("settings", [{"rope_scaling": "x"}, {"rope_scaling": [1]}])
@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_malformed_settings_of_rotary_embeddings(name: str, settings: dict[str, Any]) -> None:
    hf = config("bailing_moe", architectures=[name], rope_parameters=None, partial_rotary_factor=1.0, **settings)
    with pytest.raises(DataError, match="must be an object"):
        family_for(hf).to_architecture(hf)


def test_exports_of_other_families_drop_auto_map() -> None:
    hf = config("bailing_hybrid", auto_map=CODE, architectures=["BailingMoeV3ForCausalLM"])
    family = family_for(hf)
    written = family.to_hf_config(family.to_architecture(hf), hf)
    assert written["architectures"] == ["BailingHybridForCausalLM"] and "auto_map" not in written


def test_modelling_files_are_copied(tmp_path: Path) -> None:
    source, export = tmp_path / "source", tmp_path / "export"
    source.mkdir()
    export.mkdir()
    hf = config("bailing_moe", auto_map=CODE)
    write_json(source / "config.json", hf)
    (source / "modeling_bailing_moe_v2.py").write_text("raise SystemExit('was run')\n")
    write_model_files(export, ModelFolder.open(source), hf)
    assert [path.name for path in export.glob("*.py")] == ["modeling_bailing_moe_v2.py"]


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("bailing_moe", {"norm_head": True}, "norm_head=True"),
        ("bailing_moe", {"architectures": [FIRST], "rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ("bailing_moe", {"moe_shared_expert_intermediate_size": 99}, "moe_shared_expert_intermediate_size=99"),
        ("bailing_moe", {"score_function": "softmax"}, "the only score function of version 2"),
        ("bailing_hybrid", {"group_norm_size": 8}, "lightning attention"),
        ("bailing_hybrid", {"expert_swiglu_limit_list": [0, 0, 0.0, 4.0]}, "transformers ignores it for this family"),
        ("bailing_hybrid", {"share_expert_swiglu_limit_list": [5.0, 0, 0, 0]}, "transformers ignores it for this"),
        ("bailing_hybrid", {"expert_swiglu_limit_list": 4.0}, "expert_swiglu_limit_list=4.0"),
        ("bailing_hybrid", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ],
)
def test_unsupported_settings_are_refused(family: str, settings: dict[str, Any], reason: str) -> None:
    hf = config(family, **settings)
    with pytest.raises(UsageError, match=reason):
        family_for(hf).to_architecture(hf)


def test_lists_without_limits_of_swiglu() -> None:
    """Published configs have null, or a 0 for each layer."""
    hf = config("bailing_hybrid", expert_swiglu_limit_list=[0.0, 0, 0, 0.0], share_expert_swiglu_limit_list=None)
    family = family_for(hf)
    arch = family.to_architecture(hf)
    assert arch.mlp.swiglu_limits == () and arch.moe is not None and arch.moe.swiglu_limits == ()
    assert family.to_hf_config(arch, hf)["expert_swiglu_limit_list"] == [0.0, 0, 0, 0.0]
    assert family.to_architecture(family.to_hf_config(arch)) == arch
    with pytest.raises(UsageError, match="has no limits of SwiGLU"):
        family.to_hf_config(arch.with_settings({"swiglu_limits": (None, 2.0, None, None)}))


def test_what_transformers_saves_has_other_names(tmp_path: Path) -> None:
    """It names the output projections of all layers alike; published files do not."""
    folder = ModelFolder.open(build_model_folder(tmp_path, "bailing_hybrid", names=False))
    result = other_names(folder, family_for(folder.config), folder.config)
    layer = "model.layers.{}.attention.{}.weight"
    assert result == {layer.format(number, "dense"): layer.format(number, "o_proj") for number in (0, 2)}


@pytest.mark.parametrize("name", ["bailing_moe", "bailing_hybrid"])
def test_mtp_layers_share_embedding_and_output_layer(name: str) -> None:
    hf = config(name, num_nextn_predict_layers=1)
    family = all_families()[name]
    arch = family.to_architecture(hf)
    assert arch.pattern.mtp_layers == 1
    names = {key for key in family.hf_shapes(arch) if key.startswith(f"model.layers.{arch.num_layers}.")}
    inner = {key.removeprefix(f"model.layers.{arch.num_layers}.") for key in names}
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "final_layernorm.weight"} < inner
    assert {"attention.dense.weight", "mlp.gate.expert_bias", "input_layernorm.weight"} < inner
    assert not [key for key in inner if "embed" in key or "head" in key or "conv1d" in key]
