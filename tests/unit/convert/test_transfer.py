"""Conversion between Hugging Face and torch_dist: same bytes, strict checks, atomic output."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import isthmus
from isthmus.convert import transfer
from isthmus.convert.open_model import checkpoint_folder
from isthmus.convert.torch_dist import to_torch_dist
from isthmus.convert.torch_dist.from_torch_dist import TorchDistFolder
from isthmus.convert.torch_pickle import read_torch_pickle
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.engine.checkpoint.common_state import read_common_state
from isthmus.engine.checkpoint.index_file import read_index
from isthmus.errors import (
    CheckFailed,
    DataError,
    IOFailure,
    IsthmusError,
    MissingInput,
    OutputExists,
    UnsafeInput,
    UsageError,
)
from isthmus.files.checked_files import ChecksumVerifier, trusting
from ranks.tiny import ARCHETYPES, SIZES, build_model_folder, without_checksums


def content(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def change(folder: Path, name: str, new: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = new(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return build_model_folder(tmp_path / "qwen3", "qwen3", tie_word_embeddings=False)


@pytest.fixture
def converted(qwen3: Path, tmp_path: Path) -> Path:
    convert(qwen3, tmp_path / "megatron")
    return without_checksums(tmp_path / "megatron")


@pytest.mark.slow
@pytest.mark.sweep_cases("mixtral-dtype5-True", "gpt2-dtype1-False")
@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [
        *((family, torch.float32, False) for family in ARCHETYPES),
        ("qwen3", torch.bfloat16, True),
        ("mixtral", torch.bfloat16, True),
    ],
)
def test_round_trip_keeps_all_bytes(family: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "hf", family, dtype=dtype, tie_word_embeddings=tied, shards="40KB")
    (source / "tokenizer_config.json").write_text("{}")
    there = convert(source, tmp_path / "megatron")
    back = convert(tmp_path / "megatron", tmp_path / "back")
    assert (there.destination_format, back.destination_format) == ("torch_dist", "hf")
    assert there.num_bytes >= back.num_bytes  # a norm of experts is there under both of its names
    before, after = content(source), content(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == "{}"
    assert compare_models(source, tmp_path / "back").num_tensors == len(before)
    assert compare_models(source, tmp_path / "megatron").formats == ("hf", "torch_dist")


def test_from_python(qwen3: Path, tmp_path: Path) -> None:
    done = isthmus.convert(str(qwen3), str(tmp_path / "out"))
    assert (done.source_format, done.destination_format) == ("hf", "torch_dist")
    assert isthmus.convert.transfer.convert is convert  # type: ignore[attr-defined]


@pytest.mark.slow
def test_dtype_is_converted(qwen3: Path, tmp_path: Path) -> None:
    convert(qwen3, tmp_path / "bf16", dtype=torch.bfloat16)
    convert(tmp_path / "bf16", tmp_path / "back")
    before, after = content(qwen3), content(tmp_path / "back")
    assert all(torch.equal(tensor.bfloat16(), after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("to", ["hf", "torch_dist", "torch"])
def test_values_beyond_a_dtype_are_refused(to: Any, qwen3: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change(qwen3, name, lambda weight: torch.full_like(weight, 70000.0))
    with pytest.raises(UsageError, match="has 70000, and the largest value of float16 is 65504"):
        convert(qwen3, tmp_path / "out", to, dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    convert(qwen3, tmp_path / "out", to, dtype=torch.bfloat16)


def test_infinity_of_the_source_is_copied(qwen3: Path, tmp_path: Path) -> None:
    change(qwen3, "model.norm.weight", lambda weight: torch.full_like(weight, math.inf))
    convert(qwen3, tmp_path / "half", "hf", dtype=torch.float16)
    assert content(tmp_path / "half")["model.norm.weight"].isinf().all()


def test_hf_to_hf(qwen3: Path, tmp_path: Path) -> None:
    convert(qwen3, tmp_path / "half", "hf", dtype=torch.float16)
    assert {tensor.dtype for tensor in content(tmp_path / "half").values()} == {torch.float16}


def test_layers_are_stacked_under_megatrons_names(converted: Path) -> None:
    folder = TorchDistFolder(converted / "release")
    layers, hidden, ffn = SIZES["num_hidden_layers"], SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes = {key: tuple(entry.size) for key, entry in folder.tensors.items()}
    assert shapes["decoder.layers.mlp.linear_fc1.weight"] == (layers, 2 * ffn, hidden)
    assert shapes["decoder.layers.mlp.linear_fc1.layer_norm_weight"] == (layers, hidden)
    assert shapes["embedding.word_embeddings.weight"] == (SIZES["vocab_size"], hidden)


def test_args_for_megatron_lm(converted: Path) -> None:
    common = read_torch_pickle(converted / "release" / "common.pt")
    args = vars(common["args"])
    assert common["iteration"] == 0 and (converted / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (args["num_layers"], args["num_query_groups"], args["qk_layernorm"]) == (4, 2, True)
    assert args["untie_embeddings_and_output_weights"] and args["padded_vocab_size"] == SIZES["vocab_size"]


@pytest.mark.slow
def test_common_state_as_an_object(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.19 writes it, and no common.pt."""
    monkeypatch.setattr(to_torch_dist, "saves_common_state_object", lambda: True)
    convert(qwen3, tmp_path / "both")
    without_checksums(tmp_path / "both")
    release = tmp_path / "both" / "release"
    args = TorchDistFolder(release).args
    (release / "common.pt").unlink()
    assert args is not None and TorchDistFolder(release).args == args
    assert vars(read_common_state(release, read_index(release), ChecksumVerifier())["args"]) == args
    shutil.rmtree(tmp_path / "both" / "hf")
    convert(tmp_path / "both", tmp_path / "back", "hf")
    assert all(torch.equal(tensor, content(tmp_path / "back")[name]) for name, tensor in content(qwen3).items())


