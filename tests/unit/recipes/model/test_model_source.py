"""The model and the tokenizer of a run, from every kind of source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.families.registry import family_for
from isthmus.hf import hub
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from isthmus.hf.tokenizer.tokenizer_kinds import NumberTokenizer
from isthmus.recipes.model.model_source import open_source, run_tokenizer, with_tokens_of
from ranks.tiny import build_model_folder


def config_of(recipe: str = "pretrain", **sections: Any) -> RunConfig:
    plain = {"recipe": recipe, "out": "o", "train": {"steps": 1}, "data": {"files": ["a"]}}
    return RunConfig.model_validate(plain | sections)


def opened(**model: Any) -> Any:
    return open_source(config_of(model=model).model)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    folder = tmp_path / "words"
    folder.mkdir()
    save_tokenizer(train_tokenizer(["the sea is blue " * 9], vocab_size=300), folder)
    return folder


def test_preset_has_no_files() -> None:
    result = opened(path="preset:llama3.2-1b", init="random", config={"num_hidden_layers": 2, "rope_scaling": None})
    assert (result.config["num_hidden_layers"], result.config["hidden_size"]) == (2, 2048)
    assert str(result) == "preset:llama3.2-1b" and not result.has_weights
    assert result.small_files() == [] and dict(result.tensors) == {}


def test_changed_config_has_no_weights(tmp_path: Path, words: Path) -> None:
    folder = build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1)
    for file in words.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert opened(path=str(folder)).has_weights
    result = opened(path=str(folder), init="random", config={"num_hidden_layers": 3})
    assert not result.has_weights and result.config["num_hidden_layers"] == 3
    assert "tokenizer.json" in {path.name for path in result.small_files()}


def test_config_over_weights(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1)
    scaling = {"rope_type": "linear", "factor": 2.0}
    keys = {"attention_dropout": 0.1, "max_position_embeddings": 256, "rope_parameters": scaling, "rms_norm_eps": 1e-4}
    result = opened(path=str(folder), config=keys)
    assert result.has_weights and result.tensors == opened(path=str(folder)).tensors
    assert result.config["rope_parameters"]["factor"] == 2.0 and result.config["rope_parameters"]["rope_theta"]
    assert {name: result.config[name] for name in keys if name != "rope_parameters"} == {
        name: value for name, value in keys.items() if name != "rope_parameters"
    }


@pytest.mark.parametrize("old", [False, True], ids=["transformers 5", "older"])
@pytest.mark.parametrize(
    ("before", "keys", "base", "scaling"),
    [
        ({}, {"rope_theta": 5e5}, 5e5, None),
        ({}, {"rope_scaling": {"type": "linear", "factor": 2}}, 1e3, ("linear", 2.0, 8192)),
        ({}, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 1e3, ("yarn", 4.0, 128)),
        ({}, {"rope_scaling": {"rope_type": "yarn"}, "max_position_embeddings": 1024}, 1e3, ("yarn", 8.0, 128)),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_scaling": {"factor": 4.0}}, 1e3, ("linear", 4.0, 8192)),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_parameters": None}, 1e3, None),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 5},
         5.0, ("yarn", 2.0, 128)),
    ],
)  # fmt: skip
def test_rotary_settings_over_weights(
    old: bool, before: dict[str, Any], keys: dict[str, Any], base: float, scaling: Any, tmp_path: Path
) -> None:
    """In both spellings, also where the config has the other one; what is not given stays."""
    folder = build_model_folder(tmp_path / "model", "qwen3", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1e3, "rope_scaling": before or None} if old else {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, **before}
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    result = opened(path=str(folder), config=keys)
    arch = architecture_of(result.config)
    rope = arch.rotary.rope_scaling
    kind = rope and (rope.kind, rope.factor, rope.original_max_position_embeddings)
    assert (arch.rotary.rotary_base, kind) == (base, scaling)


def test_rotary_settings_by_layer(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "model", "gemma3_text", num_hidden_layers=1)
    keys = {"rope_theta": 5e5, "rope_local_base_freq": 7e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    arch = architecture_of(opened(path=str(folder), config=keys).config)
    assert (arch.rotary.rotary_base, arch.windows.window_rotary_base, arch.rotary.rope_scaling.factor) == (
        5e5,
        7e3,
        8.0,
    )
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert architecture_of(opened(path=str(folder), config={"rope_scaling": None}).config).rotary.rope_scaling is None
    with pytest.raises(UsageError, match="rope_type, factor is not a kind of layer"):
        opened(path=str(folder), config={"rope_parameters": {"rope_type": "linear", "factor": 8.0}})


def architecture_of(config: Any) -> Any:
    return family_for(config).to_architecture(config)


def test_window_over_weights(tmp_path: Path) -> None:
    """Is refused where no layer has one."""
    for family, keys in (("llama", {}), ("qwen3", {"use_sliding_window": True})):
        folder = build_model_folder(tmp_path / family, family, num_hidden_layers=1)
        with pytest.raises(UsageError, match=f"model.config.sliding_window has no effect on .* type {family}"):
            opened(path=str(folder), config={"sliding_window": 7, **keys})
    keys |= {"sliding_window": 7, "layer_types": ["sliding_attention"]}
    assert architecture_of(opened(path=str(folder), config=keys).config).windows.sliding_window == 7


def test_end_of_turn_ends_a_generation(words: Path) -> None:
    tokenizer = load_tokenizer(words)
    end = tokenizer.inner.convert_tokens_to_ids("<|endoftext|>")
    assert with_tokens_of(tokenizer, {"eos_token_id": tokenizer.eos_id})["eos_token_id"] == tokenizer.eos_id != end
    tokenizer.use_chat_template("{% for m in messages %}{{ m.role + m.content + '<|endoftext|>' }}{% endfor %}")
    for before in (None, tokenizer.eos_id, [tokenizer.eos_id], [tokenizer.eos_id, end]):
        assert with_tokens_of(tokenizer, {"eos_token_id": before})["eos_token_id"] == [tokenizer.eos_id, end]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"num_hidden_layers": 2}, r"model.layers.1.input_layernorm.weight is absent, with model.config \[32\]"),
        ({"intermediate_size": 64}, r"mlp.down_proj.weight is \[32, 48\], with model.config \[32, 64\]"),
        ({"tie_word_embeddings": True}, r"lm_head.weight is \[77, 32\], with model.config absent"),
        ({"num_attention_heads": 8, "head_dim": 8}, "num_attention_heads is 4, with model.config 8"),
        ({"model_type": "qwen3"}, "model_type is llama, with model.config qwen3"),
    ],
)
def test_config_that_changes_tensors_needs_random_weights(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1)
    with pytest.raises(UsageError, match=f"model.config changes the tensors of .*{why}. Leave out .*init=random"):
        opened(path=str(folder), config=keys)
    opened(path=str(folder), config=keys, init="random")


def test_model_from_a_file_or_from_the_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("bases: [preset:qwen3-0.6b]\nnum_hidden_layers: 3\n")
    assert opened(path=str(tmp_path / "mine.yaml"), init="random").config["num_hidden_layers"] == 3
    (tmp_path / "slip.yaml").write_text("bases: [preset:qwen3-0.6b]\nnum_layers: 3\n")
    with pytest.raises(UsageError, match=r"slip.yaml: a model of type qwen3 does not use num_layers \(did you"):
        opened(path=str(tmp_path / "slip.yaml"), init="random")
    full = json.loads((build_model_folder(tmp_path / "m", "mixtral") / "config.json").read_text())
    assert opened(init="random", config=full).config == full  # with all that transformers saves


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"config": {"num_layer": 2, "hiden_size": 8}},
            r"num_layer \(did .*\?\), hiden_size \(did you mean hidden_size",
        ),
        ({"config": {"router_aux_loss_coef": 0.1}}, r"type llama does not use router_aux_loss_coef.* under moe"),
        ({"config": {"rope_scaling": {"factor": 8.0}}}, r"rope_scaling.factor=8.0 has no effect without"),
        ({"path": None, "config": {"model_type": "lama"}}, "no family has the model_type 'lama'"),
    ],
)
def test_unused_key_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened(**{"path": "preset:llama3-8b", "init": "random"} | model)


def test_missing_model_is_reported_with_both_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MissingInput, match=r"no local folder models/llama, and .* hf download models/llama"):
        opened(path="models/llama")
    with pytest.raises(MissingInput, match=r"an id on the Hub \(org/name\), or for a model preset:NAME"):
        opened(path="./models/llama")


def test_tokenizer_of_a_run(words: Path) -> None:
    model = {"path": "preset:llama3.2-1b", "init": "random"}
    source = open_source(config_of(model=model).model)
    chosen = run_tokenizer(config_of(model=model, tokenizer={"path": str(words)}), source, 300)
    assert chosen.folder == words
    with pytest.raises(MissingInput, match=r"preset:llama3.2-1b has no tokenizer\. Set one with tokenizer.path"):
        run_tokenizer(config_of(model=model), source, 300)
    last = chosen.vocab_size - 1
    with pytest.raises(
        UsageError, match=rf"has {last + 1} tokens, the last of them .* embedding {last} rows.*_size={last + 1}"
    ):
        run_tokenizer(config_of(model=model, tokenizer={"path": str(words)}), source, last)
    numbers = {"type": "NullTokenizer", "vocab_size": 300}
    with pytest.raises(UsageError, match="has 301 tokens, the last of them '<eod>'"):
        run_tokenizer(config_of(model=model, tokenizer=numbers), source, 300)
    assert run_tokenizer(config_of(model=model, tokenizer=numbers), source, 301).eos_id == 300
    with pytest.raises(UsageError, match="NullTokenizer reads numbers, and sft trains on chats"):
        run_tokenizer(config_of("sft", model=model, tokenizer=numbers), source, 301)
    run_tokenizer(config_of(model=model, tokenizer=numbers, data={"mock": True}), source, 300)  # no text to tokenize
    mock = run_tokenizer(config_of(model=model, data={"mock": True}), source, 50)
    assert isinstance(mock, NumberTokenizer) and mock.vocab_size == 50


def test_special_tokens_follow_the_tokenizer(words: Path) -> None:
    model = {"path": "preset:llama3.2-1b", "init": "random"}
    source = open_source(config_of(model=model).model)
    tokenizer = run_tokenizer(config_of(model=model, tokenizer={"path": str(words)}), source, 300)
    changed = with_tokens_of(tokenizer, source.config)
    assert (changed["eos_token_id"], changed["pad_token_id"], changed["bos_token_id"]) == (2, 0, None)
    several = {"eos_token_id": [9, 2], "pad_token_id": 0, "bos_token_id": None}
    assert with_tokens_of(tokenizer, several) == several
