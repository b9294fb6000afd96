"""Experiments of Primus become exactly these settings, with their model files or with presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.config.dialects.primus.translate_primus import translate_experiment
from isthmus.errors import MissingInput, UsageError
from unit.config.dialects.examples import MODEL_FILES, OVERRIDES, experiment

SETTINGS = {
    "tokenizer.path": "meta-llama/Llama-3.1-8B",
    "tokenizer.type": "HuggingFaceTokenizer",
    "data.seq_length": 8192,
    "data.seed": 1234,
    "data.mock": True,
    "data.valid_fraction": 0.01,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 128,
    "train.steps": 50,
    "train.eval_every": 2000,
    "train.seed": 1234,
    "train.attention_dropout": 0.0,
    "train.hidden_dropout": 0.0,
    "train.precision": "bf16",
    "optim.lr": 1e-5,
    "optim.min_lr": 0.0,
    "optim.weight_decay": 0.1,
    "optim.clip_grad": 1.0,
    "optim.beta1": 0.9,
    "optim.beta2": 0.95,
    "optim.eps": 1e-8,
    "optim.schedule": "cosine",
    "optim.warmup_steps": 2,
    "checkpoint.resume": "never",
    "logging.every": 100,
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIMUS_PATH", "PRIMUS_TEAM", "PRIMUS_MODEL", "PRIMUS_SEQ_LENGTH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, text in MODEL_FILES.items():
        (folder / name).write_text(text)
    return folder


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "first.yaml"
    path.write_text(text)
    return path


def test_experiment_with_model_files(tmp_path: Path, models: Path) -> None:
    result = translate_experiment(written(tmp_path, experiment("llama3.1_8B")), models)
    assert result.translation.settings == SETTINGS | {
        "out": "./output/amd/me/first",
        "checkpoint.every": 20000,
        "checkpoint.save_final": True,
    }
    assert result.translation.origins["optim.beta2"] == "adam_beta2: 0.95"
    assert result.translation.origins["train.precision"] == "pre_trainer, default of Primus: bf16: true"
    expected = {"rotary_base": 500000, "layernorm_epsilon": 1e-6, "init_method_std": 0.008, "num_query_groups": 8}
    expected |= {"max_position_embeddings": 8192, "group_query_attention": True}
    assert {name: result.model[name] for name in expected} == expected
    assert [(remark.option, remark.status) for remark in result.translation.remarks] == [
        ("stderr_sink_level: DEBUG, log_avg_skip_iterations: 2, log_avg_reset_interval: 50", "different"),
        ("llama3.1_8B.yaml: tokenizer_type: Llama3Tokenizer", "different"),
    ]


def test_experiment_of_one_module(tmp_path: Path, models: Path) -> None:
    overrides = "\n".join(f"  {line}" for line in OVERRIDES.strip().splitlines())
    result = translate_experiment(written(tmp_path, f"model: llama3.1_8B.yaml\noverrides:\n{overrides}\n"), models)
    assert result.translation.settings == SETTINGS | {"out": "runs/first", "checkpoint.save_final": False}
    assert result.model["num_layers"] == 32


def test_moe_model_with_bases(tmp_path: Path, models: Path) -> None:
    more = "\nmoe_token_dispatcher_type: flex\nuse_turbo_deepep: true\nexpert_model_parallel_size: 2"
    result = translate_experiment(written(tmp_path, experiment("mixtral_tiny", more)), models)
    settings = result.translation.settings
    assert {
        name: value for name, value in settings.items() if name.startswith(("moe.", "parallel.", "tokenizer."))
    } == {
        "moe.dispatcher": "alltoall",
        "moe.aux_loss": 0.01,
        "parallel.ep": 2,
        "tokenizer.type": "NullTokenizer",
        "tokenizer.vocab_size": 99,
    }
    assert result.model["padded_vocab_size"] == 100


def test_a_checkout_is_found_from_within_and_by_primus_path(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "Primus"
    (checkout / "primus/configs/models").mkdir(parents=True)
    models.rename(checkout / "primus/configs/models/megatron")
    (checkout / "examples").mkdir()
    assert translate_experiment(written(checkout / "examples", experiment("llama3_8B"))).model["num_layers"] == 32
    outside = written(tmp_path, experiment("llama3_8B"))
    assert not translate_experiment(outside).model
    monkeypatch.setenv("PRIMUS_PATH", str(checkout))
    assert translate_experiment(outside).model["num_layers"] == 32


def test_a_known_model_without_its_file_becomes_a_preset_with_overrides(tmp_path: Path) -> None:
    result = translate_experiment(written(tmp_path, experiment("llama3.1_8B", "\nrotary_base: 10000")))
    translation = result.translation
    assert not result.model
    assert translation.settings["model.path"] == "preset:llama3.1-8b"
    assert translation.settings["model.init"] == "random"
    expected = {"max_position_embeddings": 8192, "initializer_range": 0.008, "rms_norm_eps": 1e-6}
    assert translation.settings["model.config"] == expected
    remarks = {remark.option: remark for remark in translation.remarks}
    assert "no RoPE scaling" in remarks["model: llama3.1_8B.yaml"].reason
    assert remarks["rotary_base: 10000"].status == "unsupported"


def test_sft_defaults_and_data(tmp_path: Path, models: Path) -> None:
    more = '\nsft_dataset_name: "someone/chats"\nlora: {enabled: false, dim: 32}\neval_interval: 25'
    text = experiment("llama3_8B", more, "sft_trainer.yaml").replace("mock_data: true", "mock_data: false")
    translation = translate_experiment(written(tmp_path, text), models).translation
    assert translation.recipe == "sft"
    assert translation.settings["data.files"] == ["hf:someone/chats:train"]
    assert translation.settings["train.eval_every"] == 25
    result = translate_experiment(written(tmp_path, text + "      hf_path: someone/model"), models)
    assert (result.model, result.translation.settings["model.path"]) == ({}, "someone/model")
    assert "model.init" not in result.translation.settings


def test_switches_that_are_off_are_accepted(tmp_path: Path, models: Path) -> None:
    off = "\nfused_padded_mla_attention: false\nzzz_later_optimization: false"
    remarks = translate_experiment(written(tmp_path, experiment("llama3_8B", off)), models).translation.remarks
    assert [remark.option for remark in remarks if remark.status == "ignored"] == ["zzz_later_optimization: false"]
    with pytest.raises(UsageError, match=r"overlap_grad_reduc  is not a key .*did you mean overlap_grad_reduce"):
        translate_experiment(written(tmp_path, experiment("llama3_8B", "\noverlap_grad_reduc: false")), models)
    on = written(tmp_path, experiment("llama3_8B", off.replace("false", "true")))
    with pytest.raises(UsageError, match="zzz_later_optimization  is not a key") as error:
        translate_experiment(on, models)
    assert "fused_padded" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (experiment("llama3_8B", "\ntrain_iter: 5"), r"train_iter  is not a key .*did you mean train_iters\?"),
        (experiment("llama3_8B", "\nuse_turbo: [1]\nlora: {enabled: true}"), "adapters"),
        (experiment("mistral_900B"), "model: mistral_900B.yaml  was not found beside the experiment.*--models"),
        (experiment("llama3_8B").replace("framework: megatron", "framework: torchtitan"), "framework: torchtitan"),
        ("model: llama3_8B.yaml\noverrides: 3", "overrides  must be a mapping"),
        ("includes: 3", "includes  must be a list of files, got 3"),
        ("modules: {evaluator: {}}", "0 modules with trainer in their names"),
        (experiment("llama3_8B", "\nclip_grad: {max: 1}"), "clip_grad: .*must be a number"),
        (experiment("llama3_8B", "\nseed: ${NOT_SET_ANYWHERE}"), "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_invalid_input_is_refused(tmp_path: Path, models: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        translate_experiment(written(tmp_path, text), models)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(MissingInput):
        translate_experiment(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="--models"):
        translate_experiment(written(tmp_path, experiment("llama3_8B")), tmp_path / "none")
