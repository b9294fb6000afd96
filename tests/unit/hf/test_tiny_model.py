"""The model made on the spot is a Hugging Face model like any other."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.errors import OutputExists, UsageError
from isthmus.hf.tiny_model import build_tiny_qwen3, generate, logits, train_tokenizer

TEXTS = ["the sea is wide and blue", "a strait joins two seas"] * 4
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model", TEXTS, vocab_size=300, **SMALL)


@pytest.mark.slow
def test_model_loads_and_generates(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    chats = [[{"role": "user", "content": text}] for text in ("the sea", "a strait joins two seas")]
    answers = generate(folder, chats, max_new_tokens=4)
    assert answers == [generate(folder, [chat], max_new_tokens=4)[0] for chat in chats]
    ids = torch.tensor([[5, 6, 7]])
    assert logits(folder, ids).shape == (1, 3, len(tokenizer))
    assert torch.equal(logits(folder, ids), model.eval()(ids).logits)


def test_same_seed_same_bytes(folder, tmp_path):
    state = torch.get_rng_state()
    again = build_tiny_qwen3(tmp_path / "again", TEXTS, vocab_size=300, **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    other = build_tiny_qwen3(tmp_path / "other", TEXTS, vocab_size=300, seed=1, **SMALL)
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_refusals(folder):
    with pytest.raises(OutputExists, match="exists already"):
        build_tiny_qwen3(folder, TEXTS)
    with pytest.raises(UsageError, match="vocab_size=100"):
        train_tokenizer(TEXTS, vocab_size=100)
