"""The kernels of flash-linear-attention for the delta rule, on a GPU where they are installed and right.

They are untested on GPUs: each run compares them with :mod:`isthmus.engine.mixers.delta_rule` before it uses them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from isthmus.engine.host_copies import to_device
from isthmus.engine.kernel_check import TOLERANCE, relative_errors
from isthmus.engine.mixers.delta_rule import gated_delta_rule
from isthmus.engine.mixers.gated_delta_net import GatedDeltaNet, Rule

_KERNELS = {
    False: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    True: ("fla.ops.kda", "chunk_kda"),
}
"""Kernels by whether decays differ by channel."""
_LENGTHS = (200, 1, 77, 300, 62)
"""Not multiples of a chunk."""


def choose_delta_kernels(model: nn.Module) -> tuple[str, ...]:
    """Set the rule of all delta nets of ``model`` to the kernel, if it can be used; returns messages for the user."""
    messages: dict[str, None] = {}
    for mixer in (module for module in model.modules() if isinstance(module, GatedDeltaNet)):
        weight = mixer.in_proj.weight
        if not weight.is_cuda or isinstance(weight.data, FakeTensor):
            continue
        sizes = mixer.sizes
        shape = (sizes.num_value_heads // mixer.tp, sizes.key_head_dim, sizes.value_head_dim)
        kernel, reason = usable_kernel(shape, mixer.channel_decay, mixer.config.params_dtype, weight.device)
        implementation = f"plain PyTorch, because {reason}"
        if kernel is not None:
            mixer.rule = kernel
            implementation = "a kernel of flash-linear-attention"
        messages[f"delta nets: {implementation}"] = None
    return tuple(messages)


@functools.cache
def usable_kernel(
    shape: tuple[int, int, int], channel_decay: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Rule | None, str]:
    """The kernel for heads, key and value widths ``shape``, or None and the reason."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"flash-linear-attention needs bf16 or fp16, got {dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return None, "flash-linear-attention is not deterministic"
    module, name = _KERNELS[channel_decay]
    try:
        kernel = _packed(getattr(importlib.import_module(module), name))
        error = _largest_error(kernel, shape, channel_decay, dtype, device)
    except Exception as failure:  # no module; or of Triton
        reason = str(failure).strip().partition("\n")[0]
        return None, f"flash-linear-attention failed with {type(failure).__name__}: {reason}"
    if error <= TOLERANCE[dtype]:
        return kernel, ""
    return None, f"flash-linear-attention has errors of {error:.2g}, above {TOLERANCE[dtype]:g}"


def _packed(kernel: Callable[..., tuple[Tensor, Tensor | None]]) -> Rule:
    """The kernel with the arguments of :func:`gated_delta_rule`."""

    def rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: Sequence[int]) -> Tensor:
        decay = log_decay if log_decay.size(-1) > 1 else log_decay.squeeze(-1)
        out, _ = kernel(
            *(x.to(v.dtype)[None] for x in (q, k, v)),
            g=decay[None],
            beta=beta.to(v.dtype)[None],
            cu_seqlens=_ends(tuple(lengths), v.device),
        )
        return out[0]

    return rule


@functools.lru_cache(maxsize=4)  # shared by the layers of a step: the kernels derive more from it, once for each tensor
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [samples + 1], from 0, without a read of the device."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def _largest_error(
    kernel: Rule, shape: tuple[int, int, int], channel_decay: bool, dtype: torch.dtype, device: torch.device
) -> float:
    """Largest error of output and gradients, relative to their largest value; NaN if one is not finite."""
    random = torch.Generator().manual_seed(0)
    heads, keys, values = shape

    def draw(*widths: int) -> Tensor:
        return torch.randn(sum(_LENGTHS), heads, *widths, generator=random)

    q, k = (torch.nn.functional.normalize(draw(keys), dim=-1) for _ in range(2))
    decay = -torch.nn.functional.softplus(draw(keys if channel_decay else 1) - 2)
    inputs, upstream = (q, k, draw(values).to(dtype), decay, draw().sigmoid()), draw(values)

    def run(rule: Rule, device: torch.device) -> list[Tensor]:
        leaves = [x.detach().to(device, copy=True).requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = rule(*leaves, _LENGTHS)
            return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(device, out.dtype))]

    return float(relative_errors(run(kernel, device), run(gated_delta_rule, torch.device("cpu"))).max())
