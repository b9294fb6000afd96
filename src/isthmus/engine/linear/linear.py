"""Tensor-parallel linear layers that accumulate weight gradients directly into ``main_grad``.

Megatron-Core requires Apex's CUDA extension for this; without it, it rounds the gradient of each micro batch to the
weight's dtype. :func:`isthmus.engine.linear.matmul.add_matmul` needs no extension.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers as mcore
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.engine.linear.async_tp import AsyncExchange, RowIntoMainGrad, check_async_tp
from isthmus.engine.linear.fp8_linear import Fp8Recipe, fits, fp8_linear
from isthmus.engine.linear.input_exchange import NO_EXCHANGE, InputExchange
from isthmus.engine.linear.matmul import add_matmul, matmul
from isthmus.engine.linear.quantized_weight import dense


class _LinearIntoMainGrad(torch.autograd.Function):
    """Saves this rank's part of the input; the matmuls of the backward pass overlap its communication.

    A frozen weight needs no input, and has no gradient. A quantized one is de-quantized in both passes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, exchange: InputExchange) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight = weight  # not saved: a hook on saved tensors would return it without its main_grad
        ctx.exchange = exchange
        return exchange.matmul(x, dense(weight).t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), weight, exchange = ctx.saved_tensors, ctx.weight, ctx.exchange
        if x is None:
            grad_x, wait_for_sum = exchange.start_input_grad(grads[0], dense(weight))
            wait_for_sum()
            return grad_x, None, None
        gathered, wait_for_input = exchange.start_gather(x)
        grad_x, wait_for_sum = exchange.start_input_grad(grads[0], weight)
        wait_for_input()
        add_matmul(weight.main_grad, grads[0].flatten(0, -2).t(), gathered.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        wait_for_sum()
        return grad_x, None, None


def _fused_linear(x: Tensor, weight: Tensor, exchange: InputExchange = NO_EXCHANGE) -> Tensor | None:
    """``x @ weight.T``; None if there is no float32 gradient buffer and the weight is trained."""
    if not torch.is_grad_enabled():
        return exchange.matmul(x, dense(weight).t())
    if not weight.requires_grad:
        return _LinearIntoMainGrad.apply(x, weight, exchange)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype != torch.float32:
        return None
    return _LinearIntoMainGrad.apply(x, weight, exchange)


class _FusedForward:
    """Mixin for Megatron-Core's parallel linear layers: FP8 or fused gradient accumulation, if possible."""

    fp8: Fp8Recipe | None = None
    """Set by :func:`use_fp8`."""
    async_tp = False
    """Set by :func:`use_async_tp`."""
    weight: nn.Parameter
    tp_group: Any

    def _local_output(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The output of a rank that shares the layer with no other one, without gradients; else None.

        Megatron-Core's checks, and its autograd functions that exchange nothing then, take time, most for small models.
        """
        if torch.is_grad_enabled() or self.fp8 is not None or self.tp_group.size() > 1:
            return None
        out = matmul(x, dense(self.weight).t())
        if (lora := linear_adapters(self)) is not None:  # type: ignore[arg-type]
            out = lora(out, x, self.weight)
        return out if bias is None else out + bias

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        kind = AsyncExchange if self.async_tp and kwargs["sequence_parallel"] else InputExchange
        exchange = kind(kwargs["tp_group"], kwargs["allreduce_dgrad"], kwargs["sequence_parallel"])
        if self.fp8 is not None:
            out: Tensor | None = fp8_linear(input, weight, self.fp8, exchange)
        else:
            out = _fused_linear(input, weight, exchange)
        if out is None:
            return super()._forward_impl(input, weight, **kwargs)  # type: ignore[misc]
        return out if kwargs["bias"] is None else out + kwargs["bias"]


class LinearAdapters(Protocol):
    """Adapters of a linear layer, see :class:`isthmus.engine.lora.low_rank.LowRank`."""

    def __call__(self, out: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def joined_a(self) -> Tensor: ...

    def joined_b(self) -> Tensor: ...


def linear_adapters(layer: nn.Module) -> LinearAdapters | None:
    """The adapters that :func:`isthmus.engine.lora.attach.attach_adapters` gave to a linear layer, if any."""
    adapters: LinearAdapters | None = layer._modules.get("lora")  # type: ignore[assignment]
    return adapters


class ColumnParallelLinear(_FusedForward, mcore.ColumnParallelLinear):
    """Megatron-Core's column-parallel linear layer with fused gradient accumulation and adapters."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The output, and the bias that the caller adds, if any."""
        bias, added = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        if not (args or kwargs) and (out := self._local_output(input_, bias)) is not None:
            return out, added
        return super().forward(input_, *args, **kwargs)  # type: ignore[no-any-return]

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        if (lora := linear_adapters(self)) is None:
            return super()._forward_impl(input, weight, **kwargs)
        out: Tensor = lora(super()._forward_impl(input, weight, **kwargs | {"bias": None}), input, weight)
        return out if kwargs["bias"] is None else out + kwargs["bias"]


class RowParallelLinear(_FusedForward, mcore.RowParallelLinear):
    """Megatron-Core's row-parallel linear layer with fused gradient accumulation and adapters."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, and the bias that the caller adds, if any."""
        bias, added = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        if (local := self._local_output(input_, bias)) is not None:
            return local, added
        out, bias = self._without_adapters(input_)
        lora = linear_adapters(self)
        return (out if lora is None else lora(out, input_, self.weight)), bias

    def _without_adapters(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.async_tp:
            return super().forward(input_)  # type: ignore[no-any-return]
        out = RowIntoMainGrad.apply(input_, self.weight, self.tp_group)
        if self.bias is None or self.skip_bias_add:
            return out, self.bias
        return out + self.bias, None


def use_async_tp(model: nn.Module) -> None:
    """Overlap parts of the matmuls of parallel linear layers with communication; their weights need a ``main_grad``.

    The output layer, experts and replicated layers do not change. Raises UsageError if it is impossible here.
    """
    parameter = next(model.parameters())
    check_async_tp(parallel_state.get_tensor_model_parallel_group(), parameter.device, parameter.dtype)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.is_expert:
            module.async_tp = True


def use_fp8(model: nn.Module, recipe: Fp8Recipe) -> tuple[str, ...]:
    """Compute parallel linear layers in FP8; returns messages for the user.

    The output layer, routers, routed experts, replicated layers and layers with unsupported widths keep their dtype.
    """
    unsupported: dict[str, tuple[int, ...]] = {}
    changed = 0
    for name, module in model.named_modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear) or module.is_expert:
            continue
        if fits(module.weight, recipe.multiple):
            module.fp8 = recipe
            changed += 1
        else:
            unsupported.setdefault(name.rpartition(".")[2], tuple(module.weight.shape))
    messages = [f"fp8: {changed} linear layers of this rank"]
    messages += [
        f"fp8: {name} stays bf16, {shape[0]} x {shape[1]} on a rank is no multiple of {recipe.multiple} both ways"
        for name, shape in unsupported.items()
    ]
    return tuple(messages)


class ReplicatedLinear(nn.Module):
    """A linear layer without bias, replicated on all tp ranks."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        # finalize_model_grads reads it: each rank has a part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out = _fused_linear(x, self.weight)
        out = torch.nn.functional.linear(x, self.weight) if out is None else out
        lora = linear_adapters(self)
        return out if lora is None else lora(out, x, self.weight)

    def get_extra_state(self) -> None:
        """Megatron-Core's checkpoints have an empty entry next to each linear layer."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """No-op."""


@functools.cache
def with_bias(kind: type, bias: bool) -> type:
    """The layer class with a fixed ``bias``: Megatron-Core has one switch for several layers."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs | {"bias": bias})  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": build, "__doc__": kind.__doc__})
