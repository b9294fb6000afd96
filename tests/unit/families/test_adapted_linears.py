"""The linear layers of every family are those of transformers, and targets select them as PEFT does."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from isthmus.errors import UsageError
from isthmus.families.adapted_linears import HfLinear, adapted_linears, all_linears
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import all_families, family_for
from isthmus.families.rules.shard import Layout, hf_slices, local_shape, tensor_slices, unsharded
from ranks.tiny import SIZES, model_class, tiny_config
from sweep import by_tier

_WITH_ATTENTION = ("falcon_h1", "nemotron_h")
WITHOUT_ADAPTERS = re.compile(r"\.router(\.gate|\.proj)?$|\.gate\.wg$|\.indexer\.|\.(mamba|mixer)\.(x|dt)_proj$")
"""Routers, indexers, which no gradient reaches, and the projections within Mamba-1, which are no parallel layers."""


def tiny(name: str) -> tuple[PretrainedConfig, Family, Architecture]:
    config = tiny_config(name)
    family = family_for(config.to_dict())
    return config, family, family.to_architecture(config.to_dict())


def selected(name: str, *targets: str) -> list[str]:
    _, family, arch = tiny(name)
    result = adapted_linears(family, arch, targets)
    return list(dict.fromkeys(linear.module for linears in result.values() for linear in linears))


@pytest.mark.parametrize("name", by_tier(all_families()))
def test_linears_are_those_of_transformers(name: str) -> None:
    config, family, arch = tiny(name)
    with torch.device("meta"):
        model = model_class(name).from_config(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        if family.nested is not None and not re.search("language_model|text_model", path):
            continue
        if WITHOUT_ADAPTERS.search(path):
            continue
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not model.get_output_embeddings():
            shape = tuple(module.weight.shape)
            shapes[path] = shape[::-1] if isinstance(module, Conv1D) else shape
        for parameter_name, parameter in module.named_parameters(prefix=path, recurse=False):
            if parameter.dim() == 3 and not isinstance(module, torch.nn.Conv1d):
                experts, *shape = parameter.shape
                assert experts == arch.moe.num_experts
                transposed = getattr(module, "is_transposed", family.swapped_experts)
                shapes[parameter_name.removesuffix(".weight")] = tuple(shape[::-1]) if transposed else tuple(shape)
    entries: dict[str, HfLinear] = {}
    for linears in all_linears(family, arch).values():
        entries |= {linear.module: linear for linear in linears}
    assert {path: (linear.out, linear.inputs) for path, linear in entries.items()} == shapes
    assert all(
        (linear.expert is None) == (family.has_code or ".experts." not in path) for path, linear in entries.items()
    )


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gpt2", "gpt_neox", "deepseek_v3", "gpt_oss", "mixtral", "isthmus"])
def test_slices_cover_every_element_of_a_linear(name: str) -> None:
    _, family, arch = tiny(name)
    placements = family.placements(arch)
    counts: dict[tuple[str, int | None], torch.Tensor] = {}
    for canonical, linears in all_linears(family, arch).items():
        placed = placements[canonical]
        by_part = {part: linear for linear in linears for part, _ in linear.parts}
        sharded = placed.rule.shard != "whole"
        for rank in range(2 if sharded else 1):
            size = 2 if sharded else 1
            layout = Layout(tp_rank=rank, tp_size=size, etp_rank=rank, etp_size=size, padded_vocab_size=80)
            local = torch.zeros(local_shape(placed.rule, arch, layout))
            for piece in tensor_slices(placed.rule, arch, layout, placed.expert):
                linear = by_part[piece.part]
                rows, columns = linear.rows_and_columns(piece)
                count = counts.setdefault((linear.module, linear.expert), torch.zeros(linear.out, linear.inputs))
                count[rows, columns] += 1
                shape = piece.view(local).squeeze(0).shape if piece.stacked else piece.view(local).shape
                assert count[rows, columns].shape == (shape[::-1] if piece.transposed else shape)
    assert counts and all(bool((count == 1).all()) for count in counts.values())


def test_gate_and_up_rows_follow_each_other_in_the_parameter_of_experts() -> None:
    _, family, arch = tiny("mixtral")
    canonical = "decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight"
    placed, (linear,) = family.placements(arch)[canonical], all_linears(family, arch)[canonical]
    width = SIZES["intermediate_size"]
    assert (linear.module, linear.expert) == ("model.layers.1.mlp.experts.gate_up_proj", 4)
    assert linear.tensors == tuple(f"model.layers.1.block_sparse_moe.experts.4.{name}.weight" for name in ("w1", "w3"))
    pieces = tensor_slices(placed.rule, arch, unsharded(arch), placed.expert)
    assert [linear.rows_and_columns(piece)[0] for piece in pieces] == [slice(0, width, 1), slice(width, 2 * width, 1)]
    (later,) = hf_slices(placed.rule, arch, (slice(width + 3, width + 5),), (slice(0, 2),), 4)
    assert linear.rows_and_columns(later)[0] == slice(width + 3, width + 5, 1)


def test_targets() -> None:
    queries = {f"model.layers.{n}.self_attn.q_proj" for n in range(4)}
    assert {*selected("qwen3", "layers.2.mlp.up_proj", "q_proj")} == queries | {"model.layers.2.mlp.up_proj"}
    assert selected("qwen3", "model.layers.[02].*.v_proj") == [f"model.layers.{n}.self_attn.v_proj" for n in (0, 2)]
    assert selected("qwen3", r".*\.[01]\..*(k|o)_proj") == [
        f"model.layers.{n}.self_attn.{which}_proj" for n in (0, 1) for which in "ko"
    ]
    assert len(selected("qwen3", "all-linear")) == 4 * 7
    assert selected("qwen3", "q_proj, up_proj") == selected("qwen3", "q_proj", "up_proj")
    assert selected("phi3", "qkv_proj") == [f"model.layers.{n}.self_attn.qkv_proj" for n in range(4)]


def test_experts_are_meant_only_by_their_name() -> None:
    dense = selected("deepseek_v3", "down_proj")
    assert dense == [
        "model.layers.0.mlp.down_proj",
        *(f"model.layers.{n}.mlp.shared_experts.down_proj" for n in (1, 2, 3)),
    ]
    assert selected("deepseek_v3", "experts.down_proj") == [
        f"model.layers.{n}.mlp.experts.down_proj" for n in (1, 2, 3)
    ]
    assert "model.layers.1.mlp.experts.gate_up_proj" in selected("deepseek_v3", "all-linear")


def test_all_linear_leaves_the_gate_of_shared_experts_out() -> None:
    gates = {f"model.layers.{n}.mlp.shared_expert_gate" for n in range(4)}
    assert {*selected("qwen2_moe", "shared_expert_gate")} == gates
    chosen = {*selected("qwen2_moe", "all-linear")}
    assert not chosen & gates and "model.layers.3.mlp.shared_expert.down_proj" in chosen


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "mamba", "mamba2", "falcon_mamba"])
def test_all_linear_leaves_out_what_peft_refuses(name: str) -> None:
    chosen = {module.rpartition(".")[2] for module in selected(name, "all-linear")}
    assert "out_proj" not in chosen and "in_proj" in chosen and ("o_proj" in chosen) == (name in _WITH_ATTENTION)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", [], "lora.targets is empty"),
        ("llama", ["q_proj", "qproj"], "'qproj' is no linear layer of llama. Use all-linear, one of q_proj, k_proj,"),
        ("qwen3_moe", ["down_proj"], "one of q_proj, k_proj, v_proj, o_proj, experts.gate_up_proj, experts.down_proj,"),
        ("llama", ["lm_head"], "Other modules are trained whole with lora.modules_to_save"),
        ("nemotron_h", ["*.o*_proj"], "'*.o*_proj' includes model.layers.0.mixer.out_proj, and PEFT refuses"),
        ("mamba", ["out_proj"], "'out_proj' includes backbone.layers.0.mixer.out_proj, and PEFT refuses"),
        ("jamba", ["dt_proj"], "'dt_proj' includes model.layers.0.mamba.dt_proj, and projections within Mamba-1 have"),
        ("jamba", ["*.mamba.*"], "'*.mamba.*' includes model.layers.0.mamba.x_proj, and projections within Mamba-1"),
        ("llama", ["(q_proj"], "'(q_proj' is not a regular expression: "),
    ],
)  # fmt: skip
def test_refusals(name: str, targets: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        selected(name, *targets)
    assert message in str(error.value) and error.value.exit_code == 2
