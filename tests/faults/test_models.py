"""Runs from a preset with random weights: training, exports and conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from faults.command import rows
from faults.fork_server import ForkServer
from isthmus.convert.transfer import convert

pytestmark = pytest.mark.thorough

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def pretrain_args(preset: str, data: Path, out: Path, **keys: Any) -> list[str]:
    model = [f"model={preset}", "model.init=random", *(f"model.config.{key}={value}" for key, value in keys.items())]
    run = ["--data", str(data), "--out", str(out), "data.seq_length=32", "train.global_batch_size=4", "train.steps=2"]
    return ["pretrain", *run, "--json", "logging.to=[]", *model]


def test_resized_preset_with_another_tokenizer(isthmus: ForkServer, model: Path, tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"The number is {number}."}) + "\n" for number in range(32)))
    keys = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}
    run = pretrain_args("preset:llama3.2-1b", documents, tmp_path / "out", **keys)
    assert "has no tokenizer" in isthmus(*run).error(66)
    assert isthmus(*run, f"tokenizer.path={model}").result["steps"] == 2
    exported = tmp_path / "out" / "hf"
    assert (exported / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    config = json.loads((exported / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert config["model_type"] == "llama" and config["eos_token_id"] == tokenizer.eos_token_id
    assert config["rope_scaling"]["factor"] == 32.0
    network, loading = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert network.dtype == torch.bfloat16 == getattr(torch, config["dtype"])
    assert torch.isfinite(network(**tokenizer("The number", return_tensors="pt")).logits).all()
    convert(tmp_path / "out" / "checkpoints" / "iter_0000002", tmp_path / "converted")
    again = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert again == config | {"dtype": "float32", "torch_dtype": "float32"}  # training precision
    assert (tmp_path / "converted" / "tokenizer.json").is_file()


def test_null_tokenizer_and_a_model_with_remote_code(isthmus: ForkServer, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("\n".join(" ".join(str((line * step) % 90) for step in range(24)) for line in range(64)))
    keys = SMALL | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts": 4, "vocab_size": 96}
    run = pretrain_args("preset:gpt2-125m-moe", numbers, tmp_path / "out", **keys)
    null = ["tokenizer.type=NullTokenizer", "tokenizer.vocab_size=90"]
    assert "the tokenizer has 101 tokens" in isthmus(*run, null[0], "tokenizer.vocab_size=100").error(2)
    assert isthmus(*run, *null).result["steps"] == 2
    exported = tmp_path / "out" / "hf"
    network = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    ids = AutoTokenizer.from_pretrained(exported)("1 2 3", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[1, 2, 3]] and network(ids).logits.shape == (1, 3, 96)
    assert network.config.eos_token_id == 90 and network.config.num_experts == 4


def test_steps_of_the_command_line_replace_those_of_a_preset(isthmus: ForkServer, model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "The number?"}, {"role": "assistant", "content": "It is 7."}]
    data = tmp_path / "chats.jsonl"
    data.write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    run = ["sft", "preset:qwen3-0.6b-sft", "--model", str(model), "--data", str(data), "--json"]
    run += ["data.seq_length=32", "train.global_batch_size=4", "checkpoint.save_final=false"]
    assert isthmus(*run, "--out", str(tmp_path / "steps"), "train.steps=6").result["steps"] == 6
    by_epochs = isthmus(*run, "--out", str(tmp_path / "epochs"), "train.epochs=1").result
    assert 0 < by_epochs["steps"] <= 10  # 40 chats, 4 sequences per step
    rows = [json.loads(row) for row in (tmp_path / "steps" / "metrics.jsonl").read_text().splitlines()]
    assert next(row["lr"] for row in rows if "lr" in row) > 1e-5  # 3% of 6 steps are none for the warm-up


def test_gpt2_with_its_dropout_on_documents_as_in_megatron_lm(isthmus: ForkServer, model: Path, tmp_path: Path) -> None:
    """With Megatron-LM's defaults a sequence is full of loss tokens, whatever documents it has."""
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"The number is {number}."}) + "\n" for number in range(200)))
    keys = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 300}
    config = [f"model.config.{name}={value}" for name, value in keys.items()]
    run = ["pretrain", "--data", str(documents), "--out", str(tmp_path / "out"), "--json", "model.init=random", *config]
    run += [f"tokenizer.path={model}", "data.seq_length=32", "train.global_batch_size=4", "train.steps=3"]
    crossing = [*run, "data.reset_attention_mask=false", "data.reset_position_ids=false", "checkpoint.every=2"]
    done = isthmus(*crossing, "data.eod_mask_loss=false")
    assert done.result["steps"] == 3 and "dropout: attention 0.1, hidden 0.1, embedding 0.1" in done.stderr
    assert [row["loss_tokens"] for row in rows(tmp_path / "out") if "loss" in row] == [4 * 32] * 3
    exported = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    assert {exported.get(name, 0.1) for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")} == {0.1}
    assert "another setting: data.eod_mask_loss false -> true" in isthmus(*crossing, "train.steps=4").error(2)
    masked = [*crossing, "--out", str(tmp_path / "masked"), "train.hidden_dropout=0", "train.attention_dropout=0.3"]
    assert "dropout: attention 0.3\n" in isthmus(*masked).stderr
    assert all(row["loss_tokens"] < 4 * 32 for row in rows(tmp_path / "masked") if "loss" in row)
    exported = json.loads((tmp_path / "masked" / "hf" / "config.json").read_text())
    assert [exported[name] for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")] == [0.3, 0.0, 0.0]