@pytest.mark.slow
def test_required_flags_of_megatron_lm(qwen3: Path, tmp_path: Path) -> None:
    (qwen3 / "tokenizer_config.json").write_text("{}")
    assert convert(qwen3, tmp_path / "out dir").megatron_flags == [
        f"--load '{tmp_path}/out dir'",
        "--use-checkpoint-args",
        "--norm-epsilon 1e-06",
        "--qk-layernorm",
        "--tokenizer-type HuggingFaceTokenizer",
        f"--tokenizer-model '{tmp_path}/out dir/hf'",
    ]
    assert convert(qwen3, tmp_path / "out").megatron_lacks == []


def test_unsupported_features_of_megatron_lm(tmp_path: Path) -> None:
    done = convert(build_model_folder(tmp_path / "hf", "gemma2", num_hidden_layers=2), tmp_path / "out")
    assert done.megatron_flags == []
    assert {"layers of the form 'sandwich'", "attention_softcap=50"} < set(done.megatron_lacks)
    assert "trains in Isthmus only" in done.notes[-1]
    args = vars(read_torch_pickle(tmp_path / "out" / "release" / "common.pt")["args"])
    assert args["apply_layernorm_1p"] and not args["swiglu"]


def test_gpt2_needs_no_flags(tmp_path: Path) -> None:
    rates = {"attn_pdrop": 0.1, "resid_pdrop": 0.2}
    done = convert(build_model_folder(tmp_path / "hf", "gpt2", num_hidden_layers=2, **rates), tmp_path / "out")
    assert (done.megatron_flags[2:], done.megatron_lacks) == ([], [])
    args = vars(read_torch_pickle(tmp_path / "out" / "release" / "common.pt")["args"])
    assert (args["position_embedding_type"], args["normalization"]) == ("learned_absolute", "LayerNorm")
    assert args["add_bias_linear"] and not args["swiglu"]
    assert (args["attention_dropout"], args["hidden_dropout"]) == (0.1, 0.2)


