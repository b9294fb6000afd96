"""Adapters of PEFT in runs: in every layout the model with the adapter is the merged model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from isthmus.config.schema import RunConfig
from isthmus.convert.transfer import convert
from isthmus.engine.lora.adapter import Adapter
from isthmus.errors import UsageError
from isthmus.families.adapted_linears import adapted_linears
from isthmus.families.registry import family_for
from isthmus.hf.model_folder import ModelFolder
from isthmus.recipes.model.pissa import principal_part
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from optional_packages import peft
from ranks.rank_pool import RankPool
from ranks.tiny import build_adapter, build_model_folder

pytestmark = peft.required
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-dora": (
        "qwen3",
        {
            "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
            "use_dora": True,
            "rank_pattern": {"v_proj": 5},
            "alpha_pattern": {"layers.1.mlp.down_proj": 2},
            "modules_to_save": ["lm_head", "norm"],
        },
    ),
    "phi3-rslora": ("phi3", {"target_modules": "all-linear", "use_rslora": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "target_parameters": [
                *("model.layers.0.mlp.down_proj.weight", "shared_experts.up_proj.weight"),
                *("experts.gate_up_proj", "experts.down_proj"),
            ],
        },
    ),
}


@pytest.mark.thorough_cases("deepseek_v3", "qwen3-dora")
@pytest.mark.parametrize("name", ADAPTERS)
def test_existing_adapter_is_that_of_peft(
    name: str, one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    family, settings = ADAPTERS[name]
    base = build_model_folder(tmp_path / "base", family, tie_word_embeddings=False, num_hidden_layers=2)
    adapter = build_adapter(base, tmp_path / "adapter", **settings)
    convert(base, tmp_path / "merged", "hf", adapter=adapter)
    run: dict[str, Any] = {"samples": samples, "steps": 0, "evaluate": True}
    plain, merged = (
        one_rank.run("ranks.tasks.train", model=tmp_path / model, **run)["valid_before"] for model in ("base", "merged")
    )
    assert abs(merged - plain) > 1e-3
    lora = {"path": str(adapter)}
    layout: dict[str, int]
    for layout in {"qwen3": [{"tp": 2}, {"pp": 2}], "phi3": [{"tp": 2}], "deepseek_v3": [{}, {"tp": 2}, {"ep": 2}]}[
        family
    ]:
        world = two_ranks if layout else one_rank
        loss = world.run("ranks.tasks.train", model=base, lora=lora, **run, **layout)["valid_before"]
        assert loss == pytest.approx(merged, rel=1e-6)


@pytest.mark.thorough_cases("{'tp': 2, 'etp': 1}", "{'tp': 2}")
@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2}, {"tp": 2, "etp": 1}], ids=str)
def test_exported_adapter_of_experts(
    layout: dict[str, int], two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    base = build_model_folder(tmp_path / "base", "deepseek_v3", num_hidden_layers=2)
    targets = ["o_proj", "experts.gate_up_proj", "experts.down_proj", "shared_experts.down_proj"]
    lora = {"rank": 3, "alpha": 24, "targets": targets}
    two_ranks.run("ranks.tasks.train", model=base, samples=samples, steps=4, lora=lora, exports=tmp_path, **layout)
    with torch.no_grad():
        plain, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("base", "hf"))
        tokens = torch.arange(24)[None]
        before, after = plain(tokens).logits, merged(tokens).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")(tokens).logits
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(adapted, after, atol=1e-5, rtol=0)
    convert(base, tmp_path / "again", "hf", adapter=tmp_path / "adapter")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "hf"))
    assert all(torch.allclose(ours[name], tensor, atol=1e-6, rtol=0) for name, tensor in theirs.items())


def test_checkpoint_of_adapters_is_not_converted(one_rank: RankPool, samples: Path, tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", "llama", num_hidden_layers=1)
    lora = {"rank": 2, "targets": "q_proj"}
    one_rank.run(
        "ranks.tasks.train", model=base, samples=samples, steps=1, save_at=[1], root=tmp_path / "saved", lora=lora
    )
    with pytest.raises(
        UsageError, match=r"saved has the adapters of a run with lora .* isthmus merge BASE RUN/adapter"
    ):
        convert(tmp_path / "saved", tmp_path / "out")


def test_pissa_starts_as_in_peft(one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    """The model computes what it did; adapters and remaining weights are those of PEFT, also with split weights."""
    base = build_model_folder(tmp_path / "base", "qwen3", tie_word_embeddings=False, num_hidden_layers=2)
    lora = {"rank": 3, "alpha": 5, "init": "pissa", "targets": ["q_proj", "o_proj", "up_proj"]}
    run: dict[str, Any] = {"model": base, "samples": samples, "micro_batch_size": 2}
    plain = one_rank.run("ranks.tasks.train", steps=0, evaluate=True, **run)["valid_before"]
    alone = one_rank.run("ranks.tasks.train", steps=3, evaluate=True, lora=lora, **run)
    assert alone["valid_before"] == pytest.approx(plain, rel=1e-6)
    results = two_ranks.run("ranks.tasks.train", steps=3, lora=lora, tp=2, **run)
    assert results["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    fast = one_rank.run("ranks.tasks.train", steps=0, evaluate=True, lora=lora | {"init": "pissa_niter_4"}, **run)
    assert fast["valid_before"] == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_principal_parts_are_those_of_peft(family: str, tmp_path: Path) -> None:
    base = build_model_folder(tmp_path / "base", family, num_hidden_layers=1)
    target = "c_attn" if family == "gpt2" else "k_proj"
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=[target], init_lora_weights="pissa", task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    source = ModelFolder.open(base)
    kind = family_for(source.config)
    (linear,) = (
        item
        for group in adapted_linears(kind, kind.to_architecture(source.config), [target]).values()
        for item in group
    )
    a, b = principal_part(Adapter(linear, 3, 7 / 3), source, None, torch.device("cpu"))
    weights = {name: parameter for name, parameter in theirs.named_parameters() if linear.module in name}
    remaining = source.read(linear.tensors[0])
    remaining = remaining - 7 / 3 * ((b @ a).mT if linear.transposed else b @ a)
    for name, value in (("lora_A.default", a), ("lora_B.default", b), ("base_layer", remaining)):
        (expected,) = (entry for each_name, entry in weights.items() if f".{name}.weight" in each_name)
        torch.testing.assert_close(value, expected.data, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        (
            "qwen2_moe",
            {"init": "kaiming", "targets": "shared_expert_gate"},
            "shared_expert_gate cannot have an adapter in",
        ),
        ("llama", {"dora": True}, "lora.init=pissa with lora.dora=true"),
        ("mixtral", {"targets": ["experts.down_proj"]}, "is not for routed experts (model.layers.0.mlp.experts.down"),
        ("llama", {"rank": 33, "targets": ["k_proj"]}, "k_proj has 32 singular values, fewer than lora.rank=33"),
    ],
)
def test_refused_adapters(family: str, lora: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "recipe": "pretrain",
            "out": "unused",
            "model": {"path": str(build_model_folder(tmp_path / "base", family, num_hidden_layers=1))},
            "data": {"files": ["unused"]},
            "train": {"steps": 1},
            "lora": {"rank": 2, "init": "pissa"} | lora,
        }
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        plan_model(open_run_model(config), config, world_size=1)
