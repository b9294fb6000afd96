"""The adapters of a fused weight compute what PEFT's layers compute on the linear layers of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.engine.lora.adapter import Adapter
from isthmus.engine.lora.exchange import Exchange
from isthmus.engine.lora.low_rank import LowRank
from isthmus.families.adapted_linears import adapted_linears
from isthmus.families.models.llama import FAMILY
from isthmus.families.rules.shard import TensorSlice, tensor_slices, unsharded
from optional_packages import peft

pytestmark = peft.required
RANK, ALPHA = 3, 5
ALONE: Any = SimpleNamespace(size=lambda: 1)
ARCH = FAMILY.to_architecture(
    {
        "model_type": "llama", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    }
)  # fmt: skip


class Layers:
    """The adapters of one weight here, and PEFT's layers by module, with the same values."""

    def __init__(self, weight: str, targets: tuple[str, ...], *, dora: bool, rslora: bool) -> None:
        name = f"decoder.layers.0.{weight}.weight"
        rule = FAMILY.placements(ARCH)[name].rule
        pieces = tensor_slices(rule, ARCH, unsharded(ARCH))
        scale = ALPHA / (RANK**0.5 if rslora else RANK)
        adapters = [Adapter(linear, RANK, scale) for linear in adapted_linears(FAMILY, ARCH, targets)[name]]
        self.weight = torch.randn(rule.canonical_shape(ARCH))
        self.ours = LowRank(adapters, pieces, self.weight, Exchange("column", ALONE), dora=dora)
        self.theirs: dict[str, Any] = {}
        self.pieces: dict[str, list[TensorSlice]] = {}
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, use_dora=dora, use_rslora=rslora)
        for linear in adapted_linears(FAMILY, ARCH, ("all-linear",))[name]:
            base = nn.Linear(linear.inputs, linear.out, bias=False)
            self.pieces[linear.module] = [piece for piece in pieces if piece.part in dict(linear.parts)]
            for piece in self.pieces[linear.module]:
                base.weight.data[piece.hf] = piece.view(self.weight)
            self.theirs[linear.module] = base
            if linear in [adapter.linear for adapter in adapters]:
                layer = peft.tuners.lora.Linear(base, "default", config, r=RANK, lora_alpha=ALPHA)
                self.theirs[linear.module] = layer
                nn.init.normal_(layer.lora_B["default"].weight)
                if dora:
                    layer.lora_magnitude_vector["default"].weight.data *= torch.rand(linear.out) + 0.5
        if dora:
            self.ours.reset_magnitudes(self.weight)
        for tensor in self.ours.tensors():
            for index, local in tensor.pieces:
                tensor.parameter.data[local] = self.parameter(tensor.adapter, tensor.role).data[index]

    def parameter(self, adapter: Adapter, role: str) -> Tensor:
        """PEFT's."""
        result: Tensor = getattr(self.theirs[adapter.linear.module], role)["default"].weight
        return result

    def output(self, x: Tensor) -> Tensor:
        """PEFT's outputs in the order of the rows of the weight."""
        out = torch.empty(*x.shape[:-1], len(self.weight))
        for module, layer in self.theirs.items():
            result = layer(x)
            for piece in self.pieces[module]:
                out[..., piece.local[0]] = result[..., piece.hf[0]]
        return out


@pytest.mark.parametrize(("dora", "rslora"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("weight", "targets"),
    [
        ("self_attention.linear_qkv", ("all-linear",)),
        ("self_attention.linear_qkv", ("v_proj", "q_proj")),
        ("mlp.linear_fc1", ("all-linear",)),
        ("self_attention.linear_proj", ("o_proj",)),
    ],
)
def test_outputs_gradients_and_merged_weights_are_those_of_peft(
    weight: str, targets: tuple[str, ...], dora: bool, rslora: bool
) -> None:
    torch.manual_seed(0)
    layers = Layers(weight, targets, dora=dora, rslora=rslora)
    inputs = [torch.randn(7, 1, layers.weight.size(1), requires_grad=True)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    out = layers.ours(inputs[0] @ layers.weight.t(), inputs[0], layers.weight)
    expected = layers.output(inputs[1])
    assert not torch.allclose(expected, inputs[0] @ layers.weight.t(), atol=0.1)
    assert torch.allclose(out, expected, atol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    assert inputs[0].grad is not None and inputs[1].grad is not None
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-4)
    checked = 0
    for tensor in layers.ours.tensors():
        theirs = layers.parameter(tensor.adapter, tensor.role).grad
        assert tensor.parameter.grad is not None and theirs is not None
        for index, local in tensor.pieces:
            assert torch.allclose(tensor.parameter.grad[local], theirs[index], atol=1e-4)
            checked += tensor.parameter[local].numel()
    assert checked == sum(parameter.numel() for parameter in layers.ours.parameters())
    merged = layers.ours.merged(layers.weight)
    for module, layer in layers.theirs.items():
        if isinstance(layer, peft.tuners.lora.Linear):
            layer.merge()
            layer = layer.base_layer
        for piece in layers.pieces[module]:
            assert torch.allclose(piece.view(merged), layer.weight.data[piece.hf], atol=1e-5)


def test_bfloat16_adapters_are_merged_in_float32() -> None:
    torch.manual_seed(0)
    layers = Layers("mlp.linear_fc2", ("down_proj",), dora=False, rslora=False)
    layers.ours.bfloat16()
    a, b = (tensor.parameter.detach().float() for tensor in layers.ours.tensors())
    merged = layers.ours.merged(layers.weight)
    torch.testing.assert_close(merged, layers.weight + b @ a * (ALPHA / RANK), atol=1e-6, rtol=1e-6)
