"""Quantised weights and names without a prefix are converted to those of the family, with a note."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.config.schema import RunConfig
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.online import import_weights
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.errors import DataError, UsageError
from isthmus.families.rules.shard import Layout, local_shape
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from ranks.tiny import build_model_folder

BLOCK = (24, 20)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))


def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The projections in FP8 blocks, as in the folders of DeepSeek and Qwen."""
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            values[name] = tensor
            continue
        rows, cols = tensor.shape
        codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
                scales[i, j] = tensor[block].float().abs().max() / 448
                codes[block] = (tensor[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
        values |= {name: codes, f"{name}_scale_inv": scales}
    return values


def dequantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    values = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scales = torch.kron(tensors[f"{name}_scale_inv"], torch.ones(BLOCK))
            tensor = (tensor.float() * scales[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        if not name.endswith("_scale_inv"):
            values[name] = tensor
    return values


def without(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model_folder(tmp_path / "model", "llama", dtype=torch.bfloat16, tie_word_embeddings=False)


@pytest.fixture
def quantized(model: Path) -> Path:
    rewrite(model, quantize, quantization_config=FP8)
    return model


@pytest.mark.slow
def test_quantized_model_is_dequantized(quantized: Path, tmp_path: Path) -> None:
    done = convert(quantized, tmp_path / "there")
    assert done.notes == ["weights are FP8 in blocks of 24x20: dequantized to bfloat16"]
    assert compare_models(quantized, tmp_path / "there").formats == ("hf", "torch_dist")
    convert(quantized, tmp_path / "legacy", "torch", layout=LegacyLayout(tp=2, pp=2))
    compare_models(tmp_path / "there", tmp_path / "legacy")
    convert(tmp_path / "there", tmp_path / "back")
    back, expected = (
        load_file(tmp_path / "back" / "model.safetensors"),
        dequantize(load_file(quantized / "model.safetensors")),
    )
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert back[name].dtype == torch.bfloat16 and torch.equal(back[name], tensor)


@pytest.mark.slow
def test_experts_and_latent_attention_of_deepseek(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "deepseek_v3", dtype=torch.bfloat16)
    rewrite(model, quantize, quantization_config=FP8)
    assert convert(model, tmp_path / "there").notes == ["weights are FP8 in blocks of 24x20: dequantized to bfloat16"]
    convert(tmp_path / "there", tmp_path / "back")
    back, expected = (
        load_file(tmp_path / "back" / "model.safetensors"),
        dequantize(load_file(model / "model.safetensors")),
    )
    assert back.keys() == expected.keys() and any(".experts.3." in name for name in back)
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_export_has_no_quantization_config(quantized: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(quantized, tmp_path / "plain", "hf")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    _, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(loading_info.values())


def test_each_rank_dequantizes_its_slices(quantized: Path) -> None:
    config = RunConfig.model_validate(
        {"recipe": "pretrain", "out": "unused", "model": {"path": str(quantized)}, "data": {"files": ["unused"]}}
    )
    plans = plan_model(open_run_model(config), config)
    assert plans.weights.notes == ("weights are FP8 in blocks of 24x20: dequantized to bfloat16",)
    arch, name = plans.architecture, "decoder.layers.1.mlp.linear_fc2.weight"
    full = dequantize(load_file(quantized / "model.safetensors"))["model.layers.1.mlp.down_proj.weight"]
    for rank in range(2):
        layout = Layout(tp_rank=rank, tp_size=2, padded_vocab_size=arch.vocab_size)
        live = {name: torch.zeros(local_shape(plans.family.placements(arch)[name].rule, arch, layout))}
        import_weights(live, plans.family, arch, plans.weights.source, layout=layout)
        assert torch.equal(live[name], full.chunk(2, dim=1)[rank].float())


def test_missing_scales_and_unknown_methods_are_refused(quantized: Path, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.q_proj.weight_scale_inv"
    rewrite(quantized, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(DataError, match=f"1 missing: {name}"):
        convert(quantized, tmp_path / "out")
    rewrite(quantized, dict, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UsageError, match="quant_method='gptq' is not supported"):
        convert(quantized, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_codes_without_quantization_config_are_refused(quantized: Path, tmp_path: Path) -> None:
    rewrite(quantized, dict, quantization_config=None)
    with pytest.raises(DataError, match=r"28 not expected: .*_scale_inv.*28 of a type that cannot be trained"):
        convert(quantized, tmp_path / "out")


@pytest.mark.slow
def test_hf_like_may_be_a_quantized_model(quantized: Path, tmp_path: Path) -> None:
    convert(quantized, tmp_path / "there")
    config = json.loads((quantized / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(config))
    assert convert(tmp_path / "there", tmp_path / "back", hf_like=tmp_path / "like").notes == []
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_missing_prefix_is_added(tied: bool, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    convert(model, tmp_path / "wanted")
    rewrite(model, without("model."))
    assert convert(model, tmp_path / "there").notes == ["tensor names lack the prefix 'model.', which is added"]
    assert compare_models(tmp_path / "wanted", tmp_path / "there").num_tensors == (4 * 12 + 2 + (not tied))


@pytest.mark.slow
def test_quantized_without_prefix(quantized: Path, tmp_path: Path) -> None:
    convert(quantized, tmp_path / "wanted")
    rewrite(quantized, without("model."))
    notes = convert(quantized, tmp_path / "there").notes
    assert len(notes) == 2
    compare_models(tmp_path / "wanted", tmp_path / "there")


@pytest.mark.parametrize(
    "names",
    [
        without("model.layers.0."),
        lambda tensors: tensors | without("model.")(tensors),
        lambda tensors: {key: tensor for key, tensor in without("model.")(tensors).items() if key != "norm.weight"},
        lambda tensors: without("model.")(tensors) | {"model.norm.weight": tensors["model.norm.weight"]},
    ],
    ids=["some", "both", "one-missing", "one-twice"],
)
def test_prefix_is_not_added_to_incomplete_models(names: Any, model: Path, tmp_path: Path) -> None:
    rewrite(model, lambda tensors: {key: tensor.clone() for key, tensor in names(tensors).items()})
    with pytest.raises(DataError, match="not expected"):
        convert(model, tmp_path / "out")
