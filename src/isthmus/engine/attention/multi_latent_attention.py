"""Multi-head latent attention (arXiv 2405.04434) over packed samples.

Parameters and checkpoint keys are those of Megatron-Core, whose class requires TransformerEngine
(``isinstance(linear_proj, TELinear)`` fails with TELinear None). The down projections are replicated over tp.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.head_gate import build_head_gate, gated_by_head
from isthmus.engine.attention.key_selection import Indexer
from isthmus.engine.attention.rope import rotate, yarn_mscale
from isthmus.engine.attention.self_attention import CoreAttention
from isthmus.engine.attention.sparse_attention import sparse_attention
from isthmus.engine.layers.norm import RMSNorm
from isthmus.engine.layers.row_ranges import all_tokens, computed_rows
from isthmus.engine.layers.sequence_states import BatchStates
from isthmus.engine.linear.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, linear_adapters
from isthmus.engine.linear.quantized_weight import QuantizedWeight
from isthmus.engine.lora.input_dropout import with_this_batch
from isthmus.engine.parallel.context_parallel import gather_sequence
from isthmus.families.blocks.latent_attention import LatentAttention


def latent_scale(block: LatentAttention) -> float:
    """``1 / sqrt(D)``, times YaRN's ``mscale`` squared."""
    scaling = None if block.rotary is None else block.rotary.rope_scaling
    mscale = 1.0
    if scaling is not None and scaling.mscale_all_dim:
        mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return block.kv_channels**-0.5 * mscale**2


