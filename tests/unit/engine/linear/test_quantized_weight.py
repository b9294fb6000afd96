"""Quantized weights have the elements of bitsandbytes' linear layers, also in shards; their matmuls keep no copy."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optional_packages
from isthmus.engine.linear.input_exchange import NO_EXCHANGE
from isthmus.engine.linear.linear import ReplicatedLinear, _LinearIntoMainGrad
from isthmus.engine.linear.quantized_linears import quantize_frozen, unallocated_linears
from isthmus.engine.linear.quantized_weight import Kind, QuantizedWeight, bitsandbytes, dense
from isthmus.engine.parallel.sharded_params import full_to_shard
from isthmus.errors import UsageError

pytestmark = optional_packages.bitsandbytes.required
KINDS = ("nf4", "int8")


def quantized(weight: Tensor, kind: Kind) -> QuantizedWeight:
    result = QuantizedWeight(weight, kind, weight.device)
    result.quantize_(weight)
    return result


def of_bitsandbytes(weight: Tensor, kind: Kind) -> Tensor:
    """The weight as a model has it that transformers loads with ``BitsAndBytesConfig``."""
    import bitsandbytes

    if kind == "nf4":
        loaded = bitsandbytes.nn.Params4bit(weight.clone(), quant_type="nf4", compress_statistics=False).to("cpu")
        result: Tensor = bitsandbytes.functional.dequantize_4bit(loaded.data, loaded.quant_state)
        return result
    row = bitsandbytes.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False).to("cpu")
    result = bitsandbytes.functional.int8_vectorwise_dequant(row.data, row.SCB)
    return result.to(weight.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_elements_of_bitsandbytes(kind: Kind, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(rows, 256, generator=generator).to(dtype) * 0.02 for rows in (48, 16))
    wanted_q, wanted_k = of_bitsandbytes(q, kind), of_bitsandbytes(k, kind)
    close = {"rtol": 1e-6 if dtype == torch.float32 else 0, "atol": 0} if kind == "int8" else {"rtol": 0, "atol": 0}

    def fused(first: Tensor, second: Tensor) -> Tensor:
        """The rows of the second of two ranks: some of both layers."""
        return torch.cat((first[24:], second[8:]))

    result = quantized(fused(q, k), kind).dequantize()
    assert result.dtype == dtype and not torch.equal(result, fused(q, k))
    torch.testing.assert_close(result, fused(wanted_q, wanted_k), **close)
    if kind == "nf4":
        assert torch.equal(quantized(q[:, 64:192], kind).dequantize(), wanted_q[:, 64:192])
        experts = torch.stack((q[:16], q[16:32], k))  # a parameter of transformers
        assert torch.equal(of_bitsandbytes(experts, kind)[2], wanted_k)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_matmuls_and_gradients_are_those_of_the_dequantized_weight(kind: Kind) -> None:
    torch.manual_seed(0)
    weight = quantized(torch.randn(24, 64), kind)
    x, upstream = torch.randn(5, 1, 64, requires_grad=True), torch.randn(5, 1, 24)
    remaining: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: remaining.append(tensor) or tensor, lambda tensor: tensor
    ):
        result = _LinearIntoMainGrad.apply(x, weight, NO_EXCHANGE)
    expected = x @ weight.dequantize().t()
    assert torch.equal(result, expected) and not remaining
    mine, theirs = (torch.autograd.grad(out, x, upstream)[0] for out in (result, expected))
    assert torch.equal(mine, theirs)


def test_it_is_a_parameter_without_memory_of_its_own() -> None:
    module = nn.Linear(64, 32, bias=False)
    full = module.weight
    module.weight = weight = QuantizedWeight(full, "nf4", full.device)
    weight.quantize_(full.detach())
    assert dict(module.named_parameters()) == {"weight": weight}
    assert weight.is_meta and not weight.requires_grad and weight.shape == full.shape and weight.dtype == full.dtype
    assert sum(tensor.nbytes for tensor in weight.elements) == 32 * 64 // 2 + 32 * 64 // 64 * 4
    assert dense(full) is full and torch.equal(dense(weight), weight.dequantize())


def test_weights_have_no_memory_until_they_are_read() -> None:
    config: Any = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)
    with unallocated_linears():
        layers = nn.ModuleDict({"frozen": ReplicatedLinear(config, 96, 32), "trained": ReplicatedLinear(config, 96, 8)})
    assert all(parameter.is_meta for parameter in layers.parameters())
    layers["frozen"].requires_grad_(False)
    messages = quantize_frozen([layers], "nf4", torch.device("cpu"))
    assert messages[0] == "nf4: 1 linear layers of this rank"
    assert "frozen is quantized, but unlike bitsandbytes: 96 columns of a rank are no multiple of 64" in messages[1]
    assert layers["trained"].weight.device.type == "cpu" and layers["trained"].weight.requires_grad
    weight: Any = layers["frozen"].weight
    assert sum(tensor.nbytes for tensor in weight.elements) == 0
    values = torch.randn(32, 96).bfloat16()
    with full_to_shard(weight.detach()) as full:
        full.copy_(values)
    assert torch.equal(weight.dequantize(), quantized(values, "nf4").dequantize())


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {"bitsandbytes": None, "bitsandbytes.functional": None}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    bitsandbytes.cache_clear()
    with pytest.raises(UsageError, match=r"pip install 'isthmus\[lora\]'"):
        quantized(torch.ones(2, 64), "nf4")
