"""The modelling files that travel with an export: transformers' logits for transformers' own models, and alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.convert.transfer import convert
from isthmus.hf.shim.configuration_isthmus import IsthmusConfig
from isthmus.hf.shim.modeling_isthmus import IsthmusForCausalLM
from parity.test_logits import CASES
from ranks.tiny import VOCAB, build_model_folder

LONG, SHORT = 97, 20
"""Longer than any window and any original context of the cases, and shorter than the original contexts."""
KNOWN = [
    "llama-rope-llama3-by-8",
    "llama-rope-linear",
    "llama-biases",
    "llama-tied",
    "mistral-window-of-5",
    "qwen2-window-in-some-layers",
    "mixtral",
    "qwen3_moe-dense-layer",
    "olmoe",
    "ernie4_5_moe",
    "qwen2_moe-shared",
    "smollm3-listed",
    "phi3-longrope-half-a-head",
    "starcoder2",
    "gpt_neox",
    "gpt_neox-in-turn",
    "gpt2",
    "olmo2",
    "glm4",
    "cohere",
    "gemma2",
    "gemma2-scores",
    "gemma2-logits",
    "gemma3_text-bases",
]
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 6.0},
    ),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers knows no such class, as in a place without Isthmus."""
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "isthmus")
    monkeypatch.delitem(AutoModelForCausalLM._model_mapping._extra_content, IsthmusConfig)
    return


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def load(folder: Path, **how: Any) -> Any:
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    assert not any(told.values())
    return model.eval()


def of(folder: Path, **settings: Any) -> Any:
    """A model of its own with settings changed, in this process."""
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text()) | settings
    return IsthmusForCausalLM(IsthmusConfig(**config)).eval()


@pytest.fixture
def gpt2_with_experts(tmp_path: Path) -> Path:
    source = build_model_folder(tmp_path / "source", "isthmus")
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "export")
    return tmp_path / "export"


@pytest.mark.parametrize("case", [*KNOWN, *OWN])
@torch.no_grad()
def test_logits_of_models_that_transformers_knows(case: str, tmp_path: Path) -> None:
    """That each case is about something that shows, its own test says: without it, logits are visibly others."""
    family, settings = OWN[case] if case in OWN else CASES[case][:2]
    source = build_model_folder(tmp_path / "source", family, **settings)
    convert(source, tmp_path / "export", "hf", hf_family="isthmus")
    theirs = load(source, attn_implementation="eager")
    ours = load(tmp_path / "export", trust_remote_code=True)
    assert type(ours).__module__.startswith("transformers_modules.")
    for length in (LONG, SHORT):
        ids = tokens(1, length)
        wanted, found = theirs(ids).logits, ours(ids).logits
        assert (wanted - found).abs().max() < 2e-5
