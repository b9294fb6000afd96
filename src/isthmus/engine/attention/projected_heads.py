"""Heads of a QKV projection in one compiled region each way: norms of queries and keys, rotation, and their gradients.

Separate regions and the gradients of slices are 7 calls more (docs/decisions/0089).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isthmus.engine.attention.rope import rotated_out_of_place
from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.layers.norm import add_or_return, gradient_buffer, rms_norm_backward, rms_normalized


class HeadSettings(NamedTuple):
    groups: int
    """Key heads of this rank."""
    widths: tuple[int, ...]
    """Columns of a group: its queries, its gates if it has any, its keys, its values."""
    interleaved: bool
    eps: float
    zero_centered: bool


def project_heads(
    mixed: Tensor, table: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, settings: HeadSettings
) -> tuple[Tensor, ...]:
    """Normed and rotated queries [T, G, R, D] and keys [T, G, D], any gates [T, G, R Dv], and values [T, G, Dv].

    Gates and values are views of ``mixed``, the output [T, 1, W] of the projection. ``table`` is a
    :func:`~isthmus.engine.attention.rope.rotation_table`; weights are those of RMSNorms over the channels of a head.
    """
    if not torch.is_grad_enabled():
        return *_heads(mixed, table, q_weight, k_weight, *settings), *_others(mixed, settings)
    return _ProjectedHeads.apply(mixed, table, q_weight, k_weight, settings)  # type: ignore[no-any-return]


def step_heads(
    mixed: Tensor, weight: Tensor | None, rotation: Callable[[Tensor], Tensor], settings: HeadSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, G, R, D], keys and values [T, G, D] of few tokens without gradients: one norm, and one rotation.

    Keys and values have the same width, and there are no gates. ``weight`` is that of the :func:`joined_norm`.
    """
    heads = mixed.view(mixed.size(0), settings.groups, -1, settings.widths[-1])
    rotated = heads[:, :, :-1]
    if weight is not None:
        rotated = rms_normalized(rotated, weight, settings.eps, zero_centered=settings.zero_centered)[0]
    rotated = rotation(rotated)
    return rotated[:, :, :-1], rotated[:, :, -1], heads[:, :, -1]


def joined_norm(q_weight: Tensor, k_weight: Tensor, settings: HeadSettings) -> Tensor:
    """The weights [R + 1, D] of a group's queries and of its keys from those of their norms, [D] each."""
    queries = settings.widths[0] // settings.widths[-1]
    return torch.stack([*[q_weight] * queries, k_weight])


class _ProjectedHeads(torch.autograd.Function):
    """Saves its input only for norms."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        table: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        settings: HeadSettings,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(mixed if q_weight is not None else None, table, q_weight, k_weight)
        # Not only saved: a hook on saved tensors would return them without their main_grad.
        ctx.parameters, ctx.settings = (q_weight, k_weight), settings
        return *_heads(mixed, table, q_weight, k_weight, *settings), *_others(mixed, settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k, *others = grads
        trained = ctx.needs_input_grad[2:4]
        buffers = map(gradient_buffer, ctx.parameters, trained)
        grad_mixed, *grad_weights = _heads_backward(
            *(grad_q, grad_k, others[-1], others[0], *ctx.saved_tensors, *buffers, any(trained), *ctx.settings)
        )
        return grad_mixed, None, *grad_weights, None


def _others(mixed: Tensor, settings: HeadSettings) -> list[Tensor]:
    """Gates, if there are any, and values."""
    _queries, *gates, _keys, values = _parts(mixed, settings.groups, settings.widths)
    return [*gates, values]


def _parts(mixed: Tensor, groups: int, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return mixed.view(mixed.size(0), groups, -1).split(widths, dim=-1)


def _queries_and_keys(mixed: Tensor, groups: int, widths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    queries, *_gates, keys, _values = _parts(mixed, groups, widths)
    return queries.unflatten(-1, (-1, keys.size(-1))), keys


@compiled_on_gpu
def _heads(
    mixed: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    groups: int,
    widths: tuple[int, ...],
    interleaved: bool,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, ...]:
    def head(x: Tensor, weight: Tensor | None) -> Tensor:
        normed = x if weight is None else rms_normalized(x, weight, eps, zero_centered=zero_centered)[0]
        return rotated_out_of_place(normed, table, interleaved, inverse=False)

    queries, keys = _queries_and_keys(mixed, groups, widths)
    return head(queries, q_weight), head(keys, k_weight)


@compiled_on_gpu
def _heads_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_values: Tensor,
    grad_gates: Tensor,
    mixed: Tensor | None,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_buffer: Tensor | None,
    k_buffer: Tensor | None,
    trained: bool,
    groups: int,
    widths: tuple[int, ...],
    interleaved: bool,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor | None, ...]:
    """``grad_gates`` counts only with gates, of which ``widths`` has the columns.

    Gradients of weights are added to their :func:`~isthmus.engine.layers.norm.gradient_buffer`, or returned.
    """

    def gradients(grad: Tensor, x: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # The transpose of a rotation is the rotation by the opposite angle.
        rotated = rotated_out_of_place(grad, table, interleaved, inverse=True)
        if x is None or weight is None:
            return rotated, None
        scale = rms_normalized(x, weight, eps, zero_centered=zero_centered)[1]
        return rms_norm_backward(rotated, x, weight, scale, zero_centered=zero_centered, trained=trained)

    queries, keys = (None, None) if mixed is None else _queries_and_keys(mixed, groups, widths)
    grad_q, grad_q_weight = gradients(grad_q, queries, q_weight)
    grad_k, grad_k_weight = gradients(grad_k, keys, k_weight)
    gates = (grad_gates,) if len(widths) == 4 else ()
    columns = torch.cat((grad_q.flatten(2), *gates, grad_k, grad_values), dim=-1)
    grad_q_weight = add_or_return(grad_q_weight, q_weight, q_buffer)
    grad_k_weight = add_or_return(grad_k_weight, k_weight, k_buffer)
    return columns.flatten(1)[:, None], grad_q_weight, grad_k_weight
