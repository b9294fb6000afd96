"""Attention, which a CPU build decomposes for tensors on a GPU, and a GPU build runs as one kernel.

``flex_attention`` is compiled on a GPU; here it is one operator forward and one backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_LIBRARY: list[Any] = []


def install() -> None:
    """Register it for autograd on ``cuda``, in front of the decomposition."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
    without_values = torch.library.Library("aten", "IMPL", "Meta")
    without_values.impl("_scaled_mm.out", _scaled_mm_out)
    _LIBRARY.extend((library, without_values))  # their end would remove them
    _allow_lower_right()
    from isthmus.engine.attention.backends import flex
    from isthmus.engine.attention.backends import registry as backends

    flex._kernel = lambda softcap, scale, dtype: _flex
    backends.find_compiler = lambda device: ("Triton", "")


def _scaled_mm_out(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *args: Any, out: Tensor, **options: Any
) -> Tensor:
    """torch has the checks of the operator without ``out`` only."""
    result = torch.ops.aten._scaled_mm.default(a, b, scale_a, scale_b, *args, **options)
    assert out.shape == result.shape and out.dtype == result.dtype and out.is_contiguous()
    return out


def _allow_lower_right() -> None:
    """torch's mask of a last query that sees all keys: its constructor fails under a mode, its kernels need a GPU."""
    from torch.nn.attention import bias

    module: Any = bias
    new = module.CausalBias.__new__

    def outside_of_modes(cls: Any, *_args: Any) -> Any:
        with _disable_current_modes():
            return new(cls)

    module.CausalBias.__new__ = outside_of_modes
    module.can_use_flash_attention = lambda p: _has_flash(p.query, p.value)
    module.can_use_efficient_attention = lambda p: p.query.size(-3) == p.key.size(-3)


def _has_flash(query: Tensor, value: Tensor) -> bool:
    return query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) == value.size(-1) <= 256


def _flex(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Any) -> Tensor:
    """With the conditions that torch checks before it compiles."""
    assert mask.shape == (1, 1, q.size(2), k.size(2)) and k.size(2) == v.size(2)
    assert all(item.device == q.device for item in mask.as_tuple() if isinstance(item, Tensor))
    return torch.ops.fake_cuda.flex_attention(q, k, v, sinks)


@torch.library.custom_op("fake_cuda::flex_attention", mutates_args=())
def _flex_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty(*q.shape[:3], v.size(-1))


@torch.library.custom_op("fake_cuda::flex_attention_backward", mutates_args=())
def _flex_backward(grad: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(item) for item in inputs]


_flex_forward.register_fake(lambda q, k, v, sinks: q.new_empty(*q.shape[:3], v.size(-1)))
_flex_backward.register_fake(lambda grad, inputs: [torch.empty_like(tensor) for tensor in inputs])


def _flex_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.fake_cuda.flex_attention_backward(grad, list(ctx.saved_tensors[:-1]))
    return (*grads, *(None,) * (4 - len(grads)))


_flex_forward.register_autograd(
    _flex_gradients,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*filter(torch.is_tensor, inputs), output),
)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """With torch's conditions of the flash and the memory-efficient kernel; cuDNN's is not chosen."""
    aten = torch.ops.aten
    if mask is None and _has_flash(query, value):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if query.size(-3) == key.size(-3):
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
        if mask is not None:
            mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
