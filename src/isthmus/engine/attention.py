"""Causal self-attention over a line of packed samples.

A micro batch is one line of T tokens, samples end to end ("thd"). The projections see the whole line, the scores
only ever one sample: no token is padded, none sees another sample, and no [T, T] mask exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from isthmus.engine.line_attention import line_attention
from isthmus.engine.rope import rotate


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the samples of a packed line begin and end."""

    lengths: tuple[int, ...]
    """Tokens of each sample, on the host, so that no layer waits for the device to learn them."""


def sample_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None = None) -> Tensor:
    """Attend causally within each sample of a line, one after the other, with PyTorch's own kernel.

    Args and returns: those of :func:`isthmus.engine.line_attention.line_attention`, which is the faster one on CPUs.
    """
    outputs = []
    for q_s, k_s, v_s in zip(*(tensor.split(list(lengths)) for tensor in (q.flatten(1, 2), k, v)), strict=True):
        masked = window is not None and q_s.size(0) > window
        out = scaled_dot_product_attention(
            q_s.transpose(0, 1)[None],
            k_s.transpose(0, 1)[None],
            v_s.transpose(0, 1)[None],
            attn_mask=_window_mask(q_s, window) if masked and window is not None else None,
            is_causal=not masked,
            enable_gqa=q.size(2) > 1,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs).unflatten(1, q.shape[1:3])


def _window_mask(q: Tensor, window: int) -> Tensor:
    """True where a query may look: at itself and the ``window - 1`` keys before it."""
    index = torch.arange(q.size(0), device=q.device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)


class VarlenAttention(nn.Module):
    """Softmax attention within each sample; key/value heads are shared by a group of query heads, not copied."""

    def __init__(self, config: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """Attend.

        Args:
            q: [T, G, R, D], R query heads to each of G key/value heads.
            k: [T, G, D].
            v: [T, G, D].
            segments: sample lengths that sum to T.

        Returns:
            [T, G * R * D]
        """
        attend = line_attention if q.device.type == "cpu" else sample_attention
        return attend(q, k, v, segments.lengths, self.window).flatten(1)


class PackedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention parameters with a forward pass for packed lines.

    The parent's forward handles inference, padding and a rotary table per layer; this one does what training
    needs and nothing else. Parameters, sharding and checkpoint names are the parent's.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Segments, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and project.

        Args:
            hidden_states: [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
            rotary_pos_emb: [T, D] from :func:`isthmus.engine.rope.rotation_table`.
            packed_seq_params: the samples of the line.

        Returns:
            The output [T, 1, H] (or [T / tp, 1, H]) and the bias that the caller still has to add, or None.
        """
        q, k, v = self._project(hidden_states)
        interleaved = self.config.rotary_interleaved
        q, k = (rotate(heads, rotary_pos_emb, interleaved=interleaved) for heads in (q, k))
        if self.checkpoint_core_attention and self.training:
            attended = tensor_parallel.checkpoint(
                lambda q, k, v: self.core_attention(q, k, v, packed_seq_params), False, q, k, v
            )
        else:
            attended = self.core_attention(q, k, v, packed_seq_params)
        return self.linear_proj(attended[:, None])

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, G, R, D], keys and values [T, G, D]."""
        if self.config.num_query_groups < self.world_size:
            q, k, v = self.get_query_key_value_tensors(hidden_states, None)  # of one group, [T, 1, heads, D]
            return q, k[:, 0], v[:, 0]
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        head_dim = self.hidden_size_per_attention_head
        heads_per_group = self.num_attention_heads_per_partition // groups
        mixed = mixed.view(mixed.size(0), groups, heads_per_group + 2, head_dim)
        q, k, v = mixed.split((heads_per_group, 1, 1), dim=2)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k[:, :, 0], v[:, :, 0]
