"""Fine-tuning on real chats with the Llama 2 tokenizer, a sentencepiece file without tokenizer config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from faults.command import rows
from faults.fork_server import ForkServer


@pytest.fixture(scope="module")
def llama(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two small layers and the Llama 2 vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copyfile(shared_data / "llama2-tokenizer" / "tokenizer.model", folder / "tokenizer.model")
    return folder


@pytest.mark.thorough_cases("alpaca_en_demo.json")
@pytest.mark.parametrize("name", ["alpaca_en_demo.json", "glaive_toolcall_en_demo.json"])
def test_fine_tuning(isthmus: ForkServer, llama: Path, shared_data: Path, tmp_path: Path, name: str) -> None:
    import sentencepiece
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from isthmus.hf.tokenizer.tokenizer import load_tokenizer

    args = ["sft", "--model", llama, "--data", shared_data / name, "--out", tmp_path / "out", "--json"]
    settings = ["data.seq_length=512", "train.global_batch_size=2", "train.steps=3", "optim.lr=1e-2"]
    completed = isthmus(*args, *settings, "data.valid_fraction=0.01")
    assert completed.result["valid_loss"] < completed.result["valid_loss_before"] and "default one" in completed.stderr
    loss_token_ratios = [row["loss_tokens"] / row["num_tokens"] for row in rows(tmp_path / "out") if "loss" in row]
    assert all(0.02 < ratio < 0.98 for ratio in loss_token_ratios)

    exported = tmp_path / "out" / "hf"
    source, ours = load_tokenizer(llama), load_tokenizer(exported)
    theirs = AutoTokenizer.from_pretrained(exported)
    spm = sentencepiece.SentencePieceProcessor(model_file=str(llama / "tokenizer.model"))
    texts = [json.dumps(record, ensure_ascii=False) for record in json.loads((shared_data / name).read_text())[:50]]
    for text in [*texts, "def f():\n    return  1", "äöü 漢字 🙂", "  two spaces before"]:
        ids = spm.encode(text)
        assert source.encode(text) == ours.encode(text) == ids
        assert theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.chat_template == ours.chat_template == source.chat_template
    assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 32000
