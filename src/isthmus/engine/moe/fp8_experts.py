"""Grouped FP8 GEMMs for the experts of a rank: the forward pass and the gradient of its input.

torch's kernel takes e4m3 operands with a scale for each row, and returns bfloat16. Weight gradients stay bfloat16: as
their sums are over the rows of an expert, their operands would need groups of aligned lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.engine.linear.fp8_linear import MAX_KERNEL_ERROR, emulated_scaled_mm, fits, kept_in_step
from isthmus.engine.linear.fp8_quantization import ALIGNMENT, Quantized, quantize
from isthmus.engine.moe.grouped_gemm import GroupSizes, stack_tensors
from isthmus.engine.moe.moe_layer import GroupedExperts
from isthmus.errors import UsageError
from isthmus.platforms.torch_features import SCALED_GROUPED_MM


def fp8_grouped_matmul(
    x: Tensor, sizes: GroupSizes, weights: Sequence[Tensor], *, transposed: bool, kernel: bool, dtype: torch.dtype
) -> Tensor:
    """:func:`isthmus.engine.moe.grouped_gemm.grouped_matmul` in FP8; ``kernel`` has no effect on it.

    Quantized weights are kept in a step of several micro batches.
    """
    matrix = functools.partial(_rows_of_outputs, weights, transposed=transposed)
    outputs = kept_in_step(weights[0], ("experts", transposed), lambda: quantize(matrix(), dtype, "rowwise"))
    if not x.size(0):
        return x.new_empty(0, outputs.values.size(1))
    rows = quantize(x, dtype, "rowwise")
    return (_scaled_grouped_mm if x.is_cuda else emulated_grouped_mm)(rows, outputs, sizes, x.dtype)


def _rows_of_outputs(weights: Sequence[Tensor], *, transposed: bool) -> Tensor:
    """[G, outputs, inputs] of weights [N, K], whose outputs are N if ``transposed``."""
    stacked = stack_tensors([weight.detach() for weight in weights])
    return stacked if transposed else stacked.mT


def _scaled_grouped_mm(rows: Quantized, outputs: Quantized, sizes: GroupSizes, dtype: torch.dtype) -> Tensor:
    scales = rows.inverse_scale.flatten(), outputs.inverse_scale.flatten(1)
    result: Tensor = SCALED_GROUPED_MM(rows.values, outputs.values.mT, *scales, offs=sizes.ends, out_dtype=dtype)
    return result


def emulated_grouped_mm(rows: Quantized, outputs: Quantized, sizes: GroupSizes, dtype: torch.dtype) -> Tensor:
    """Float32 matmuls of the same rounded numbers, one for each group."""
    groups = zip(*(tensor.split(sizes.on_host) for tensor in rows[:2]), strict=True)
    experts = zip(*(tensor.unbind() for tensor in outputs[:2]), strict=True)
    products = [
        emulated_scaled_mm(Quantized(x, x_scale, "rowwise"), Quantized(weight, scale, "rowwise"), dtype)
        for (x, x_scale), (weight, scale) in zip(groups, experts, strict=True)
    ]
    return torch.cat(products)


def check_grouped_kernel(dtype: torch.dtype, device: torch.device) -> None:
    """Run a small grouped matmul on a GPU, with an empty group.

    Raises UsageError if torch cannot run it on this GPU, or the result is wrong.
    """
    what, instead = "train.fp8_experts=true cannot be used", "Leave it out: experts are then bf16."
    if SCALED_GROUPED_MM is None:
        raise UsageError(f"{what}: torch {torch.__version__} has no _scaled_grouped_mm. {instead}")
    elements = torch.arange(5 * 48 * 64, device=device)
    rows = quantize(elements[: 37 * 64].view(37, 64).sin(), dtype, "rowwise")
    outputs = quantize(elements.view(5, 48, 64).cos(), dtype, "rowwise")
    counts = [9, 0, 1, 20, 7]
    sizes = GroupSizes(torch.tensor(counts, device=device), counts)
    expected = emulated_grouped_mm(rows, outputs, sizes, torch.float32)
    try:
        result = _scaled_grouped_mm(rows, outputs, sizes, torch.bfloat16)
    except RuntimeError as reason:
        raise UsageError(f"{what}: _scaled_grouped_mm of {dtype} fails on this GPU ({reason}). {instead}") from reason
    error = float((result.float() - expected).norm() / expected.norm())
    if not error < MAX_KERNEL_ERROR:
        raise UsageError(f"{what}: _scaled_grouped_mm of {dtype} is wrong by {error:.0%} on this GPU. {instead}")


def use_fp8_experts(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Compute experts with FP8 matmuls of ``dtype``, an e4m3 type; returns messages for the user."""
    messages: dict[str, None] = {}
    for experts in (module for module in model.modules() if isinstance(module, GroupedExperts)):
        first: Any = experts.local_experts[0]
        weights: list[Tensor] = [first.linear_fc1.weight, first.linear_fc2.weight]
        shapes = " and ".join(f"{weight.size(0)} x {weight.size(1)}" for weight in weights)
        name = f"fp8: {len(experts.local_experts)} experts of {shapes}"
        if all(map(fits, weights)):
            experts.multiply = functools.partial(fp8_grouped_matmul, dtype=dtype)
            messages[f"{name} with rowwise scales; their weight gradients stay bf16"] = None
        else:
            messages[f"{name} stay bf16, no multiples of {ALIGNMENT}"] = None
    return tuple(messages)