class MultiLatentAttention(MegatronModule):
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        block: LatentAttention,
        family: str,
        pg_collection: Any,
        **_unused: Any,
    ) -> None:
        super().__init__(config)
        self.mla = mla = block.latent
        self.layer_number = layer_number
        self.heads: int = block.num_attention_heads // pg_collection.tp.size()
        all_heads, hidden = block.num_attention_heads, block.hidden_size
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
        self.linear_kv_up_proj.sequence_parallel = False  # its input is already gathered
        self.scale: float = latent_scale(block)
        self.core_attention = CoreAttention(
            config,
            layer_number,
            window=block.window,
            scale=self.scale,
            softcap=block.attention_softcap,
            sinks=self.heads if block.attention_sinks else 0,
        )
        if (indexer := block.computed_indexer) is not None:
            assert mla.q_lora_rank is not None
            self.core_attention.indexer = Indexer(config, indexer, mla.q_lora_rank, family)
        self.linear_gate: ColumnParallelLinear | None = build_head_gate(config, block, pg_collection.tp)
        self.linear_proj = RowParallelLinear(all_heads * mla.v_head_dim, hidden, input_is_parallel=True, **parallel)

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None, packed_seq_params: PackedBatch, **_unused: Any
    ) -> tuple[Tensor, None]:
        """Shapes are those of ``PackedSelfAttention``, without bias; ``rotary_pos_emb`` is [T, qk_rope_head_dim], or
        None without positions.
        """
        compressed = self._compressed(hidden_states)
        q = self._queries(compressed, rotary_pos_emb)
        latent, rope = self._latent(hidden_states, rotary_pos_emb, packed_seq_params)
        selected = None
        if (indexer := self.core_attention.indexer) is not None:
            selected = indexer(hidden_states, compressed, rotary_pos_emb, packed_seq_params)

        def attend(q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
            k, v = self._expanded(latent, rope)
            if selected is None:
                return self.core_attention.attend(q, k, v, packed_seq_params)
            lengths, shared = packed_seq_params.lengths, packed_seq_params.shared
            q, k, v = (all_tokens(x, shared) for x in (q, k, v))
            return computed_rows(sparse_attention(q, k, v, lengths, selected, self.scale), shared)

        if packed_seq_params.states is not None:
            attended = self._attend_with_states(q, latent, rope, packed_seq_params, packed_seq_params.states)
        elif self.core_attention.recomputed and self.training:
            # Recomputes keys and values too: they are many times wider than their latent vectors.
            attended = tensor_parallel.checkpoint(with_this_batch(attend), False, q, latent, rope)
        else:
            attended = attend(q, latent, rope)
        if self.linear_gate is not None:
            attended = gated_by_head(attended, self.linear_gate, hidden_states)
        out, _ = self.linear_proj(attended[:, None])
        return out, None

    def _attend_with_states(
        self, q: Tensor, latent: Tensor, rope: Tensor, batch: PackedBatch, states: BatchStates
    ) -> Tensor:
        """Attention in generation, [T, heads * Dv]: keeps latent vectors with the rotated key channels.

        In a step the up projection multiplies queries and outputs, which is less than all keys and values.
        """
        cache = self.core_attention.cache(states, value_channels=self.mla.kv_lora_rank)
        keys = torch.cat((latent, rope), dim=-1)
        if states.is_prefill:
            cache.fill(keys, None, batch.lengths)
            return self.core_attention.attend(q, *self._expanded(latent, rope), batch)
        cache.append(keys, None, batch.position_ids)
        widths = (self.mla.qk_nope_head_dim, self.mla.v_head_dim)
        up_k, up_v = self._up_projection(states).view(self.heads, sum(widths), -1).split(widths, dim=1)
        nope, rotated = q[:, :, 0].split((widths[0], rope.size(-1)), dim=-1)
        latent_q = torch.cat((torch.einsum("thd,hdr->thr", nope, up_k), rotated), dim=-1)[:, None]
        attended = self.core_attention.attend_to(cache, latent_q, keys, None, batch.position_ids)
        return torch.einsum("thr,hdr->thd", attended.unflatten(-1, (self.heads, -1)), up_v).flatten(1)

    def _up_projection(self, states: BatchStates) -> Tensor:
        """The weight of the up projection with its adapters, [heads * (D + Dv), kv_lora_rank]."""
        linear = self.linear_kv_up_proj
        if linear_adapters(linear) is None and not isinstance(linear.weight, QuantizedWeight):
            weight: Tensor = linear.weight
            return weight

        def compute() -> Tensor:
            identity = torch.eye(self.mla.kv_lora_rank, dtype=self.config.params_dtype, device=self.config.device)
            columns, _ = linear(identity[:, None])
            return columns[:, 0].t()

        return states.states.weight(self.layer_number, compute)

    def _compressed(self, hidden: Tensor) -> Tensor:
        """The low-rank queries of this rank's tokens, [T, 1, q_lora_rank]; without them the hidden states."""
        return hidden if self.mla.q_lora_rank is None else self.q_layernorm(self.linear_q_down_proj(hidden))

    def _queries(self, compressed: Tensor, table: Tensor | None) -> Tensor:
        """Queries of this rank's heads, [T, heads, 1, D]."""
        mla = self.mla
        q, _ = (self.linear_q_proj if mla.q_lora_rank is None else self.linear_q_up_proj)(compressed)
        widths = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        nope, rope = q.view(q.size(0), self.heads, -1).split(widths, dim=-1)
        if table is not None:
            rope = rotate(rope, table, interleaved=self.config.rotary_interleaved)
        return torch.cat((nope, rope), dim=-1)[:, :, None]

    def _latent(self, hidden: Tensor, table: Tensor | None, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Latent vectors [T, 1, kv_lora_rank] and rotated key channels [T, 1, qk_rope_head_dim] of all tokens."""
        widths = (self.mla.kv_lora_rank, self.mla.qk_rope_head_dim)
        latent, rope = self.linear_kv_down_proj(hidden).split(widths, dim=-1)
        both = torch.cat((self.kv_layernorm(latent), rope), dim=-1)
        # The heads of all tp ranks use the same vectors, so their gradient is the sum over the ranks.
        if self.config.sequence_parallel:
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True)
        else:
            both = copy_to_tensor_model_parallel_region(both)
        latent, rope = both.split(widths, dim=-1)
        if table is not None:
            rope = rotate(rope, table, interleaved=self.config.rotary_interleaved)
        if batch.spans is None:
            return latent, rope
        # Context parallel ranks exchange these and not the keys and values of all heads.
        latent, rope = gather_sequence(torch.cat((latent, rope), dim=-1)).split(widths, dim=-1)
        return latent, rope

    def _expanded(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, heads, D] and values [T, heads, Dv] of this rank's heads."""
        kv, _ = self.linear_kv_up_proj(latent)
        widths = (self.mla.qk_nope_head_dim, self.mla.v_head_dim)
        nope, v = kv.view(kv.size(0), self.heads, -1).split(widths, dim=-1)
        return torch.cat((nope, rope.expand(-1, self.heads, -1)), dim=-1), v