PLANTED = {
    "two heads swapped": (
        "model.layers.1.self_attn.q_proj.weight",
        lambda w: torch.cat((w[16:32], w[:16], w[32:])),
    ),
    "one row shuffled": ("model.layers.2.mlp.gate_proj.weight", lambda w: w[torch.randperm(len(w))]),
    "zeroed": ("model.layers.0.self_attn.k_norm.weight", torch.zeros_like),
    "one bit": ("model.embed_tokens.weight", lambda w: w.view(torch.int32).bitwise_xor(1).view(torch.float32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_verify_detects_changed_tensor(fault: str, qwen3: Path, converted: Path) -> None:
    name, new = PLANTED[fault]
    change(qwen3, name, new)
    with pytest.raises(CheckFailed, match=name.replace(".", r"\.")):
        compare_models(qwen3, converted)


@pytest.mark.slow
def test_verify_detects_exchanged_gate_and_up(qwen3: Path, converted: Path) -> None:
    tensors = load_file(qwen3 / "model.safetensors")
    gate, up = "model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, qwen3 / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match="2 of"):
        compare_models(qwen3, converted)


@pytest.mark.slow_cases("rms_norm_eps-0.001-norm_epsilon")
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rms_norm_eps", 1e-3, "norm_epsilon"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}, "rotary"),
    ],
)
def test_verify_detects_another_config(key: str, value: Any, message: str, qwen3: Path, converted: Path) -> None:
    path = qwen3 / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckFailed, match=message):
        compare_models(qwen3, converted)


@pytest.mark.slow
def test_nan_is_a_difference_of_nan(qwen3: Path, converted: Path) -> None:
    change(qwen3, "model.norm.weight", lambda w: w.index_fill(0, torch.tensor([3]), torch.nan))
    with pytest.raises(CheckFailed, match=r"model\.norm\.weight in 1 of \d+ elements, by nan at most"):
        compare_models(qwen3, converted)


