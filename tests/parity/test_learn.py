"""Model types without a family: supported ones are inferred, verified and convert back bytewise; others are refused."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from isthmus.cli.main import main
from isthmus.errors import OutputExists
from isthmus.families.registry import FAMILIES_ENV, family_for
from isthmus.hf.model_folder import read_json
from isthmus.tools.learn.learn import save_family
from isthmus.tools.learn.probe_model import TOLERANCE
from parity.strange_models import TRICKS
from parity.tasks import disregard_family
from ranks.rank_pool import RankPool
from ranks.tiny import SIZES, VOCAB, build_model_folder

pytestmark = pytest.mark.thorough

LENGTHS = [40, 3]
ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", {"head_dim": 8, "use_qkv_bias": True, "qk_layernorm": False}),
    "gemma3": ("gemma3", {}),
    "helium": ("helium", {"head_dim": 8}),
    "gpt_bigcode": ("gpt_bigcode", {"n_head": 4, "n_embd": 32, "n_layer": 4, "n_inner": 48, "n_positions": 64}),
    "granitemoe": (
        "granitemoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "attention_multiplier": 0.3}
        | {"logits_scaling": 2.0},
    ),
}
"""Model types whose family is disregarded, if they have one."""
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "differential attention": ("diffllama", {}, "lambda_k1 [24] has no role"),
    "encoder": ("bart", {}, "the model has an encoder"),
    "no attention": ("rwkv", {}, "has no known key for max_position_embeddings"),
    "several stacks of layers": ("hrm_text", {}, "expected one prefix of layers"),
    "linear attention": ("minimax", {"num_local_experts": 6}, "layer_types has linear_attention"),
}
_LATE = {"num_hidden_layers": 24, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATE: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts in late layers": ("qwen3_moe", _LATE | {"decoder_sparse_step": 8}, "decoder_sparse_step=8"),
}
"""Settings that small models do not show."""
BUILT_IN = ["gemma2", "gpt_neox", "gpt2", "olmo2", "mixtral"]


@pytest.fixture(scope="module")
def converted(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Model folder and result of each case."""
    folder = tmp_path_factory.mktemp("converted")
    models = [
        build_model_folder(folder / case, kind, dtype=torch.bfloat16, **settings)
        for case, (kind, settings) in ACCEPTED.items()
    ]
    done = one_rank.run(
        "parity.tasks.convert_with_inferred_family", models=[str(m) for m in models], lengths=LENGTHS, vocab_size=VOCAB
    )
    return dict(zip(ACCEPTED, zip(models, done, strict=True), strict=True))


@pytest.mark.parametrize("case", ACCEPTED)
def test_inferred_family_round_trip(
    case: str,
    converted: dict[str, tuple[Path, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, result = converted[case]
    assert result["code"] == 0 and "proven: logits agree to" in result["err"], result["err"]
    assert result["theirs"] < 1e-4 and result["packed"] < 1e-5
    kind = ACCEPTED[case][0]
    disregard_family(monkeypatch, model)
    assert json.loads(result["out"].partition("\nsource ")[0])["name"] == kind
    # Converting back needs only the checkpoint.
    megatron, back = f"{model}-megatron", tmp_path / "back"
    assert main(["convert", megatron, str(back)]) == 0
    assert (back / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert _config(back) == _config(model)
    assert main(["verify", str(model), megatron]) == 2
    assert "isthmus convert --learn" in capsys.readouterr().err
    monkeypatch.setenv(FAMILIES_ENV, f"{model}-families")
    assert main(["verify", str(model), megatron]) == 0
    # The family as a module is the same table, without the file.
    config = read_json(model / "config.json")
    inferred = family_for(config)
    remaining = runpy.run_path(str(save_family(inferred, tmp_path / "kept.py")))["FAMILY"]
    arch = remaining.to_architecture(config)
    assert remaining.data is None and arch == inferred.to_architecture(config)
    assert remaining.placements(arch) == inferred.placements(arch)
    assert remaining.to_hf_config(arch, config) == inferred.to_hf_config(arch, config)
    with pytest.raises(OutputExists, match=r"kept.* exists already"):
        save_family(inferred, tmp_path / "kept.py")


def _config(folder: Path) -> dict[str, Any]:
    """The config as transformers reads it, without its path and keys of older releases."""
    config = AutoConfig.from_pretrained(folder).to_dict()
    return {
        key: {name: item for name, item in value.items() if name != "dtype"} if key.endswith("_config") else value
        for key, value in config.items()
        if key not in ("_name_or_path", "rope_theta", "rope_scaling", "torch_dtype")
    }


def test_unproven_mapping_is_refused(one_rank: RankPool, tmp_path: Path) -> None:
    command_lines = []
    for case, (kind, settings, _) in REFUSED.items():
        folder = tmp_path / case
        folder.mkdir()
        config = AutoConfig.for_model(kind, **{**SIZES, **settings}).to_dict()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        command_lines.append(["convert", str(folder), f"{folder}-megatron", "--learn", "--keep", f"{folder}-families"])
    done = one_rank.run("parity.tasks.commands", command_lines=command_lines)
    for (kind, _, reason), result in zip(REFUSED.values(), done, strict=True):
        line = result["err"].splitlines()[-1]
        assert result["code"] == 2, line
        assert reason in line and f"model_type '{kind}' was not learned" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(REFUSED)


def test_settings_that_small_models_do_not_show(one_rank: RankPool) -> None:
    configs = [AutoConfig.for_model(kind, **{**SIZES, **settings}).to_dict() for kind, settings, _ in LATE.values()]
    errors = one_rank.run("parity.tasks.refusals_of_inference", configs=configs)
    for (case, (_, _, reason)), error in zip(LATE.items(), errors, strict=True):
        assert error is not None and reason in error, (case, error)


def test_features_that_usual_small_models_hide(one_rank: RankPool) -> None:
    tricks = {"none": {}, **{trick: settings for trick, (settings, _) in TRICKS.items()}}
    first, *errors = one_rank.run("parity.tasks.refusals_of_strange_models", tricks=tricks)
    assert first is None, first
    for (trick, (_, reason)), error in zip(TRICKS.items(), errors, strict=True):
        assert error is not None and reason in error, (trick, error)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_small_weights_show_the_epsilon_of_norms(kind: str, one_rank: RankPool) -> None:
    config = AutoConfig.for_model(kind, **SIZES, rms_norm_eps=1e-6).to_dict()
    results = one_rank.run("parity.tasks.differences_of_epsilon", config=config, epsilon=1e-8)
    assert results["usual"] < TOLERANCE < 1e-3 < results["small"] and results["right"] < TOLERANCE


def test_inferred_family_equals_built_in_family(one_rank: RankPool) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    configs = [AutoConfig.for_model(kind, **sizes).to_dict() for kind in BUILT_IN]
    results = one_rank.run("parity.tasks.compare_inferred_families", configs=configs)
    assert dict(zip(BUILT_IN, results, strict=True)) == {kind: [] for kind in BUILT_IN}
