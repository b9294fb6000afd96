"""Tensor-parallel linear layers that add their weight gradient straight into the gradient buffer.

Megatron-Core has this fusion only as a CUDA extension of Apex. In float32 a plain ``addmm_`` does the same on
every device: one matrix product with the accumulation inside, instead of a product, an allocation and an addition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as mcore
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.engine.layers.fp8_linear import ALIGNMENT, Fp8Recipe, fits, fp8_linear
from isthmus.engine.layers.matmul import add_product, product


class _LinearIntoMainGrad(torch.autograd.Function):
    """``x @ weight.T``, whose weight gradient goes to ``weight.main_grad`` and not to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: a hook on saved tensors would hand it back without its main_grad
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x = product(grads[0], weight)
        add_product(weight.main_grad, grads[0].flatten(0, -2).t(), x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return grad_x, None


def _product_alone(x: Tensor, weight: Tensor, kwargs: Mapping[str, Any] = MappingProxyType({})) -> Tensor | None:
    """``x @ weight.T`` where nothing else is asked for: no bias, no exchange around it, gradients in float32 if any."""
    if kwargs.get("bias") is not None or kwargs.get("allreduce_dgrad") or kwargs.get("sequence_parallel"):
        return None
    if not torch.is_grad_enabled():
        return product(x, weight.t())
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype != torch.float32:
        return None
    alone: Tensor = _LinearIntoMainGrad.apply(x, weight)
    return alone


def _in_fp8(x: Tensor, weight: Tensor, recipe: Fp8Recipe, kwargs: dict[str, Any]) -> Tensor:
    exchanges = {name: kwargs[name] for name in ("allreduce_dgrad", "sequence_parallel")}
    out = fp8_linear(x, weight, recipe, group=kwargs["tp_group"], **exchanges)
    return out if kwargs["bias"] is None else out + kwargs["bias"]


class ColumnParallelLinear(mcore.ColumnParallelLinear):
    """Megatron-Core's column-parallel linear layer, with the accumulation fused where it can be."""

    fp8: Fp8Recipe | None = None
    """How its products are taken in 8 bits; None where they are not. See :func:`use_fp8`."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        if self.fp8 is not None:
            return _in_fp8(input, weight, self.fp8, kwargs)
        alone = _product_alone(input, weight, kwargs)
        return super()._forward_impl(input, weight, **kwargs) if alone is None else alone


class RowParallelLinear(mcore.RowParallelLinear):
    """Megatron-Core's row-parallel linear layer, with the accumulation fused where it can be."""

    fp8: Fp8Recipe | None = None
    """As of :class:`ColumnParallelLinear`."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        if self.fp8 is not None:
            return _in_fp8(input, weight, self.fp8, kwargs)
        alone = _product_alone(input, weight, kwargs)
        return super()._forward_impl(input, weight, **kwargs) if alone is None else alone


def use_fp8(model: nn.Module, recipe: Fp8Recipe) -> tuple[str, ...]:
    """Take the products of attention's and feed-forward blocks' parallel layers in 8 bits.

    The output layer, routers, routed experts and layers that every rank holds whole keep their type; so do layers
    whose part on this rank has a width that the hardware does not multiply.

    Returns:
        What the user ought to know: which of the layers could not be changed.
    """
    left: dict[str, tuple[int, ...]] = {}
    changed = 0
    for name, module in model.named_modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear) or module.is_expert:
            continue
        if fits(module.weight):
            module.fp8 = recipe
            changed += 1
        else:
            left.setdefault(name.rpartition(".")[2], tuple(module.weight.shape))
    told = [f"fp8: {changed} linear layers of this rank"]
    told += [
        f"fp8: {name} stays bf16, {shape[0]} x {shape[1]} on a rank is no multiple of {ALIGNMENT} both ways"
        for name, shape in left.items()
    ]
    return tuple(told)


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that every tensor-parallel rank holds whole and applies to what it has of a line."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        # finalize_model_grads reads this mark: each rank saw only its part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., input_size] -> [..., output_size]."""
        alone = _product_alone(x, self.weight)
        return torch.nn.functional.linear(x, self.weight) if alone is None else alone

    def get_extra_state(self) -> None:
        """The empty entry that Megatron-Core's checkpoints have beside each linear layer."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """There is none."""


@functools.cache
def with_bias(kind: type, bias: bool) -> type:
    """The same layer with a bias or without, whatever it is asked for: Megatron-Core has one switch for several."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs | {"bias": bias})  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": build, "__doc__": kind.__doc__})
