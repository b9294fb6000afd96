"""Multi-head latent attention (arXiv 2405.04434) over packed lines.

Keys and values of all heads are made from one narrow vector a token, and queries may be; only a few channels of each
head are rotated, those of the keys are the same for all heads. Parameters and checkpoint keys are Megatron-Core's; its
own class cannot be built without TransformerEngine (it asks ``isinstance(linear_proj, TELinear)`` with TELinear None,
and hands ``k_channels`` to an attention that does not know them). As in TransformerEngine's layers the projections to
the narrow vectors are held whole by every tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from isthmus.engine.layers.attention import Segments, VarlenAttention
from isthmus.engine.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from isthmus.engine.layers.norm import RMSNorm
from isthmus.engine.layers.rope import rotate, yarn_mscale
from isthmus.engine.parallel.context_parallel import gather_line
from isthmus.families.architecture import Architecture


def latent_scale(architecture: Architecture) -> float:
    """What scores are multiplied by: one over the root of a head's width, and more where YaRN stretches the context."""
    scaling = architecture.rope_scaling
    sharper = 1.0
    if scaling is not None and scaling.mscale_all_dim:
        sharper = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return architecture.kv_channels**-0.5 * sharper**2


class LatentAttention(MegatronModule):
    """Self-attention in the place of Megatron-Core's ``MLASelfAttention``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        architecture: Architecture,
        pg_collection: Any,
        **_unused: Any,
    ) -> None:
        super().__init__(config)
        assert architecture.mla is not None
        self.mla = mla = architecture.mla
        self.layer_number = layer_number
        self.heads = architecture.num_attention_heads // pg_collection.tp.size()
        all_heads, hidden = architecture.num_attention_heads, architecture.hidden_size
        parallel: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        columns = {**parallel, "gather_output": False}
        width_q = all_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank is None:
            self.linear_q_proj = ColumnParallelLinear(hidden, width_q, **columns)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, mla.q_lora_rank)
            self.q_layernorm = RMSNorm(config, mla.q_lora_rank, mla.norm_epsilon)
            self.linear_q_up_proj = ColumnParallelLinear(mla.q_lora_rank, width_q, **columns)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_layernorm = RMSNorm(config, mla.kv_lora_rank, mla.norm_epsilon)
        width_kv = all_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.linear_kv_up_proj = ColumnParallelLinear(mla.kv_lora_rank, width_kv, **columns, disable_grad_reduce=True)
        self.linear_kv_up_proj.sequence_parallel = False  # _latent has gathered what it is given
        self.core_attention = VarlenAttention(
            config, layer_number, softmax_scale=latent_scale(architecture), pg_collection=pg_collection
        )
        self.linear_proj = RowParallelLinear(all_heads * mla.v_head_dim, hidden, input_is_parallel=True, **parallel)

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Segments, **_unused: Any
    ) -> tuple[Tensor, None]:
        """Attend and project.

        Args:
            hidden_states: [T, 1, H], or [T / tp, 1, H] under sequence parallelism; T is here what this rank has of the
                line under context parallelism.
            rotary_pos_emb: [T, qk_rope_head_dim] from :func:`isthmus.engine.layers.rope.line_tables`.
            packed_seq_params: the samples of the line.

        Returns:
            The output [T, 1, H] (or [T / tp, 1, H]), and None for a bias.
        """
        q = self._queries(hidden_states, rotary_pos_emb)
        latent, turned = self._latent(hidden_states, rotary_pos_emb, packed_seq_params)

        def attend(q: Tensor, latent: Tensor, turned: Tensor) -> Tensor:
            return self.core_attention.attend(q, *self._expanded(latent, turned), packed_seq_params)

        if self.core_attention.recomputed and self.training:
            # Keys and values, too, are made again: they are many times wider than what they are made of.
            attended = tensor_parallel.checkpoint(attend, False, q, latent, turned)
        else:
            attended = attend(q, latent, turned)
        out, _ = self.linear_proj(attended[:, None])
        return out, None

    def _queries(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Of this rank's heads, [T, heads, 1, D]."""
        mla = self.mla
        if mla.q_lora_rank is None:
            q, _ = self.linear_q_proj(hidden)
        else:
            q, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        widths = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        plain, turned = q.view(q.size(0), self.heads, -1).split(widths, dim=-1)
        turned = rotate(turned, table, interleaved=self.config.rotary_interleaved)
        return torch.cat((plain, turned), dim=-1)[:, :, None]

    def _latent(self, hidden: Tensor, table: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """What keys and values are made of, of the whole line: [T, 1, kv_lora_rank] and [T, 1, qk_rope_head_dim]."""
        widths = (self.mla.kv_lora_rank, self.mla.qk_rope_head_dim)
        latent, turned = self.linear_kv_down_proj(hidden).split(widths, dim=-1)
        both = torch.cat((self.kv_layernorm(latent), turned), dim=-1)
        # Each tp rank's heads are made of the same vectors: their gradient is the sum over the ranks.
        if self.config.sequence_parallel:
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True)
        else:
            both = copy_to_tensor_model_parallel_region(both)
        latent, turned = both.split(widths, dim=-1)
        turned = rotate(turned, table, interleaved=self.config.rotary_interleaved)
        if segments.spans is None:
            return latent, turned
        # What context parallel ranks exchange is this and not the keys and values of all heads.
        latent, turned = gather_line(torch.cat((latent, turned), dim=-1)).split(widths, dim=-1)
        return latent, turned

    def _expanded(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, heads, D] and values [T, heads, Dv] of this rank's heads."""
        kv, _ = self.linear_kv_up_proj(latent)
        widths = (self.mla.qk_nope_head_dim, self.mla.v_head_dim)
        plain, v = kv.view(kv.size(0), self.heads, -1).split(widths, dim=-1)
        return torch.cat((plain, turned.expand(-1, self.heads, -1)), dim=-1), v
