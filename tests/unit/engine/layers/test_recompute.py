"""Selective activation recomputation: the gradients are those without it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.config.schema.train import RecomputedModule, TrainConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder.single_process_model import single_process_groups
from isthmus.engine.layers.recompute import _Recomputed, recompute_if
from isthmus.families.architecture import from_settings
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.layer import Form


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with single_process_groups():
        yield


def gradients(form: Form, train: TrainConfig, moe: Experts | None = None) -> dict[str, Tensor]:
    from isthmus.engine.decoder.decoder import build_model
    from isthmus.engine.decoder.model_config import transformer_config

    architecture = from_settings({
        "family": "gpt2", "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2,
        "num_query_groups": 2, "kv_channels": 8, "vocab_size": 32, "max_position_embeddings": 16,
        "norm_epsilon": 1e-5, "normalization": "LayerNorm", "mlp_bias": True, "activation": "gelu", "gated": False,
        "form": form, "qk_norm": True, "moe": moe,
    })  # fmt: skip
    model = build_model(architecture, transformer_config(architecture, dtype=torch.float32, train=train))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    batch = replace(PackedBatch.for_inference([torch.arange(7), torch.arange(1)]), sample_weights=(1.0, 1.0))
    model.train()(batch).square().mean().backward()
    assert all(parameter.is_leaf for parameter in model.parameters())
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("form", ["pre", "post", "parallel", "parallel_two_norms", "sandwich"])
@pytest.mark.parametrize(
    "modules", [("mlp",), ("layernorm", "mlp_act", "rope"), ("core_attn", "mlp", "layernorm", "rope")]
)
def test_recomputed_modules_have_the_same_gradients(form: Form, modules: tuple[RecomputedModule, ...]) -> None:
    expected = gradients(form, TrainConfig())
    recomputed = gradients(form, TrainConfig(recompute="selective", recompute_modules=modules))
    assert recomputed.keys() == expected.keys() and "decoder.layers.0.mlp.linear_fc2.bias" in expected
    for name, gradient in expected.items():
        assert torch.equal(recomputed[name], gradient), name


def test_results_are_computed_once_for_all_uses_and_freed() -> None:
    calls: list[weakref.ref[Tensor]] = []
    x = torch.randn(6, 4, requires_grad=True)

    def twice() -> list[Tensor]:
        result = (x * 2).transpose(0, 1)
        calls.append(weakref.ref(result))
        return [result]

    (result,) = twice()
    scale = torch.randn(4, 6, requires_grad=True)
    with recompute_if(True, [result], twice):
        parts = [(part * factor).sum() for part, factor in zip(result.split(2), scale.split(2), strict=True)]
    del result
    assert calls.pop()() is None  # not saved
    torch.stack(parts).sum().backward()
    assert torch.equal(scale.grad, (x * 2).T) and torch.equal(x.grad, 2 * scale.T)
    assert len(calls) == 1 and calls[0]() is None


def test_recomputed_activations_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = Experts(num_experts=4, top_k=2, ffn_hidden_size=24)
    expected = gradients("pre", TrainConfig(), moe)
    replaced: list[int] = []
    pack = _Recomputed.pack

    def seen(block: _Recomputed, tensor: Tensor) -> Any:
        packed = pack(block, tensor)
        replaced.append(tensor.numel() if packed is not tensor else 0)
        return packed

    monkeypatch.setattr(_Recomputed, "pack", seen)
    recomputed = gradients("pre", TrainConfig(recompute="selective", recompute_modules=("moe_act",)), moe)
    for name, gradient in expected.items():
        assert torch.equal(recomputed[name], gradient), name
    layers, rows = 2, 8 * moe.top_k
    assert sum(replaced) == layers * 2 * rows * moe.ffn_hidden_size  # the activation, and its product with the weights
