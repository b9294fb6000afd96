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
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from isthmus.engine.attention import Segments, VarlenAttention
from isthmus.engine.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from isthmus.engine.norm import RMSNorm
from isthmus.engine.rope import rotate, yarn_mscale
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
        self.linear_kv_up_proj = ColumnParallelLinear(mla.kv_lora_rank, width_kv, **columns)
        self.core_attention = VarlenAttention(
            config, layer_number, softmax_scale=latent_scale(architecture), pg_collection=pg_collection
        )
        self.linear_proj = RowParallelLinear(all_heads * mla.v_head_dim, hidden, input_is_parallel=True, **parallel)

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Segments, **_unused: Any
    ) -> tuple[Tensor, None]:
        """Attend and project.

        Args:
            hidden_states: [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
            rotary_pos_emb: [T, qk_rope_head_dim] from :func:`isthmus.engine.rope.line_tables`.
            packed_seq_params: the samples of the line.

        Returns:
            The output [T, 1, H] (or [T / tp, 1, H]), and None for a bias.
        """
        q, k, v = self._project(hidden_states, rotary_pos_emb)
        attended = self.core_attention(q, k, v, packed_seq_params)
        out, _ = self.linear_proj(attended[:, None])
        return out, None

    def _project(self, hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, 1, D], keys [T, heads, D] and values [T, heads, Dv] of this rank's heads."""
        mla, interleaved = self.mla, self.config.rotary_interleaved
        if mla.q_lora_rank is None:
            q, _ = self.linear_q_proj(hidden)
        else:
            q, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        latent, k_turned = self.linear_kv_down_proj(hidden).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        # Each rank's heads see the same rotated keys: their gradient is the sum over the ranks.
        if self.config.sequence_parallel:
            k_turned = gather_from_sequence_parallel_region(k_turned, tensor_parallel_output_grad=True)
        else:
            k_turned = copy_to_tensor_model_parallel_region(k_turned)
        tokens = q.size(0)
        q_plain, q_turned = q.view(tokens, self.heads, -1).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        k_plain, v = kv.view(tokens, self.heads, -1).split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        q_turned, k_turned = (rotate(each, table, interleaved=interleaved) for each in (q_turned, k_turned))
        q = torch.cat((q_plain, q_turned), dim=-1)
        k = torch.cat((k_plain, k_turned.expand(-1, self.heads, -1)), dim=-1)
        return q[:, :, None], k, v
