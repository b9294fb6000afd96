"""The model card of an export: accepted by the library of the Hub, and without paths of this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from isthmus.config.load import load_config
from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.store.sample_store import SampleStore
from isthmus.hf.tiny_model import build_tiny_qwen3
from isthmus.recipes.model_card import model_card

ROWS = [
    {"step": 0, "valid_loss": 4.5, "valid_mean_token_accuracy": 0.125},
    {"step": 1, "loss": 4.25, "lr": 0.1},
    {"step": 2, "loss": 3.5, "lr": 0.1},
    {"step": 2, "valid_loss": 3.25, "valid_mean_token_accuracy": 0.5},
    {"step": 2, "test_loss": None, "test_perplexity": None},
    {"step": 3, "loss": 9.75, "lr": 0.1},
]


def card_of(
    tmp_path: Path,
    model: str,
    *overrides: str,
    adapter: bool = False,
    data: str = "hf:org/chats/en:train",
    recipe: str = "sft",
    model_config: dict[str, Any] | None = None,
) -> ModelCard:
    source = tmp_path / "base"
    source.mkdir(exist_ok=True)
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlanguage: [de]\n---\n# Base\n")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    samples = SampleStore.from_samples([(np.arange(6), np.ones(6))] * 8)
    batches = Batches(samples, BatchSettings(seq_length=5, micro_batch_size=1, global_batch_size=4, packing=False))
    flags = {"model": model, "data": [data], "out": str(tmp_path / "my-run")}
    config = load_config(recipe, None, ["optim.lr=3e-4", *overrides], flags)
    plan: Any = SimpleNamespace(
        source=SimpleNamespace(path=source, config=model_config or {}),
        architecture=SimpleNamespace(moe=None),
        family=SimpleNamespace(auto_map={}),
    )
    text = model_card(config, plan, batches, metrics, 2, adapter=adapter)
    assert str(tmp_path) not in text
    return ModelCard(text)


def test_card_of_a_model_of_the_hub(tmp_path: Path) -> None:
    card = card_of(tmp_path, "org/model")
    assert card.data.to_dict() == {
        "base_model": "org/model", "base_model_relation": "finetune", "datasets": ["org/chats"], "language": ["de"],
        "library_name": "transformers", "license": "other", "license_name": "own", "pipeline_tag": "text-generation",
        "tags": ["isthmus", "megatron-core", "sft"],
    }  # fmt: skip
    for line in (
        "# my-run",
        "| validation | 0 | 4.5 | mean_token_accuracy 0.125 |",
        "| validation | 2 | 3.25 | mean_token_accuracy 0.5 |",
        "| test | 2 | not finite | perplexity not finite |",
        "| training | 2 | 3.5 |  |",
        "| data | 8 samples | 1 |",
        "2 steps of 4 sequences: 8 sequences, about 40 tokens.",
        "  lr: 0.0003",
        "- hf:org/chats/en:train",
    ):
        assert line in card.text or f"  {line}" in card.text, line
    assert "- torch " in card.text and "9.75" not in card.text and "checkpoint" not in card.text


def test_card_of_an_adapter_on_a_local_model(tmp_path: Path) -> None:
    local, data = tmp_path / "base", tmp_path / "data" / "private.json"
    card = card_of(tmp_path, str(local), "lora.rank=4", adapter=True, data=str(data))
    result = card.data.to_dict()
    assert (result["library_name"], result["tags"][-1], result["license"]) == ("peft", "lora", "other")
    assert "base_model" not in result and "datasets" not in result
    assert "This adapter was fine-tuned on chats" in card.text and "Base model: base." in card.text
    assert "private.json" in card.text and "rank: 4" in card.text


def test_names_of_files_and_whole_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose path looks like an id on the Hub, and a system prompt with slashes."""
    (tmp_path / "models" / "own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine.jsonl").touch()
    texts = ["chat.system=Answer yes/no.", "chat.template='{{ messages }}</s>'"]
    text = card_of(tmp_path, "models/own", *texts, data="models/mine.jsonl").text
    assert "Base model: own." in text and "path: own" in text and "- mine.jsonl" in text
    assert "system: Answer yes/no." in text and "{{ messages }}</s>" in text


def test_a_distilled_model_names_its_teacher(tmp_path: Path) -> None:
    card = card_of(tmp_path, "org/model", "distill.teacher=org/teacher", recipe="distill")
    link = "[org/teacher](https://huggingface.co/org/teacher)"
    assert f"It was distilled from the teacher {link}." in card.text and "distill" in card.data["tags"]
    (tmp_path / "large").mkdir()
    local = card_of(tmp_path, "org/model", f"distill.teacher={tmp_path / 'large'}", recipe="distill")
    assert "It was distilled from the teacher large." in local.text


@pytest.mark.slow
def test_the_code_of_a_card_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = json.dumps({"a": "Hello! How can I help? Once upon a time"})
    model = build_tiny_qwen3(
        tmp_path / "my-run" / "hf", [chat] * 8, vocab_size=300, hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    for recipe in ("sft", "pretrain"):
        text = card_of(tmp_path, "org/model", recipe=recipe).text
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        exec(code.replace('"my-run/hf"', repr(str(model))).replace("=200", "=4"), {})
        assert capsys.readouterr().out and "```bash\nvllm serve my-run/hf\n```" in text
    card = card_of(tmp_path, "org/model", "checkpoint.push=me/mine", model_config={"auto_map": {}})
    assert 'from_pretrained("me/mine", dtype="auto", trust_remote_code=True)' in card.text
    assert "vllm serve me/mine --trust-remote-code" in card.text


def test_the_code_for_an_adapter(tmp_path: Path) -> None:
    card = card_of(tmp_path, "org/model", "lora.rank=4", adapter=True)
    assert 'AutoPeftModelForCausalLM.from_pretrained("my-run/adapter", dtype="auto")' in card.text
    expected = "vllm serve org/model --enable-lora --max-lora-rank 8 --lora-modules tuned=my-run/adapter"
    assert expected in card.text
    pushed = card_of(tmp_path, "org/model", "lora.rank=4", "checkpoint.push=me/mine", adapter=True)
    assert 'from_pretrained("me/mine", dtype="auto", subfolder="adapter")' in pushed.text
    assert "vllm" not in pushed.text


def test_random_weights_have_no_licence(tmp_path: Path) -> None:
    card = card_of(tmp_path, "org/model", "model.init=random")
    assert "license" not in card.data.to_dict() and "base_model" not in card.data.to_dict()
    assert "Base model: random weights." in card.text


@pytest.mark.parametrize("text", ["", "---\nlicense: [\n---\n", "# no header"])
def test_a_base_card_without_metadata(tmp_path: Path, text: str) -> None:
    from isthmus.hf.card_header import inherited_metadata

    (tmp_path / "README.md").write_text(text)
    assert inherited_metadata(tmp_path) == {} == inherited_metadata(tmp_path / "nowhere")
