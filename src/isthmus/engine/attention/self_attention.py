"""Causal self-attention over packed samples ("thd"), without padding and without a [T, T] mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.backends.registry import BACKENDS
from isthmus.engine.attention.cached_attention import KeyValueCache
from isthmus.engine.attention.head_gate import build_head_gate, gated_by_head
from isthmus.engine.attention.projected_heads import HeadSettings, joined_norm, project_heads, step_heads
from isthmus.engine.attention.rope import rotate, rotate_all_channels, rotation_factors
from isthmus.engine.compiled import compiles
from isthmus.engine.layers.dropout import AttentionDropout
from isthmus.engine.layers.norm import EachHeadNorm, ProjectionNorm, RMSNorm
from isthmus.engine.layers.recompute import recompute, recompute_if
from isthmus.engine.layers.row_ranges import all_tokens, computed_rows
from isthmus.engine.layers.sequence_states import BatchStates
from isthmus.engine.linear.linear import ColumnParallelLinear, RowParallelLinear
from isthmus.engine.parallel.context_parallel import gather_sequence
from isthmus.families.blocks.attention import Attention
from isthmus.families.blocks.rotary import QueryScaling


class CoreAttention(nn.Module):
    """Softmax attention within each sample; grouped query heads share key/value heads without copies."""

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        *,
        window: int | None = None,
        chunk: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: int = 0,
    ) -> None:
        """Queries attend to a ``window`` of preceding keys, or within chunks of ``chunk`` tokens of their sample.

        ``sinks`` is the number of this rank's query heads if they have attention sinks.
        """
        super().__init__()
        self.chunk = chunk
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.softmax_offset: nn.Parameter | None = None
        if sinks:
            self.softmax_offset = nn.Parameter(torch.zeros(sinks, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.indexer: Any = None
        """Set by latent attention with selected keys; here as in Megatron-Core's names."""
        self.layer_number = layer_number
        self.key_layer: int | None = None
        """Number, from 1, of the layer whose keys and values this one attends to; None: its own."""
        self.backend = BACKENDS[config.attention]
        self.dropout_rate: float = config.attention_dropout
        self.recomputed: bool = "core_attn" in config.recomputed

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
        """q [T, G, R, D] (T / cp under context parallelism), k [T, G, D], v [T, G, Dv] -> [T, G * R * Dv].

        Keys and values are those of the whole packed sequence, or of this rank's tokens under context parallelism.
        """
        if batch.states is not None:
            return self._attend_with_states(q, k, v, batch)
        if self.recomputed and self.training:
            attended = tensor_parallel.checkpoint(lambda q, k, v: self.attend(q, k, v, batch), False, q, k, v)
            return attended
        return self.attend(q, k, v, batch)

    def _attend_with_states(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
        """:meth:`forward` in generation: keeps keys and values, and attends to those of earlier tokens."""
        cache = self.cache(batch.states)
        if batch.states.is_prefill:
            if self.key_layer is None:
                cache.fill(k, v, batch.lengths)
            return self.attend(q, k, v, batch)
        if self.key_layer is None:
            cache.append(k, v, batch.position_ids)
        return self.attend_to(cache, q, k, v, batch.position_ids)

    def cache(self, states: BatchStates, value_channels: int | None = None) -> KeyValueCache:
        return KeyValueCache(states, self.key_layer or self.layer_number, self.window, self.chunk, value_channels)

    def attend_to(self, cache: KeyValueCache, q: Tensor, k: Tensor, v: Tensor | None, positions: Tensor) -> Tensor:
        """:meth:`KeyValueCache.attend` as in this layer."""
        return cache.attend(q, k, v, positions, scale=self.scale, softcap=self.softcap, sinks=self.softmax_offset)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
        """:meth:`forward` without recomputation."""
        q, k, v = (all_tokens(x, batch.shared) for x in (q, k, v))
        if batch.spans is not None and k.size(0) == q.size(0):
            # Gather inside the recomputed region, so that only this rank's keys and values are saved.
            k, v = gather_sequence(torch.cat((k, v), dim=-1)).split((k.size(-1), v.size(-1)), dim=-1)
        options = {"scale": self.scale, "softcap": self.softcap, "sinks": self.softmax_offset, "spans": batch.spans}
        kwargs: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if self.dropout_rate and self.training:
            heads = q.size(1) * q.size(2)
            first_head = parallel_state.get_tensor_model_parallel_rank() * heads
            kwargs["dropout"] = AttentionDropout(self.dropout_rate, self.layer_number, first_head, batch)
        lengths = batch.lengths if self.chunk is None else _cut(batch.lengths, self.chunk)
        return computed_rows(self.backend.attend(q, k, v, lengths, self.window, **kwargs).flatten(1), batch.shared)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The attention sinks, sharded by heads, and the weights of the indexer, which every tp rank has."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        axes = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets)


@functools.lru_cache(maxsize=8)
def _cut(lengths: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """The lengths of the chunks of samples."""
    return tuple(min(chunk, length - start) for length in lengths for start in range(0, length, chunk))


class PackedSelfAttention(MegatronModule):
    """Self-attention over packed samples, with Megatron-Core's parameter names.

    Its own class has neither values of another width than keys, nor layers of different sizes.
    """

    linear_qkv: Any
    linear_q_proj: Any

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        block: Attention,
        pg_collection: Any,
        norm: ModuleSpec | type,
        rotary_columns: slice | None,
        lends_keys: bool,
        **_unused: Any,
    ) -> None:
        """``norm`` is that of single heads, ``lends_keys``: other layers attend to the keys of this one.

        ``rotary_columns`` are those of the rotation table for the layer; None: all.
        """
        super().__init__(config)
        attention, epsilon = block, config.layernorm_epsilon
        tp, groups, all_heads = pg_collection.tp, attention.num_query_groups, attention.num_attention_heads
        self.rotated: bool = attention.rotary is not None
        self.channels = rotary_columns
        self.ranks_per_group: int = max(1, tp.size() // groups)
        self.part_of_group: tuple[int, int] = divmod(tp.rank(), self.ranks_per_group)
        """With several ranks for each group: this rank's group, and its part of the group's queries."""
        self.groups: int = max(1, groups // tp.size())
        gates = (attention.value_width * all_heads // groups,) if attention.attention_gate else ()
        values = () if attention.values_are_keys else (attention.value_width,)
        self.widths: tuple[int, ...] = (
            attention.kv_channels * all_heads // groups,
            *gates,
            attention.kv_channels,
            *values,
        )
        """Columns of a group's queries, its gates, its keys and its values."""
        self.values_are_keys: bool = attention.values_are_keys
        self.value_multiplier: float = attention.value_multiplier
        self.value_norm: RMSNorm | None = (
            RMSNorm(config, attention.value_width, epsilon, weight=False) if attention.value_norm else None
        )
        self.clip: float | None = attention.clip_qkv
        self.norms_rotated: bool = attention.qk_norm_after_rotation
        self.rms_epsilon: float | None = epsilon if attention.qk_rms and self.rotated else None
        scaling = attention.query_scaling
        self.query_scaling: QueryScaling | None = (
            None if scaling is None or (scaling.unrotated_only and self.rotated) else scaling
        )
        window, cuts = attention.window, attention.window_kind == "chunks"
        self.core_attention = CoreAttention(
            config,
            layer_number,
            window=None if cuts else window,
            chunk=window if cuts else None,
            scale=attention.attention_scale,
            softcap=attention.attention_softcap,
            sinks=all_heads // tp.size() if attention.attention_sinks else 0,
        )
        if attention.key_source is not None:
            self.core_attention.key_layer = attention.key_source + 1
        parallel: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "is_expert": False,
            "tp_group": tp,
        }
        self.linear_proj = RowParallelLinear(
            all_heads * attention.value_width,
            config.hidden_size,
            bias=attention.proj_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            **parallel,
        )
        self.shares_keys: bool = attention.key_source is not None
        self.lends_keys = lends_keys
        self.keys_to_share: tuple[Tensor, Tensor] | None = None
        """Keys and values of the last forward pass, for layers that share them, until :meth:`take_keys`."""
        name, widths = ("linear_q_proj", self.widths[:1]) if self.shares_keys else ("linear_qkv", self.widths)
        projection = ColumnParallelLinear(
            config.hidden_size,
            groups * sum(widths),
            bias=attention.qkv_bias,
            gather_output=False,
            skip_bias_add=False,
            **parallel,
        )
        self.add_module(name, projection)
        self.linear_gate: ColumnParallelLinear | None = build_head_gate(config, attention, tp)
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if attention.qk_norm:
            self.q_layernorm = _qk_norm(config, attention, norm, all_heads, tp)
            self.k_layernorm = None if self.shares_keys else _qk_norm(config, attention, norm, groups, tp)
        self.head_settings = HeadSettings(
            self.groups,
            self.widths,
            interleaved=config.rotary_interleaved,
            eps=epsilon,
            zero_centered=config.layernorm_zero_centered_gamma,
        )
        self.one_region: bool = (
            not (self.shares_keys or self.values_are_keys or self.norms_rotated)
            and self.ranks_per_group == 1
            and self.clip is self.rms_epsilon is self.query_scaling is None
            and (self.q_layernorm is None or type(self.q_layernorm) is RMSNorm)
        )
        """Whether :func:`project_heads` computes the heads, where regions are compiled."""
        self.one_step: bool = (
            self.one_region
            and self.config.device.type == "cpu"
            and len(self.widths) == 3
            and attention.value_width == attention.kv_channels
        )
        """Whether :func:`step_heads` computes those of a step of generation."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: PackedBatch,
        shared_keys: Sequence[Tensor] = (),
        **_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and project; returns the output and the bias that the caller adds, or None.

        ``hidden_states`` is [T, 1, H] of this rank's tokens, or [T / tp, 1, H] under sequence parallelism.
        ``rotary_pos_emb`` is that of :func:`~isthmus.engine.attention.rope.rotary_tables`; None for learned positions.
        ``shared_keys`` are the keys and values of another layer, of :meth:`take_keys`, if this one shares them.
        """
        if self.shares_keys:
            return self._attend_to(hidden_states, shared_keys, rotary_pos_emb, packed_seq_params)
        table = self._table(rotary_pos_emb)
        heads, compute_heads, (v, *gate) = self._heads(hidden_states, table, packed_seq_params)
        with recompute_if("rope" in self.config.recomputed and table is not None, heads, compute_heads):
            attended = self.core_attention(*heads, v, packed_seq_params)
        if self.lends_keys:
            self.keys_to_share = heads[1], v
        if gate:
            attended = recompute(lambda x, gate: x * gate.sigmoid(), attended, gate[0].flatten(1))
        if self.linear_gate is not None:
            attended = gated_by_head(attended, self.linear_gate, hidden_states)
        return self.linear_proj(attended[:, None])

    def _attend_to(
        self, hidden_states: Tensor, keys: Sequence[Tensor], rotary_pos_emb: Tensor | None, batch: PackedBatch
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward` with the keys [T, G, D] and values [T, G, Dv] of another layer."""
        k, v = keys
        projected, _ = self.linear_q_proj(hidden_states)
        queries = projected.view(projected.size(0), k.size(1), -1, k.size(2))
        table = self._table(rotary_pos_emb)

        def normed_and_rotated() -> list[Tensor]:
            q = queries if self.q_layernorm is None else self.q_layernorm(queries)
            return [q if table is None else rotate(q, table, interleaved=self.config.rotary_interleaved)]

        heads = normed_and_rotated()
        with recompute_if("rope" in self.config.recomputed and table is not None, heads, normed_and_rotated):
            attended = self.core_attention(*heads, k, v, batch)
        return self.linear_proj(attended[:, None])

    def take_keys(self) -> tuple[Tensor, ...]:
        """Keys [T, G, D] and values [T, G, Dv] of the last forward pass, of this rank's tokens and heads, once.

        Empty if no other layer attends to them.
        """
        if self.keys_to_share is None:
            return ()
        shared, self.keys_to_share = self.keys_to_share, None
        return shared

    def _table(self, rotary_pos_emb: Tensor | None) -> Tensor | None:
        if not self.rotated or rotary_pos_emb is None:
            return None
        return rotary_pos_emb if self.channels is None else rotary_pos_emb[:, self.channels]

    def _heads(
        self, hidden_states: Tensor, table: Tensor | None, batch: PackedBatch
    ) -> tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]], Sequence[Tensor]]:
        """Queries [T, G, R, D] and keys [T, G, D] of the attention; what computes them again; values, any gates."""
        mixed = self._mixed(hidden_states)
        if self.one_region and table is not None and compiles(mixed):
            arguments = (mixed, table, _weight(self.q_layernorm), _weight(self.k_layernorm), self.head_settings)
            q, k, *gate, v = project_heads(*arguments)
            gate = [x.unflatten(-1, (-1, v.size(-1))) for x in gate]
            return (q, k), lambda: project_heads(*arguments)[:2], (self._values(v), *gate)
        if self.one_step and table is not None and batch.states is not None and not batch.states.is_prefill:
            q, k, v = self._step_heads(mixed, table, batch.states)
            return (q, k), lambda: (q, k), (self._values(v),)
        q, k, v, *gate = self._split(mixed)
        if self.clip is not None:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        factors = None if self.query_scaling is None else query_factors(self.query_scaling, batch)

        def compute() -> list[Tensor]:
            return self._normed_and_rotated(q, k, table, factors)

        return compute(), compute, (v, *gate)

    def _step_heads(self, mixed: Tensor, table: Tensor, states: BatchStates) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the attention in a step of generation, see :func:`step_heads`."""
        weight: Tensor | None = None
        q_weight, k_weight = _weight(self.q_layernorm), _weight(self.k_layernorm)
        if q_weight is not None and k_weight is not None:
            compute = functools.partial(joined_norm, q_weight, k_weight, self.head_settings)
            weight = states.states.weight(self.core_attention.layer_number, compute)
        if table.size(-1) < self.widths[-1] or self.config.rotary_interleaved:
            return step_heads(
                mixed,
                weight,
                lambda x: rotate(x, table, interleaved=self.config.rotary_interleaved),
                self.head_settings,
            )
        columns = self.channels or slice(None)
        factors = states.shared(("rotation", columns.start, columns.stop), lambda: rotation_factors(table))
        return step_heads(mixed, weight, lambda x: rotate_all_channels(x, factors), self.head_settings)

    def _mixed(self, hidden_states: Tensor) -> Tensor:
        """The output of the QKV projection, of this rank's groups."""
        mixed, _ = self.linear_qkv(hidden_states)
        if self.ranks_per_group > 1:
            group, width = self.part_of_group[0], sum(self.widths)
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed)[..., group * width : (group + 1) * width]
        return mixed

    def _values(self, v: Tensor) -> Tensor:
        v = v if self.value_norm is None else self.value_norm(v)
        return v if self.value_multiplier == 1 else v * self.value_multiplier

    def _split(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Queries [T, G, R, D] and keys [T, G, D] before their norms, values [T, G, Dv]; any gates [T, G, R, Dv]."""
        parts = mixed.view(mixed.size(0), self.groups, -1).split(self.widths, dim=-1)
        q, *gate, k, v = (*parts, parts[-1]) if self.values_are_keys else parts
        query_heads = [q.unflatten(-1, (-1, k.size(-1))), *(x.unflatten(-1, (-1, v.size(-1))) for x in gate)]
        if self.ranks_per_group > 1:
            query_heads = [x.chunk(self.ranks_per_group, dim=2)[self.part_of_group[1]] for x in query_heads]
        q, *gate = query_heads
        return q, k, self._values(v), *gate

    def _normed_and_rotated(self, q: Tensor, k: Tensor, table: Tensor | None, factors: Tensor | None) -> list[Tensor]:
        """Queries [T, G, R, D] and keys [T, G, D] of the attention."""
        if not self.norms_rotated:
            q, k = self._normed(q, k)
        if table is not None:
            q, k = (rotate(x, table, interleaved=self.config.rotary_interleaved) for x in (q, k))
        if self.norms_rotated:
            q, k = self._normed(q, k)
        if self.rms_epsilon is not None:
            q, k = (rms_norm(x.float(), x.shape[-1:], eps=self.rms_epsilon).type_as(x) for x in (q, k))
        return [q if factors is None else q * factors.to(q.dtype), k]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_layernorm is None or self.k_layernorm is None:
            return q, k
        return self.q_layernorm(q), self.k_layernorm(k)


def _weight(norm: nn.Module | None) -> Tensor | None:
    return None if norm is None else cast(Tensor, norm.weight)


def query_factors(scaling: QueryScaling, batch: PackedBatch) -> Tensor | None:
    """The factor of each query, float32 [T, 1, 1, 1]; None if all are 1, which the host knows."""
    if batch.states is None and sum(batch.lengths) + scaling.first <= scaling.period:
        return None
    periods = (batch.position_ids + scaling.first) // scaling.period
    return (1 + scaling.rate * torch.log1p(periods.float()))[:, None, None, None]


def _qk_norm(config: TransformerConfig, block: Attention, norm: ModuleSpec | type, heads: int, tp: Any) -> nn.Module:
    """The norm of queries or of keys; ``heads`` are those of all ranks."""
    width, eps = block.kv_channels, config.layernorm_epsilon
    if block.qk_norm_over != "head":
        kind = ProjectionNorm if block.qk_norm_over == "projection" else EachHeadNorm
        return kind(config, heads, width, eps, rank=tp.rank(), ranks=tp.size())
    built: nn.Module = build_module(norm, config=config, hidden_size=width, eps=eps)
    return built
