"""The modelling files that travel with an export: transformers' logits for transformers' own models, and alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.convert.transfer import convert
from isthmus.families.models.isthmus import FAMILY
from isthmus.hf.shim.configuration_isthmus import IsthmusConfig
from isthmus.hf.shim.modeling_isthmus import IsthmusForCausalLM
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import load_tokenizer
from parity.test_logits import CASES
from ranks.tiny import VOCAB, build_model_folder, without_checksums
from sweep import swept

LONG, SHORT = 97, 20
"""Longer than any window and any original context of the cases, and shorter than the original contexts."""
KNOWN = [
    "llama-rope-llama3-factor-8",
    "llama-rope-linear",
    "llama-rope-dynamic",
    "llama-biases",
    "llama-tied",
    "mistral-window-of-5",
    "qwen2-window-some-layers",
    "mixtral",
    "qwen3_moe-dense-layer",
    "olmoe",
    "ernie4_5_moe",
    "qwen2_moe-shared",
    "smollm3-listed",
    "phi3-longrope-partial",
    "starcoder2",
    "gpt_neox",
    "gpt_neox-sequential",
    "gpt2",
    "olmo2",
    "glm4",
    "cohere",
    "gemma2",
    "gemma2-scores",
    "gemma2-logits",
    "gemma3_text-bases",
    "glm4_moe",
    "gpt_oss",
]
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 6.0},
    ),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers knows no such class, as in a place without Isthmus."""
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "isthmus")
    monkeypatch.delitem(AutoModelForCausalLM._model_mapping._extra_content, IsthmusConfig)
    return


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def load(folder: Path, **how: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    assert not any(info.values())
    return model.eval()


def of(folder: Path, **settings: Any) -> Any:
    """A separate model with changed settings, in this process."""
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text()) | settings
    return IsthmusForCausalLM(IsthmusConfig(**config)).eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with experts, saved by a transformers that knows the class."""
    return build_model_folder(tmp_path_factory.mktemp("source") / "model", "isthmus")


@pytest.fixture(scope="module")
def gpt2_with_experts(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a checkpoint of it."""
    folder = tmp_path_factory.mktemp("gpt2")
    convert(source, folder / "megatron")
    convert(folder / "megatron", folder / "export")
    return folder / "export"


@pytest.mark.slow
@pytest.mark.parametrize("case", swept([*KNOWN, *OWN], ("llama-biases", "mistral-window-of-5", "qwen2_moe-shared")))
@torch.no_grad()
def test_logits_equal_transformers_models(case: str, tmp_path: Path) -> None:
    """That each case is about something that shows, its own test says: without it, logits are visibly others."""
    family, settings = OWN[case] if case in OWN else CASES[case][:2]
    source = build_model_folder(tmp_path / "source", family, **settings)
    convert(source, tmp_path / "export", "hf", hf_family="isthmus")
    theirs = load(source, attn_implementation="eager")
    ours = load(tmp_path / "export", trust_remote_code=True)
    assert type(ours).__module__.startswith("transformers_modules.")
    for length in (LONG, SHORT):
        ids = tokens(1, length)
        expected, actual = theirs(ids).logits, ours(ids).logits
        assert (expected - actual).abs().max() < 2e-5


@pytest.mark.slow
def test_round_trip_of_a_model_without_a_transformers_class(
    source: Path, gpt2_with_experts: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    convert(gpt2_with_experts, tmp_path / "torch_dist")
    convert(tmp_path / "torch_dist", again)
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in gpt2_with_experts.iterdir())
    for path in again.iterdir():
        assert path.read_bytes() == (gpt2_with_experts / path.name).read_bytes(), path.name
    assert (again / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    # What transformers saves is a folder that can be loaded and converted again.
    load(again, trust_remote_code=True).save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "converted", "hf")
    ids = tokens(2, 9)
    first, *others = (
        load(folder, trust_remote_code=True) for folder in (again, tmp_path / "saved", tmp_path / "converted")
    )
    with torch.no_grad():
        assert all(torch.equal(first(ids).logits, other(ids).logits) for other in others)