def test_parts_in_float16_and_bfloat16_do_not_overflow(qwen3: Path, tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{item}_proj.weight" for item in "qkv"]
    for name in names[:2]:
        change(qwen3, name, torch.Tensor.half)
    change(qwen3, names[2], lambda w: torch.full_like(w, 1e6).bfloat16())
    convert(qwen3, tmp_path / "out", "hf", dtype=torch.float32)
    expected, result = content(qwen3), content(tmp_path / "out")
    assert all(torch.equal(result[name], expected[name].float()) for name in names)


@pytest.mark.slow
def test_minus_zero_is_not_zero(qwen3: Path, converted: Path, tmp_path: Path) -> None:
    change(qwen3, "model.norm.weight", torch.zeros_like)
    convert(qwen3, tmp_path / "zero")
    change(qwen3, "model.norm.weight", lambda w: -torch.zeros_like(w))
    with pytest.raises(CheckFailed):
        compare_models(qwen3, tmp_path / "zero")


def test_unexpected_or_missing_tensor_is_refused(qwen3: Path, tmp_path: Path) -> None:
    tensors = load_file(qwen3 / "model.safetensors")
    save_file(tensors | {"model.layers.0.extra.weight": torch.zeros(2)}, qwen3 / "model.safetensors")
    with pytest.raises(DataError, match=r"1 not expected: model\.layers\.0\.extra\.weight"):
        convert(qwen3, tmp_path / "out")
    tensors.pop("model.norm.weight")
    save_file(tensors, qwen3 / "model.safetensors")
    with pytest.raises(DataError, match=r"1 missing: model\.norm\.weight"):
        convert(qwen3, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_checkpoint_of_another_model_is_refused(converted: Path, tmp_path: Path) -> None:
    plain = build_model_folder(tmp_path / "llama", "llama", tie_word_embeddings=False)
    with pytest.raises(DataError, match=r"not expected: decoder\.layers\.self_attention\.[qk]_layernorm"):
        convert(converted, tmp_path / "out", hf_like=plain)
    deeper = build_model_folder(tmp_path / "deep", "qwen3", tie_word_embeddings=False, num_hidden_layers=5)
    with pytest.raises(DataError, match="has 4 layers, not 5"):
        convert(converted, tmp_path / "out", hf_like=deeper)


@pytest.mark.slow
def test_checkpoint_without_config_and_args_needs_hf_like(converted: Path, qwen3: Path, tmp_path: Path) -> None:
    shutil.rmtree(converted / "hf")
    torch.save({"iteration": 0}, converted / "release" / "common.pt")
    with pytest.raises(MissingInput, match="--hf-like"):
        convert(converted, tmp_path / "out")
    convert(converted, tmp_path / "out", hf_like=qwen3)
    compare_models(qwen3, tmp_path / "out")


def test_missing_or_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInput):
        convert(tmp_path / "empty", tmp_path / "out")


@pytest.mark.slow_cases("5000 digits")
@pytest.mark.parametrize("text", ["7", "\u0667", "1" * 5000, ""], ids=["7", "arabic digit", "5000 digits", "empty"])
def test_tracker_of_a_missing_checkpoint_is_refused(text: str, converted: Path) -> None:
    (converted / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=f"names '{text}', which is not a checkpoint"):
        checkpoint_folder(converted)


def test_damaged_tracker_of_a_run_is_refused(tmp_path: Path) -> None:
    """A flipped bit converted another step without a word."""
    for step in (10, 12):
        (tmp_path / f"iter_{step:07d}").mkdir()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("12")
    tracker.with_suffix(".json").write_text('{"steps": [12]}')
    assert checkpoint_folder(tmp_path) == tmp_path / "iter_0000012"
    tracker.write_text("10")
    with pytest.raises(DataError, match=r"names step 10, and .*json beside it \[12\].*iter_0000010"):
        checkpoint_folder(tmp_path)
    with trusting():
        assert checkpoint_folder(tmp_path) == tmp_path / "iter_0000010"
    tracker.with_suffix(".json").write_text('{"steps": 10}')
    with pytest.raises(DataError, match="names step 10"):
        checkpoint_folder(tmp_path)


def test_existing_destination_is_refused(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExists, match="exists already"):
        convert(qwen3, tmp_path / "out")


def test_failed_conversion_leaves_nothing(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(transfer, "write_model_files", full)
    for to in ("torch_dist", "hf"):
        with pytest.raises(IOFailure):
            convert(qwen3, tmp_path / "out", to)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*out*"))


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran-anyway"),))


@pytest.mark.parametrize("file", [".metadata", "common.pt", "data"])
def test_pickle_does_not_run(file: str, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    release = converted / "release"
    if file == ".metadata":
        (release / file).write_bytes(pickle.dumps(Payload()))
    elif file == "common.pt":
        torch.save(Payload(), release / file)
    else:
        torch.save(Payload(), release / "__0_0.distcp")
        (release / "__0_0.distcp").write_bytes((release / "__0_0.distcp").read_bytes().ljust(1 << 20, b"\0"))
    with pytest.raises(IsthmusError) as caught:
        if file == "common.pt":
            read_torch_pickle(release / file)
        else:
            convert(converted, tmp_path / "out")
    assert isinstance(caught.value, UnsafeInput | DataError)
    assert file == "data" or isinstance(caught.value, UnsafeInput)
    assert not Path("ran-anyway").exists() and not (tmp_path / "out").exists()


def test_file_outside_of_the_folder_is_refused(converted: Path, tmp_path: Path) -> None:
    path = converted / "release" / ".metadata"
    index = pickle.loads(path.read_bytes())
    for entry in index.storage_data.values():
        entry.relative_path = "../../elsewhere"
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(UnsafeInput, match="elsewhere"):
        convert(converted, tmp_path / "out")


@pytest.mark.parametrize("damage", ["short", "missing", "index"])
def test_damage_is_named(damage: str, converted: Path, tmp_path: Path) -> None:
    data, index = converted / "release" / "__0_0.distcp", converted / "release" / ".metadata"
    if damage == "missing":
        data.unlink()
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-100])
    else:
        index.write_bytes(index.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"\.distcp|\.metadata"):
        convert(converted, tmp_path / "out")
    assert not (tmp_path / "out").exists()
