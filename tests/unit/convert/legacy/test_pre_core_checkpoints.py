"""Checkpoints from before Megatron-Core, and of MegaBlocks, have the logits of their own code after conversion."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from isthmus.cli.main import main
from isthmus.convert.legacy.pre_core_args import current_args
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.convert.verify.compare_logits import LogitsCheck
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.shim.modeling_isthmus import IsthmusForCausalLM
from ranks.tiny import without_checksums
from sweep import swept
from unit.convert.legacy.pre_core_model import VOCAB, D, Files, OldModel, logits

IDS = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(2))
CASES = {
    "gpt2": (OldModel(), "gpt2"),
    "gpt2-tp2-pp2": (OldModel(tp=2, pp=2), "gpt2"),
    "gpt2-version-0": (OldModel(version=0, old_names=True, tp=2), "gpt2"),
    "gpt2-version-1": (OldModel(version=1.0, old_names=True), "gpt2"),
    "gpt2-version-2": (OldModel(version=2.0), "gpt2"),
    "llama-tp2": (OldModel(llama=True, tp=2), "llama"),
    "dmoe": (OldModel(experts="dmoe"), "isthmus"),
    "dmoe-top-2-tp2": (OldModel(experts="dmoe", top_k=2, tp=2), "isthmus"),
    "dmoe-normalized-ep2": (OldModel(experts="dmoe", top_k=2, normalized=True, dp=2), "isthmus"),
    "dmoe-ep2-by-width-tp2-pp2": (OldModel(experts="dmoe", number=2, dp=4, tp=2, pp=2), "isthmus"),
    "moe-ep2": (OldModel(experts="moe", dp=2), "isthmus"),
    "glu-tp2": (OldModel(experts="glu", tp=2, top_k=2), "isthmus"),
    "first-release": (OldModel(experts="first_release"), "isthmus"),
    "switch-tp2": (OldModel(experts="switch", tp=2), "isthmus"),
    "switch-of-2023": (OldModel(experts="switch_2023"), "isthmus"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", swept(CASES, ("gpt2-version-0", "llama-tp2", "dmoe-top-2-tp2", "moe-ep2")))
@torch.no_grad()
def test_logits_are_those_of_the_old_code(case: str, tmp_path: Path) -> None:
    model, family = CASES[case]
    files = Files(model)
    done = convert(files.save(tmp_path / "old"), tmp_path / "hf", vocab_size=VOCAB)
    assert done.family == family
    assert any("moe_capacity_factor=1" in note for note in done.notes) == (model.experts == "moe")
    kind: Any = IsthmusForCausalLM if family == "isthmus" else AutoModelForCausalLM
    network = kind.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    expected = logits(files, IDS)
    assert (network(IDS[None]).logits[0] - expected).abs().max() < 1e-4 < expected.abs().max()


TRANSFORMER_ENGINE = {
    "input_layernorm.": "self_attention.layernorm_qkv.layer_norm_",
    "self_attention.query_key_value.": "self_attention.layernorm_qkv.",
    "self_attention.dense.": "self_attention.proj.",
    "post_attention_layernorm.": "layernorm_mlp.layer_norm_",
    "mlp.dense_h_to_4h.": "layernorm_mlp.fc1_",
    "mlp.dense_4h_to_h.": "layernorm_mlp.fc2_",
}


@pytest.mark.slow
def test_layers_of_transformer_engine(tmp_path: Path) -> None:
    files = Files(OldModel(tp=2))
    convert(files.save(tmp_path / "local"), tmp_path / "wanted", vocab_size=VOCAB)
    for state in files.states.values():
        layers = state["language_model"]["encoder"]
        for name in list(layers):
            renamed = reduce(lambda text, pair: text.replace(*pair), TRANSFORMER_ENGINE.items(), name)
            layers[renamed] = layers.pop(name)
        layers["layers.0.self_attention.proj._extra_state"] = torch.zeros(3)
    convert(files.save(tmp_path / "te"), tmp_path / "hf", vocab_size=VOCAB)
    compare_models(tmp_path / "wanted", tmp_path / "hf")


@pytest.mark.slow
def test_export_is_verified_against_the_checkpoint(tmp_path: Path) -> None:
    """Megatron-Core runs the checkpoint, the exported modelling code runs the folder."""
    checkpoint = Files(OldModel(experts="dmoe", top_k=2, tp=2)).save(tmp_path / "old")
    convert(checkpoint, tmp_path / "hf", vocab_size=VOCAB)
    result = compare_models(checkpoint, tmp_path / "hf", logits=LogitsCheck())
    assert result.formats == ("torch", "hf") and result.logits is not None and result.logits.max_abs < 1e-4


@pytest.mark.slow
def test_changed_modelling_code_runs_only_with_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("isthmus.hf.transformers_model.CONFIG_MAPPING", {})  # other tests register the class
    checkpoint = Files(OldModel(experts="dmoe")).save(tmp_path / "old")
    convert(checkpoint, tmp_path / "hf", vocab_size=VOCAB)
    compare_models(tmp_path / "hf", tmp_path / "hf", logits=LogitsCheck())
    without_checksums(tmp_path / "hf")
    file = tmp_path / "hf" / "modeling_isthmus.py"
    file.write_text(file.read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert main(["verify", str(checkpoint), str(tmp_path / "hf"), "--logits"]) == 77
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    compare_models(checkpoint, tmp_path / "hf", logits=LogitsCheck(trust_remote_code=True))
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_release_without_args_needs_a_config(tmp_path: Path) -> None:
    """As Megatron-LM's GPT-2 345M of 2020."""
    files = Files(OldModel(version=0, old_names=True))
    checkpoint = files.save(tmp_path / "old")
    file = checkpoint / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    torch.save({"model": state["model"]}, file)
    with pytest.raises(MissingInput, match="--hf-like"):
        convert(checkpoint, tmp_path / "hf")
    config = {"model_type": "gpt2", "n_embd": 4 * D, "n_head": 4, "n_layer": 4, "n_positions": 24, "vocab_size": VOCAB}
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(config))
    convert(checkpoint, tmp_path / "hf", hf_like=tmp_path / "like")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    with torch.no_grad():
        assert (network(IDS[None]).logits[0] - logits(files, IDS)).abs().max() < 1e-4