@pytest.mark.slow
def test_export_without_a_transformers_class_needs_trust_remote_code(gpt2_with_experts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(gpt2_with_experts, trust_remote_code=False)
    notes = convert(gpt2_with_experts, tmp_path / "again", "hf").notes
    assert "trust_remote_code=True" in notes[0] and "refuses" in notes[1]
    plain = build_model_folder(tmp_path / "plain", "llama")
    assert convert(plain, tmp_path / "out", "hf").notes == []


def test_reading_a_folder_does_not_run_its_code(gpt2_with_experts: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    planted = without_checksums(shutil.copytree(gpt2_with_experts, tmp_path / "planted"))
    for path in planted.glob("*.py"):
        path.write_text(f"open({str(ran)!r}, 'w')\n")
    train_tokenizer(["one"]).save_pretrained(planted)
    convert(planted, tmp_path / "out", "hf")
    load_tokenizer(planted, trust_remote_code=True)
    assert not ran.exists()
    # What is written are our own files, whatever the source's were.
    assert "class IsthmusForCausalLM" in (tmp_path / "out" / "modeling_isthmus.py").read_text()


CACHED = {
    "windows": {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "windows-in-all-layers": {"sliding_window": 5, "layer_types": ["sliding_attention"] * 4},
    "learned-positions": {"position_embedding_type": "learned"},
    "sinks-and-caps": {"attention_sinks": True, "attention_softcap": 2.0, "position_embedding_type": "rope"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CACHED)
@torch.no_grad()
def test_cached_logits_equal_full_logits(case: str, gpt2_with_experts: Path) -> None:
    model, ids = of(gpt2_with_experts, **CACHED[case]), tokens(2, 24)
    expected = model(ids).logits
    out = model(ids[:, :10], use_cache=True)
    parts = [out.logits]
    for place in range(10, 24):
        name = ("past_key_values", "cache")[place % 2]  # the second one since transformers 5.24
        out = model(ids[:, place : place + 1], **{name: out.past_key_values}, use_cache=True)
        parts.append(out.logits)
    assert (torch.cat(parts, dim=1) - expected).abs().max() < 1e-5
    assert model(ids, logits_to_keep=3).logits.equal(expected[:, -3:])


@pytest.mark.slow
@pytest.mark.parametrize("case", CACHED)
@torch.no_grad()
def test_greedy_generation(case: str, gpt2_with_experts: Path) -> None:
    model, prompt = of(gpt2_with_experts, **CACHED[case]), tokens(1, 9)
    ids = prompt
    for _ in range(8):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert model.generate(prompt, attention_mask=torch.ones_like(prompt), **how).equal(ids)
    # Beside a longer prompt this one is filled up with padding before it, which must not show.
    batch = torch.cat((tokens(1, 14, seed=2), torch.cat((torch.zeros(1, 5, dtype=torch.int64), prompt), dim=1)))
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    assert model.generate(batch, attention_mask=mask, **how)[1, 5:].equal(ids[0])


@pytest.mark.slow
@torch.no_grad()
def test_sdpa_equals_eager_attention(gpt2_with_experts: Path) -> None:
    ids = tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    logits = []
    for kind in ("sdpa", "eager"):
        model = load(gpt2_with_experts, trust_remote_code=True, attn_implementation=kind)
        logits.append(model(ids, attention_mask=mask).logits[mask.bool()])
    assert (logits[0] - logits[1]).abs().max() < 1e-5


@pytest.mark.slow
def test_loss_and_gradients_equal_transformers(tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "qwen2_moe")
    convert(source, tmp_path / "export", "hf", hf_family="isthmus")
    theirs, ours, ids = load(source), load(tmp_path / "export", trust_remote_code=True), tokens(2, 16)
    losses = [model(ids, labels=ids).loss for model in (theirs, ours)]
    assert (losses[0] - losses[1]).abs() < 1e-6
    for loss in losses:
        loss.backward()
    name = "model.layers.1.self_attn.q_proj.weight"
    expected, actual = (model.get_parameter(name).grad for model in (theirs, ours))
    assert (expected - actual).abs().max() < 1e-5 * expected.abs().max() + 1e-7


@pytest.mark.slow
def test_float32_parameters_stay_float32(tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "ernie4_5_moe")
    convert(source, tmp_path / "export", "hf", hf_family="isthmus")
    state = load(tmp_path / "export", trust_remote_code=True, dtype=torch.bfloat16).state_dict()
    wide = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in state if name.endswith(("mlp.gate.weight", "e_score_correction_bias"))}
    assert wide


def test_config_defaults_equal_those_of_the_family() -> None:
    """The class and the family have their defaults each."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for said in ({}, {"num_experts": 4}):
        bare = {**shape, "vocab_size": 77, **said}
        full = IsthmusConfig(**bare).to_dict()
        assert FAMILY.to_architecture(bare) == FAMILY.to_architecture(full)


def test_initial_weights() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = IsthmusConfig(**shape, vocab_size=77, norm_zero_centered=True, initializer_range=0.1, num_experts=4)
    state = IsthmusForCausalLM(config).state_dict()
    assert not state["model.norm.weight"].any()
    for name in ("model.layers.0.mlp.gate.weight", "lm_head.weight", "model.layers.0.mlp.experts.3.up_proj.weight"):
        assert 0.08 < state[name].std() < 0.12
