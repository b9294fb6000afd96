"""Checkpoints without a config are described by their args."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.errors import CheckFailed, UsageError
from isthmus.hf.special_tokens import SPECIAL_TOKENS
from ranks.tiny import VOCAB, build_model_folder, without_checksums

LAYOUTS: dict[str, dict[str, Any]] = {
    "torch_dist": {},
    "te": {"to": "torch", "layout": LegacyLayout(tp=2, pp=2, vpp=2)},
    "local": {"to": "torch", "layout": LegacyLayout(tp=4), "spelling": "local"},
}


def bare(model: Path, folder: Path, **how: Any) -> Path:
    """A checkpoint of the model without config and tokenizer."""
    convert(model, folder, **how)
    shutil.rmtree(folder / "hf")
    return without_checksums(folder)


def change_args(checkpoint: Path, **changed: Any) -> None:
    file = checkpoint / "release" / "common.pt"
    common = torch.load(file, weights_only=False)
    vars(common["args"]).update(changed)
    torch.save(common, file)


@pytest.mark.slow
@pytest.mark.sweep_cases("gpt2-torch_dist", "gpt2-local")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("gpt2", layout) for layout in LAYOUTS),
        ("deepseek_v3", "te"),
        *(pytest.param(family, "te", marks=pytest.mark.sweep) for family in ("llama", "qwen3", "qwen2_moe")),
    ],
)
def test_args_are_enough(family: str, layout: str, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", family)
    done = convert(bare(model, tmp_path / "there", **LAYOUTS[layout]), tmp_path / "back")
    assert (done.family, len(done.notes)) == (family, 2)
    assert "by its args" in done.notes[0] and "no tokenizer" in done.notes[1]
    config = AutoConfig.from_pretrained(tmp_path / "back")
    assert all((getattr(config, name) or 0) < VOCAB for name in SPECIAL_TOKENS)  # not 50256, as without the setting
    compare_models(model, tmp_path / "back")
    compare_models(model, tmp_path / "there")
    compare_models(tmp_path / "there", model)


@pytest.mark.slow
def test_mistral_without_window_is_read_as_llama(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "mistral", sliding_window=None)
    checkpoint = bare(model, tmp_path / "there")
    done = convert(checkpoint, tmp_path / "back")
    assert done.family == "llama" and "mistral" in done.notes[0]
    assert compare_models(checkpoint, model).family == "mistral"
    with pytest.raises(CheckFailed, match="family"):
        compare_models(model, tmp_path / "back")


@pytest.mark.slow
def test_yaml_model_describes_a_checkpoint(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "mistral", sliding_window=None)
    checkpoint = bare(model, tmp_path / "there")
    config = json.loads((model / "config.json").read_text()) | {"rope_parameters": None}
    keys = "".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
    (tmp_path / "like.yaml").write_text(f"bases: [preset:mistral-7b-v0.3]\n{keys}rope_theta: 1e+4\n")
    done = convert(checkpoint, tmp_path / "back", hf_like=tmp_path / "like.yaml")
    assert (done.family, done.notes) == ("mistral", [])
    compare_models(model, tmp_path / "back")


@pytest.mark.slow
def test_unknown_padding_is_kept_without_vocab_size(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "llama")
    checkpoint = bare(model, tmp_path / "there", to="torch", layout=LegacyLayout(tp=4))
    file = checkpoint / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["args"].vocab_size = None
    torch.save(state, file)
    done = convert(checkpoint, tmp_path / "padded")
    assert "how many of the 80 rows" in done.notes[1]
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"] == 80
    convert(checkpoint, tmp_path / "exact", vocab_size=VOCAB)
    compare_models(model, tmp_path / "exact")
    compare_models(model, checkpoint)


@pytest.mark.slow
def test_vocab_size_is_refused_with_a_config(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "llama")
    convert(model, tmp_path / "there")
    for source in (model, tmp_path / "there"):
        with pytest.raises(UsageError, match="--vocab-size"):
            convert(source, tmp_path / "out", vocab_size=VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "words"), [({"rotary_base": 20000}, "rotary_base"), ({"layernorm_epsilon": 1e-4}, "norm_epsilon")]
)
def test_verify_detects_args_of_another_model(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "qwen3")
    checkpoint = bare(model, tmp_path / "there")
    change_args(checkpoint, **changed)
    with pytest.raises(CheckFailed, match=words):
        compare_models(model, checkpoint)


@pytest.mark.slow
def test_unsupported_model_is_refused(tmp_path: Path) -> None:
    checkpoint = bare(build_model_folder(tmp_path / "hf", "qwen3"), tmp_path / "there")
    change_args(checkpoint, swiglu=False, squared_relu=True)
    with pytest.raises(UsageError, match=r"squared_relu=True.*--hf-like"):
        convert(checkpoint, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_optimizer_state_is_ignored(tmp_path: Path) -> None:
    from isthmus.convert.torch_dist.dcp_metadata import TensorStorageMetadata, load_metadata, save_metadata

    model = build_model_folder(tmp_path / "hf", "llama")
    checkpoint = bare(model, tmp_path / "there")
    path = checkpoint / "release" / ".metadata"
    index = load_metadata(path)
    tensors = {
        key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    for key, entry in tensors.items():
        index.state_dict_metadata[f"optimizer.state.exp_avg.{key}"] = entry
    save_metadata(index, path)
    compare_models(model, checkpoint)


@pytest.mark.slow
def test_mtp_layers_share_the_embedding_in_megatron_lm(tmp_path: Path) -> None:
    from isthmus.convert.torch_dist.dcp_metadata import load_metadata, save_metadata

    model = build_model_folder(tmp_path / "hf", "deepseek_v3")
    full = _with_a_layer_ahead(model, tmp_path / "ahead")
    checkpoint = bare(full, tmp_path / "there")
    path = checkpoint / "release" / ".metadata"
    index = load_metadata(path)
    for name in ("embed_tokens", "output_layer"):
        del index.state_dict_metadata[f"mtp.layers.0.{name}.weight"]
    save_metadata(index, path)
    compare_models(full, checkpoint)


def _with_a_layer_ahead(model: Path, folder: Path) -> Path:
    """The model with one more layer after its last, which uses the model's embedding and head."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    last, ahead = f"model.layers.{config['num_hidden_layers'] - 1}.", f"model.layers.{config['num_hidden_layers']}."
    tensors |= {name.replace(last, ahead): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    tensors[f"{ahead}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{ahead}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    norm = tensors["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{ahead}{name}.weight"] = norm.clone()
    tensors[f"{ahead}eh_proj.weight"] = torch.randn(norm.numel(), 2 * norm.numel())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
