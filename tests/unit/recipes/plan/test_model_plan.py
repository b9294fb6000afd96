"""Settings that the model or the hardware does not support in training are refused before any rank starts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.config.schema.lora import LoraConfig
from isthmus.config.schema.moe import MoeConfig
from isthmus.config.schema.optim import OptimConfig
from isthmus.engine.linear.fp8_blocks import Blocks
from isthmus.errors import UsageError
from isthmus.families.architecture import Dropout
from isthmus.platforms.cuda import CudaPlatform
from isthmus.platforms.detect import detect
from isthmus.recipes.model.rank_model import fp8_recipe
from isthmus.recipes.plan.model_plan import (
    ModelPlan,
    check_precision,
    check_profiled_steps,
    check_schedule,
    check_training,
    dropout_messages,
    open_run_model,
    plan_model,
)
from ranks.tiny import build_model_folder


def config_of(model: Path, seq_length: int, **train: Any) -> RunConfig:
    data = {"files": ["unused"], "seq_length": seq_length}
    sections = {"model": {"path": str(model)}, "data": data, "train": train}
    return RunConfig.model_validate({"recipe": "sft", "out": "unused", **sections})


def planned(config: RunConfig) -> ModelPlan:
    return plan_model(open_run_model(config), config)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gpt2", {}, r"data.seq_length=129 is more than the 128 learned positions .* \(gpt2\)\. Use 128 or less\."),
        (
            "mixtral",
            {"router_jitter_noise": 0.1},
            "router_jitter_noise=0.1 is not supported for mixtral: training runs",
        ),
        ("phimoe", {"input_jitter_noise": 0.1}, r"input_jitter_noise=0.1 is not supported for phimoe: training runs"),
        ("deepseek_v32", {"attention_dropout": 0.1}, r"129 is more than index_topk=8 .* has no dropout\. Set"),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full"], "index_topk": 128, "num_hidden_layers": 1},
            None,
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full", "shared"], "index_topk": 128, "num_hidden_layers": 2},
            r"129 is more than index_topk=128 .* layers that share .* Use 128 or less\.",
        ),
    ],
)
def test_settings_unsupported_in_training(
    family: str, settings: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    config = config_of(build_model_folder(tmp_path / "model", family, **{"num_hidden_layers": 1, **settings}), 129)
    plan = planned(config)  # enough for evaluation
    with nullcontext() if message is None else pytest.raises(UsageError, match=message):
        check_training(config, plan)


def test_dropout_rates_are_those_of_the_settings_or_of_the_model(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "gpt2", "gpt2", num_hidden_layers=1, attn_pdrop=0.3, embd_pdrop=0.2)
    plan = planned(config_of(model, 9))
    assert plan.dropout == Dropout(attention=0.3, hidden=0.0, embedding=0.2)
    assert dropout_messages(plan) == ["dropout: attention 0.3, embedding 0.2"]
    plan = plan_model(
        open_run_model(config_of(model, 9, attention_dropout=0.0, hidden_dropout=0.1)),
        config_of(model, 9, attention_dropout=0.0, hidden_dropout=0.1),
    )
    assert plan.dropout == Dropout(attention=0.0, hidden=0.1, embedding=0.1)
    assert (
        plan_model(
            open_run_model(config_of(model, 9, attention_dropout=0.0, hidden_dropout=0.0)),
            config_of(model, 9, attention_dropout=0.0, hidden_dropout=0.0),
        ).dropout
        == Dropout()
    )
    llama = build_model_folder(tmp_path / "llama", "llama", num_hidden_layers=1)
    assert dropout_messages(planned(config_of(llama, 9))) == []
    (line,) = dropout_messages(
        plan_model(
            open_run_model(config_of(llama, 9, attention_dropout=0.1, hidden_dropout=0.1)),
            config_of(llama, 9, attention_dropout=0.1, hidden_dropout=0.1),
        )
    )
    assert line.endswith("embedding 0.1 (config.json of llama has no key for: hidden, embedding)")


def test_warmup_and_decay_fit_into_the_steps_of_the_epochs() -> None:
    """For train.steps the schema checks it."""
    optim = OptimConfig(schedule="wsd", warmup_steps=2, decay_steps=2)
    config = config_of(Path("unused"), 9, epochs=0.5).model_copy(update={"optim": optim})
    check_schedule(config, 4)
    with pytest.raises(UsageError, match=r"decay_steps=2 do not fit in the 3 steps that train\.epochs=0\.5"):
        check_schedule(config, 3)


def test_rotary_positions_are_unlimited(tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1), 129)
    check_training(config, planned(config))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"recompute": "full", "recompute_layers": 3},
            r"recompute_layers=3 is more than the 2 layers .* Use 2 or less",
        ),
        (
            {"recompute": "selective", "recompute_modules": ["moe"]},
            "names moe, and this model has no mixtures of experts",
        ),
        (
            {"recompute": "selective", "recompute_modules": ["moe_act"]},
            "names moe_act, and this model has no mixtures of experts",
        ),
        (
            {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm"], "family": "olmo2"},
            "names layernorm, and this model has no norms before its blocks",
        ),
        (
            {"recompute": "selective", "recompute_modules": ["rope"], "family": "gpt2"},
            "names rope, and this model has no rotary embeddings of whole heads",
        ),
    ],
)
def test_recompute_names_existing_layers(train: dict[str, Any], message: str, tmp_path: Path) -> None:
    family = train.pop("family", "llama")
    config = config_of(build_model_folder(tmp_path / "model", family, num_hidden_layers=2), 24, **train)
    with pytest.raises(UsageError, match=message):
        check_training(config, planned(config))


@pytest.mark.parametrize(
    ("optim", "freeze", "message"),
    [
        ({"optimizer": "muon"}, ["model.layers.*"], "optim.optimizer=muon updates the weight matrices .* frozen"),
        ({"lr_multipliers": {"lm_head.*": 0.1}}, ["lm_head.*"], r"optim.lr_multipliers: lm_head.\* matches no trained"),
        ({"lr_multipliers": {"*.up_proj.*": 0.1}}, [], r"gate_proj.weight, .*up_proj.weight differently"),
    ],
)
def test_optimizer_settings_apply_to_trained_tensors(
    optim: dict[str, Any], freeze: list[str], message: str, tmp_path: Path
) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1), 24, freeze=freeze)
    config = config.model_copy(update={"optim": OptimConfig.model_validate(optim)})
    with pytest.raises(UsageError, match=message):
        check_training(config, planned(config))


@pytest.mark.parametrize(
    ("lora", "freeze", "message"),
    [
        ({"rank": 2, "targets": ["o_proj"]}, [], "expert_bias_update_rate=0.001 with lora"),
        (
            {},
            ["model.layers.1.*"],
            r"train.freeze: model.layers.1.\* matches model.layers.1.mlp.gate.e_score_correction",
        ),
        ({}, ["model.layers.0.*"], ""),  # has no experts
    ],
)
def test_expert_bias_is_not_updated_if_it_is_frozen(
    lora: dict[str, Any], freeze: list[str], message: str, tmp_path: Path
) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2), 24, freeze=freeze)
    sections = {"lora": LoraConfig.model_validate(lora), "moe": MoeConfig(expert_bias_update_rate=0.001)}
    config = config.model_copy(update=sections)
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        check_training(config, planned(config))


def test_recomputing_rotary_embeddings_of_shared_heads_is_refused(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "qwen3", num_hidden_layers=2)
    config = config_of(model, 24, recompute="selective", recompute_modules=["rope"])
    plan = planned(config)
    check_training(config, plan)
    tp = 2 * plan.architecture.attention.num_query_groups
    plan = replace(plan, parallel=plan.parallel.model_copy(update={"tp": tp}), world_size=tp)
    with pytest.raises(
        UsageError, match=r"names rope, which saves no memory with QK norm and tp=\d+ above the \d+ key"
    ):
        check_training(config, plan)


def test_profiled_steps_exist() -> None:
    config = config_of(Path("unused"), 9, profile="3-5")
    check_profiled_steps(config, 5)
    with pytest.raises(UsageError, match=r"train.profile=3-5 goes beyond the 4 steps"):
        check_profiled_steps(config, 4)


def test_dpo_refuses_mtp_layers(tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1), 24)
    plan = planned(config)
    plan = replace(plan, architecture=plan.architecture.with_settings({"mtp_layers": 1}))
    check_training(config, plan)
    with pytest.raises(UsageError, match=r"1 MTP layers \(multi-token prediction, llama\), and dpo has no loss"):
        check_training(config.model_copy(update={"recipe": "dpo"}), plan)


def test_unsupported_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_precision(detect("cpu"), "fp16")
    with pytest.raises(UsageError, match=r"precision=fp8 cannot be used here: CPUs have no fp8 .* Leave it out or use"):
        check_precision(detect("cpu"), "fp8")
    check_precision(detect("cpu"), "fp8", emulate_fp8=True)
    check_precision(detect("cpu"), "fp8", emulate_fp8=True, fp8_scaling="blockwise")
    monkeypatch.setattr(CudaPlatform, "properties", lambda self: SimpleNamespace(major=8, minor=9))
    check_precision(CudaPlatform(reason=""), "fp8")
    check_precision(CudaPlatform(reason=""), "bf16", fp8_scaling="blockwise")
    with pytest.raises(UsageError, match=r"fp8_scaling=blockwise cannot be used here: .*\. Use tensorwise or rowwise"):
        check_precision(CudaPlatform(reason=""), "fp8", fp8_scaling="blockwise")


def test_fsdp_has_no_loss_scale(tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1), 24, precision="fp16")
    plan = planned(config)
    check_training(config, plan)
    with pytest.raises(UsageError, match=r"fsdp with train\.precision=fp16.* Set train\.precision"):
        check_training(config, replace(plan, parallel=ParallelConfig(fsdp=True)))


def test_fp8_recipe_follows_the_config(tmp_path: Path) -> None:
    model = tmp_path / "unused"
    platform = detect("cpu")
    hybrid = fp8_recipe(config_of(model, 24, precision="fp8"), platform)
    assert (hybrid.scaling, hybrid.forward, hybrid.backward) == ("tensorwise", torch.float8_e4m3fn, torch.float8_e5m2)
    plain = fp8_recipe(config_of(model, 24, precision="fp8", fp8_scaling="rowwise", fp8_format="e4m3"), platform)
    assert (plain.scaling, plain.forward, plain.backward) == ("rowwise", torch.float8_e4m3fn, torch.float8_e4m3fn)
    blockwise, mx = (
        fp8_recipe(config_of(model, 24, precision="fp8", fp8_scaling=name), platform) for name in ("blockwise", "mxfp8")
    )
    assert (blockwise.scaling, blockwise.weight_scaling) == (Blocks(1, 128), Blocks(128, 128))
    assert mx.scaling == mx.weight_scaling == Blocks(1, 32, is_mx=True)
    nvidia = fp8_recipe(config_of(model, 24, precision="fp8", fp8_scaling="mxfp8"), CudaPlatform(reason=""))
    assert nvidia.scaling == Blocks(1, 32, is_mx=True, swizzled=True)


@pytest.mark.slow_cases("qwen2_moe-lora1-message1")
@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        (
            "qwen3_moe",
            {"dora": True},
            r"lora\.dora with adapters of routed experts \(model\.layers\.0\.mlp\.experts\.gate_up_proj\) is not ",
        ),
        (
            "qwen2_moe",
            {"dora": True, "targets": "q_proj,shared_expert.up_proj"},
            r"lora\.dora=true is not possible in PEFT for model\.layers\.0\.mlp\.shared_expert\.up_proj, whose weight",
        ),
        (
            "isthmus",
            {"targets": [r"model.layers.0.*experts\.(0|1)\..*"]},
            r"experts\.0\.up_proj: 2 of 6 routed experts of the layer have adapters\. Give adapters of one rank",
        ),
    ],
)
def test_refused_adapters_of_models_with_experts(
    family: str, lora: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = config_of(build_model_folder(tmp_path / "model", family, num_hidden_layers=1, mlp_only_layers=[]), 9)
    config = config.model_copy(update={"lora": LoraConfig.model_validate({"rank": 4, **lora})})
    with pytest.raises(UsageError, match=message):
        planned(config)
