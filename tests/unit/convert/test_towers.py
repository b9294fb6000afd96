"""The towers of multimodal models are copied bit for bit, in every direction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from isthmus.config.schema.model import ModelConfig
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.errors import CheckFailed, DataError, UsageError
from isthmus.hf.model_folder import ModelFolder
from isthmus.recipes.model.model_source import open_source
from ranks.tiny import build_adapter, build_model_folder, load_network, without_checksums

TOWER = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"
INPUT_IDS = torch.arange(2, 40)[None]


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    """The language model in bfloat16, the towers in float32."""
    folder = build_model_folder(tmp_path / "gemma3", "gemma3")
    (folder / "preprocessor_config.json").write_text("{}")
    tensors = load_file(folder / "model.safetensors")
    language = {name: tensor.bfloat16() for name, tensor in tensors.items() if name.startswith("language_model.")}
    assert TOWER in tensors and len(language) < len(tensors)
    save_file(tensors | language, folder / "model.safetensors", {"format": "pt"})
    return folder


def name_of_transformers(name: str) -> str:
    """The name of a tensor in the memory of transformers, as other programs write it."""
    head = name == "language_model.lm_head.weight"
    return "lm_head.weight" if head else f"model.{name.replace('_model.model', '_model')}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [None, LegacyLayout(tp=2, pp=2)], ids=["torch_dist", "legacy"])
def test_round_trip_keeps_all_bytes(layout: LegacyLayout | None, gemma3: Path, tmp_path: Path) -> None:
    convert(gemma3, tmp_path / "megatron", "torch_dist" if layout is None else "torch", layout=layout)
    back = convert(tmp_path / "megatron", tmp_path / "back")
    assert compare_models(gemma3, tmp_path / "megatron").family == "gemma3"
    source = load_file(gemma3 / "model.safetensors")
    export = load_file(tmp_path / "back/model.safetensors")
    assert back.num_bytes == sum(tensor.nbytes for tensor in source.values())
    assert source.keys() == export.keys()
    assert all(torch.equal(source[name].view(torch.uint8), export[name].view(torch.uint8)) for name in source)
    assert (tmp_path / "back/preprocessor_config.json").exists()
    network, loading = AutoModelForImageTextToText.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(network).__name__ == "Gemma3ForConditionalGeneration" and not any(loading.values())
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", gemma3))
    assert config["vision_config"] == original["vision_config"]


@pytest.mark.slow
def test_another_dtype_is_that_of_the_language_model(gemma3: Path, tmp_path: Path) -> None:
    convert(gemma3, tmp_path / "out", "hf", dtype=torch.float16)
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out/model.safetensors").items()}
    assert dtypes[TOWER] == torch.float32
    assert {dtype for name, dtype in dtypes.items() if name.startswith("language_model.")} == {torch.float16}


@pytest.mark.slow
def test_a_checkpoint_without_towers_needs_the_folder(gemma3: Path, tmp_path: Path) -> None:
    convert(gemma3, tmp_path / "megatron")
    shutil.rmtree(without_checksums(tmp_path / "megatron") / "hf/towers")
    with pytest.raises(UsageError, match=r"and not its other tensors\. Give the folder .* --hf-family gemma3_text"):
        convert(tmp_path / "megatron", tmp_path / "refused")
    convert(tmp_path / "megatron", tmp_path / "back", hf_like=gemma3)
    assert compare_models(gemma3, tmp_path / "back").family == "gemma3"
    tensors = load_file(gemma3 / "model.safetensors")
    other = shutil.copytree(gemma3, tmp_path / "other")
    save_file({name_of_transformers(name): tensor for name, tensor in tensors.items()}, other / "model.safetensors")
    convert(tmp_path / "megatron", tmp_path / "renamed", hf_like=other)
    assert load_file(tmp_path / "renamed/model.safetensors").keys() == tensors.keys()
    language = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    save_file(language, other / "model.safetensors")
    with pytest.raises(UsageError, match=r"and not its other tensors"):
        convert(tmp_path / "megatron", tmp_path / "refused", hf_like=other)


@pytest.mark.slow
def test_the_language_model_alone(gemma3: Path, tmp_path: Path) -> None:
    convert(gemma3, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "text", hf_family="gemma3_text")
    network, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", output_loading_info=True, dtype=torch.float32
    )
    assert type(network).__name__ == "Gemma3ForCausalLM" and not any(loading.values())
    with torch.no_grad():
        full = load_network(gemma3, dtype=torch.float32)(INPUT_IDS).logits
        assert torch.equal(network(INPUT_IDS).logits, full)
    with pytest.raises(UsageError, match=r"gemma3 is multimodal, and .* has no tensors for its towers"):
        convert(tmp_path / "text", tmp_path / "refused", "hf", hf_family="gemma3")


@pytest.mark.slow
def test_verify_compares_towers(gemma3: Path, tmp_path: Path) -> None:
    convert(gemma3, tmp_path / "megatron")
    tensors = load_file(gemma3 / "model.safetensors")
    tensors[TOWER][3, 2] += 1
    save_file(tensors, gemma3 / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match=f"their towers differ in 1 tensors: {TOWER}"):
        compare_models(gemma3, tmp_path / "megatron")
    shutil.rmtree(without_checksums(tmp_path / "megatron") / "hf/towers")
    number = sum(not name.startswith("language_model.") for name in tensors)
    with pytest.raises(CheckFailed, match=f"only .*gemma3 has towers, {number} tensors. Name the folder"):
        compare_models(tmp_path / "megatron", gemma3)
    compare_models(tmp_path / "megatron", gemma3, hf_like=gemma3)


@pytest.mark.slow
def test_an_adapter_of_the_language_model_is_merged(tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "mistral3", tie_word_embeddings=False)
    adapter = build_adapter(base, tmp_path / "adapter", target_modules=r".*language_model.*(q|v|down)_proj")
    convert(base, tmp_path / "merged", "hf", adapter=adapter)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", base))
    changed = {name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])}
    assert ours.keys() == theirs.keys() and len(changed) == 12 and all("language_model" in name for name in changed)
    import peft

    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(load_network(base), adapter)(INPUT_IDS).logits
        assert torch.allclose(load_network(tmp_path / "merged")(INPUT_IDS).logits, expected, atol=1e-5)


@pytest.mark.slow
def test_names_of_another_program_become_those_of_the_family(tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "gemma3", tie_word_embeddings=False)
    tensors = load_file(base / "model.safetensors")
    other = shutil.copytree(base, tmp_path / "other")
    names = {name: name_of_transformers(name) for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    notes = convert(other, tmp_path / "back", "hf").notes
    assert notes[0].startswith("tensor names of another program are replaced, such as")
    export = load_file(tmp_path / "back/model.safetensors")
    assert export.keys() == tensors.keys() and all(torch.equal(export[name], tensors[name]) for name in tensors)


@pytest.mark.slow
def test_random_weights_are_those_of_the_language_model(gemma3: Path) -> None:
    keys = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    result = open_source(ModelConfig(path=str(gemma3), init="random", config=keys))
    assert result.config["model_type"] == "gemma3_text" and result.config["num_hidden_layers"] == 2
    longer = open_source(ModelConfig(path=str(gemma3), config={"max_position_embeddings": 256}))
    assert longer.config["text_config"]["max_position_embeddings"] == 256 and "vision_config" in longer.config
    with pytest.raises(UsageError, match=r"model.config: a model of type gemma3_text does not use text_config"):
        open_source(ModelConfig(path=str(gemma3), config={"text_config": {"max_position_embeddings": 256}}))


def test_settings_of_quantization_in_the_section() -> None:
    quantized = {"quant_method": "compressed-tensors"}
    folder = ModelFolder(Path("any"), {"text_config": {"quantization_config": quantized, "hidden_size": 8}})
    assert folder.quantization == quantized and folder.config == {"text_config": {"hidden_size": 8}}


@pytest.mark.slow
def test_experts_in_one_tensor_are_read(tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "qwen3_5_moe")
    full = load_file(base / "model.safetensors")
    fused = {name: tensor for name, tensor in full.items() if ".experts." not in name}
    for layer in range(4):
        owner = f"model.language_model.layers.{layer}.mlp.experts"
        item = {
            leaf: torch.stack([full[f"{owner}.{expert}.{leaf}_proj.weight"] for expert in range(6)])
            for leaf in ("gate", "up", "down")
        }
        fused |= {f"{owner}.gate_up_proj": torch.cat([item["gate"], item["up"]], 1), f"{owner}.down_proj": item["down"]}
    other = shutil.copytree(base, tmp_path / "other")
    save_file({name: tensor.contiguous() for name, tensor in fused.items()}, other / "model.safetensors")
    assert "one tensor for all experts" in convert(other, tmp_path / "megatron").notes[0]
    compare_models(base, tmp_path / "megatron")
    compare_models(base, other)
    both = shutil.copytree(base, tmp_path / "both")
    save_file({name: tensor.contiguous() for name, tensor in (fused | full).items()}, both / "model.safetensors")
    with pytest.raises(DataError, match=r"has both .*down_proj and .*0\.down_proj\.weight"):
        convert(both, tmp_path / "refused")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
