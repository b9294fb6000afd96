"""Selective activation recomputation of feed-forward blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from isthmus.config.schema.train import TrainConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.single_process_model import single_process_groups
from isthmus.families.architecture import Architecture, Form


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with single_process_groups():
        yield


def gradients(form: Form, train: TrainConfig) -> dict[str, Tensor]:
    from isthmus.engine.megatron_model import build_model
    from isthmus.engine.model_config import transformer_config

    architecture = Architecture(
        family="gpt2", num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, num_query_groups=2,
        kv_channels=8, vocab_size=32, max_position_embeddings=16, norm_epsilon=1e-5, normalization="LayerNorm",
        mlp_bias=True, activation="gelu", gated=False, form=form,
    )  # fmt: skip
    model = build_model(architecture, transformer_config(architecture, dtype=torch.float32, train=train))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    model.train()(PackedBatch.for_inference([torch.arange(7), torch.arange(1)])).square().mean().backward()
    assert all(parameter.is_leaf for parameter in model.parameters())
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("form", ["pre", "parallel"])
def test_recomputed_mlp_with_bias_has_the_same_gradients(form: Form) -> None:
    wanted = gradients(form, TrainConfig())
    recomputed = gradients(form, TrainConfig(recompute="selective", recompute_modules=("mlp",)))
    assert recomputed.keys() == wanted.keys() and "decoder.layers.0.mlp.linear_fc2.bias" in wanted
    for name, gradient in wanted.items():
        assert torch.equal(recomputed[name], gradient), name
