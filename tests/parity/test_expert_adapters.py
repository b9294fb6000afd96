"""Adapters of routed experts: PEFT computes with a written file what the merged model computes, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.convert.transfer import convert
from isthmus.families.adapted_linears import HfLinear, all_linears
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import all_families, family_for
from isthmus.hf.peft_folder import AdapterConfig, LoraFactors, write_adapter
from optional_packages import peft
from ranks.tiny import VOCAB, build_model_folder, load_network, tiny_config
from sweep import BLOCK_FAMILIES, thorough_but

pytestmark = peft.required
TOKENS = torch.arange(3, 27)[None] % VOCAB
RANK = 3


def tiny(name: str) -> tuple[Family, Architecture]:
    config = tiny_config(name).to_dict()
    family = family_for(config)
    return family, family.to_architecture(config)


def adapted_experts(name: str) -> list[HfLinear]:
    linears = [linear for group in all_linears(*tiny(name)).values() for linear in group]
    return [linear for linear in linears if ".experts" in linear.module]


WITH_EXPERTS = [name for name in all_families() if tiny(name)[1].moe is not None]
IN_MAKE_TEST = (
    *BLOCK_FAMILIES, "cohere2_moe", "deepseek_v2", "ernie4_5_moe", "gemma4_text", "isthmus", "jamba", "lfm2_moe",
    "llama4", "phimoe",
)  # fmt: skip
"""Together they have every kind of setting of experts and of tensor rule (test_sweeps.py)."""
REFUSED = {"step3p5": "its class has experts that PEFT cannot adapt"}
ADAPTED = [name for name in WITH_EXPERTS if name not in REFUSED]


def test_families_without_adapters_of_experts() -> None:
    assert {name for name in WITH_EXPERTS if not adapted_experts(name)} == REFUSED.keys()


@pytest.mark.parametrize("name", thorough_but(ADAPTED, IN_MAKE_TEST))
def test_peft_computes_what_the_merged_model_computes(name: str, tmp_path: Path) -> None:
    linears = [linear for group in all_linears(*tiny(name)).values() for linear in group]
    experts = adapted_experts(name)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    factors = {
        expert: LoraFactors(random(RANK, expert.inputs), random(expert.out, RANK), 7 / RANK) for expert in experts
    }
    base, adapter = build_model_folder(tmp_path / "base", name), tmp_path / "adapter"
    adapter.mkdir()
    write_adapter(adapter, AdapterConfig(r=RANK, lora_alpha=7), factors, linears)
    convert(base, tmp_path / "merged", "hf", adapter=adapter)
    with torch.no_grad():
        plain, merged = (load_network(folder).eval() for folder in (base, tmp_path / "merged"))
        before, expected = (model(TOKENS, use_cache=False).logits for model in (plain, merged))
        result = peft.PeftModel.from_pretrained(plain, adapter).eval()(TOKENS, use_cache=False).logits
    assert (expected - before).abs().max() > 0.1
    assert (result - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