@pytest.mark.slow
def test_optimizer_files_beside_the_model_are_ignored(tmp_path: Path) -> None:
    """The distributed optimizer of early 2023 has own files, and names the model's differently."""
    checkpoint = Files(OldModel()).save(tmp_path / "old")
    folder = checkpoint / "iter_0000010"
    (folder / "mp_rank_00" / "model_optim_rng.pt").rename(folder / "mp_rank_00" / "model_rng.pt")
    (folder / "mp_rank_00_000").mkdir()
    (folder / "mp_rank_00_000" / "optim.pt").write_bytes(b"")
    assert convert(checkpoint, tmp_path / "hf", vocab_size=VOCAB).family == "gpt2"


@pytest.mark.slow
def test_unknown_tensors_and_routing_are_refused(tmp_path: Path) -> None:
    files = Files(OldModel(experts="dmoe", top_k=2))
    files.states[0, 0, 0]["language_model"]["encoder"]["layers.0.mlp.moe.shared_expert.up_proj.weight"] = torch.ones(
        2, 2
    )
    with pytest.raises(DataError, match=r"1 not expected: decoder\.layers\.0\.mlp\.shared_expert\.up_proj"):
        convert(files.save(tmp_path / "shared"), tmp_path / "hf", vocab_size=VOCAB)
    files = Files(OldModel(experts="dmoe"))
    layers = files.states[0, 0, 0]["language_model"]["encoder"]
    for name in [name for name in layers if "router" in name]:  # its rows are the number of experts
        del layers[name]
    with pytest.raises(DataError, match=r"missing: decoder\.layers\.0\.mlp\.router\.weight \(in mp_rank_00\)"):
        convert(files.save(tmp_path / "without-router"), tmp_path / "hf", vocab_size=VOCAB)
    checkpoint = Files(OldModel(experts="dmoe")).save(tmp_path / "old")
    file = checkpoint / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["args"].moe_normalize_expert_weights = 2
    torch.save(state, file)
    with pytest.raises(UsageError, match="moe_normalize_expert_weights=2"):
        convert(checkpoint, tmp_path / "hf", vocab_size=VOCAB)
    assert not (tmp_path / "hf").exists()
    with pytest.raises(UsageError, match="add_position_embedding=False"):
        current_args({"add_position_embedding": False})
