"""Attention: heads of queries that share groups of keys and values, with or without a sliding window."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, TypeVar

from isthmus.families.blocks.block import NO_SETTING, Linear, MicroBatch, Mixer, RehearsalSizes
from isthmus.families.blocks.rotary import QueryScaling, Rotary

AttentionType = TypeVar("AttentionType", bound="Attention")
SAVED = "attention: T (queries, keys, values, rotated queries and keys, output)"
"""Name of the largest part of :meth:`Attention.saved_bytes`."""


@dataclass(frozen=True, kw_only=True)
class WindowAttention:
    """Sizes of the attention in sliding-window layers. None: the same as in layers with full attention."""

    prefix: ClassVar[str] = "window_attention"

    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    value_channels: int | None = None
    rotary_percent: float | None = None
    attention_sinks: bool | None = None
    values_are_keys: bool | None = None

    def apply(self, attention: Attention) -> Attention:
        """``attention`` with these sizes."""
        names = [entry.name for entry in fields(self) if entry.name != "rotary_percent"]
        return replace(attention, **{name: value for name in names if (value := getattr(self, name)) is not None})

    def small(self, full: Attention, sizes: RehearsalSizes) -> WindowAttention:
        """Multiples of the sizes of layers with ``full`` attention, if they have more heads."""
        heads, groups = sizes.heads, sizes.groups
        if self.num_attention_heads:
            heads *= max(1, self.num_attention_heads // full.num_attention_heads)
        if self.num_query_groups:
            groups = min(heads, groups * max(1, self.num_query_groups // full.num_query_groups))
        return replace(
            self,
            num_attention_heads=self.num_attention_heads and heads,
            num_query_groups=self.num_query_groups and groups,
            kv_channels=self.kv_channels and sizes.head_dim,
            value_channels=self.value_channels and sizes.least,
        )


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """Windows of attention, and the layers that have them."""

    prefix: ClassVar[str] = ""

    sliding_window: int | None = None
    """Number of keys a query attends to, including its own; None: all preceding keys."""
    window_kind: Literal["sliding", "chunks"] = "sliding"
    """``chunks``: samples are cut into chunks of as many tokens, and a query attends to the keys of its chunk."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers, counted from 0, to which the window does not apply."""
    window_rotary_base: float | None = None
    """Rotary base of sliding-window layers, which have no rope scaling; None: the same as in other layers."""
    window_attention: WindowAttention | None = field(default=None, metadata=NO_SETTING, repr=False)
    """Sizes of sliding-window layers, if they differ."""

    def __post_init__(self) -> None:
        if self.sliding_window is None:
            object.__setattr__(self, "full_attention_layers", ())
            object.__setattr__(self, "window_rotary_base", None)
            object.__setattr__(self, "window_kind", "sliding")

    def of(self, layer: int) -> int | None:
        """Window of a layer, counted from 0; None: full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def rotary(self, rotary: Rotary) -> Rotary:
        """Rotary embedding of sliding-window layers."""
        if self.window_rotary_base is not None:
            rotary = replace(rotary, rotary_base=self.window_rotary_base, rope_scaling=None)
        if self.window_attention is not None and self.window_attention.rotary_percent is not None:
            rotary = replace(rotary, rotary_percent=self.window_attention.rotary_percent)
        return rotary


@dataclass(frozen=True, kw_only=True)
class Attention(Mixer):
    kinds: ClassVar[tuple[str, ...]] = ("attention",)
    kind: str = field(default="attention", metadata=NO_SETTING, repr=False)

    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (``num_key_value_heads`` in Hugging Face configs)."""
    kv_channels: int
    """Width of one head's queries and keys (``head_dim`` in Hugging Face configs)."""
    value_channels: int | None = None
    """Width of one head's values; None: ``kv_channels``."""
    qkv_bias: bool = False
    proj_bias: bool = False
    """The output projection of attention has a bias."""
    qk_norm: bool = False
    qk_norm_over: Literal["head", "each_head", "projection"] = "head"
    """Over which axis queries and keys are normalized: each head, or the whole projection. The weights of ``head`` are
    the same for all heads; those of ``each_head`` are not, and it has no biases."""
    qk_norm_after_rotation: bool = False
    """Queries and keys are normalized after their rotation; otherwise before."""
    qk_rms: bool = False
    """Each head of queries and keys is divided by its root mean square, after the rotation; in rotated layers only."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to [-clip_qkv, clip_qkv]."""
    value_multiplier: float = 1.0
    value_norm: bool = False
    """The values of each head are divided by their root mean square."""
    values_are_keys: bool = False
    """There is no value projection: values are the outputs of the key projection, before their norm and rotation."""
    attention_scale: float | None = None
    """Multiplier of attention scores; None: 1/sqrt(head dim)."""
    query_scaling: QueryScaling | None = None
    attention_softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    attention_sinks: bool = False
    """Each head has a learned logit in the softmax that has no value."""
    attention_gate: bool = False
    """The output of attention is multiplied by the sigmoid of a projection as wide as the queries."""
    head_gate: bool = False
    """The output of each attention head is multiplied by the sigmoid of a number, a projection of the layer's input."""
    attention_multipliers: tuple[float, float] = (1.0, 1.0)
    """Multipliers of the input and of the output of attention."""

    rotary: Rotary | None = field(default=None, metadata=NO_SETTING, repr=False)
    """Rotary embedding of the layer; None: its queries and keys are not rotated."""
    window: int | None = field(default=None, metadata=NO_SETTING, repr=False)
    """Keys of a query, including its own; None: all preceding keys."""
    window_kind: Literal["sliding", "chunks"] = field(default="sliding", metadata=NO_SETTING, repr=False)
    key_source: int | None = field(default=None, metadata=NO_SETTING, repr=False)
    """The layer, from 0, whose keys and values this layer attends to; None: its own."""

    def __post_init__(self) -> None:
        if not self.qk_norm:
            object.__setattr__(self, "qk_norm_over", "head")

    @property
    def value_width(self) -> int:
        """Width of one head's values."""
        return self.value_channels or self.kv_channels

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are rotated, if the layer rotates them."""
        return 0 if self.rotary is None else int(self.kv_channels * self.rotary.rotary_percent)

    @property
    def input_and_output_multipliers(self) -> tuple[float, float]:
        return self.attention_multipliers

    @property
    def rule_kinds(self) -> tuple[str, ...]:
        """``full`` or ``windowed``, with ``_queries`` if it has no keys."""
        reach = "full" if self.window is None else "windowed"
        return self.kind, reach + ("" if self.key_source is None else "_queries")

    @property
    def kernel_groups(self) -> int:
        """Heads of keys in the attention kernel."""
        return self.num_query_groups

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection of queries, keys, values and gates."""
        heads, groups = self.num_attention_heads, self.num_query_groups
        value_heads = (0 if self.values_are_keys else groups) + (heads if self.attention_gate else 0)
        return (heads + groups) * self.kv_channels + value_heads * self.value_width

    def linears(self, tp: int = 1) -> list[Linear]:
        heads, hidden = self.num_attention_heads / tp, self.hidden_size
        key_width = self.kv_channels + (0 if self.values_are_keys else self.value_width)
        keys = 0.0 if self.key_source is not None else max(1.0, self.num_query_groups / tp) * key_width
        gates = heads * self.kv_channels if self.attention_gate else 0.0
        return [
            *self._gate(tp),
            Linear(heads * self.kv_channels + gates + keys, hidden, "column"),
            Linear(hidden, heads * self.value_width, "row"),
        ]

    def _gate(self, tp: int) -> list[Linear]:
        return [Linear(self.num_attention_heads / tp, self.hidden_size, "column")] if self.head_gate else []

    @property
    def selected_keys(self) -> int | None:
        """Keys of a query if an indexer, of this layer or an earlier one, selects them."""
        return None

    @property
    def selection_scores(self) -> tuple[int, int] | None:
        """Heads and width of the scores by which this layer selects keys."""
        return None

    def pairs(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """Pairs of a query and a key it attends to: L tokens of a sample have L^2 / 2."""
        pairs = sum_squared_lengths / 2
        return pairs if self.mean_keys is None else min(pairs, self.mean_keys * num_tokens)

    @property
    def mean_keys(self) -> float | None:
        """Keys of a query in a long sample, on average; None: half of the sample."""
        return None if self.window is None else self.window / (2 if self.window_kind == "chunks" else 1)

    def mixing_flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        width = self.kv_channels + self.value_width
        return 2.0 * self.num_attention_heads * width * self.pairs(num_tokens, sum_squared_lengths)

    def saved_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Divided by tp: QKV output T ((N + G) D + G V), rotated queries and keys T (N + G) D, output T N V, no scores.

        QK norm saves one float32 number per head, or two float32 copies if it is over all heads.
        """
        terms = {
            SAVED: batch.num_tokens * self._saved_channels(batch) // batch.tp * batch.bytes_per_element,
            "float32 statistics of heads": 4 * (batch.num_tokens * self._head_statistics() // batch.tp),
        }
        return terms | self._gathered(batch, self.num_query_groups if self.key_source is None else 0, self.value_width)

    def _gathered(self, batch: MicroBatch, groups: int, values: int) -> dict[str, int]:
        """Gathered keys and values, and the joined outputs of the spans, of context parallelism."""
        if batch.cp == 1 or "core_attn" in batch.recomputed:
            return {}
        gathered = groups * batch.cp
        width = gathered * self.kv_channels + (gathered + self.num_attention_heads) * values
        size = batch.num_tokens * width * batch.bytes_per_element // batch.tp
        return {"gathered keys and values, joined outputs": size}

    def _head_statistics(self) -> int:
        """Float32 numbers of a token that norms of heads save: one for each head, or copies if they are over all."""
        groups = self.num_query_groups if self.key_source is None else 0
        numbers = groups if self.value_norm else 0
        if self.qk_norm:
            heads = self.num_attention_heads + groups
            numbers += heads * (1 if self.qk_norm_over == "head" else 2 * self.kv_channels)
        return numbers

    def _saved_channels(self, batch: MicroBatch) -> int:
        """Elements that attention saves for a token."""
        groups = self.num_query_groups if self.key_source is None else 0
        query_width, key_width = self.num_attention_heads * self.kv_channels, groups * self.kv_channels
        if self.rotary is not None:
            rotated = 0 if "rope" in batch.recomputed else query_width + key_width
        else:  # queries are copied only where several share a key head
            rotated = query_width if key_width < query_width else 0
        # Norms after the rotation save their inputs, and a clamp its input.
        inputs = query_width + key_width if (self.qk_norm and self.qk_norm_after_rotation) or self.qk_rms else 0
        inputs += query_width + key_width + groups * self.value_width if self.clip_qkv is not None else 0
        # A gate saves its projection, its sigmoid and what it multiplies.
        inputs += 3 * query_width if self.attention_gate else 0
        inputs += self.num_attention_heads * (1 + self.value_width) if self.head_gate else 0
        values_and_output = (self.num_attention_heads + groups) * self.value_width
        if self.value_norm and not self.values_are_keys:  # also its input
            values_and_output += groups * self.value_width
        return query_width + key_width + inputs + rotated + values_and_output

    def state_elements(self, num_tokens: int, tp: int = 1) -> int:
        keys = 0 if self.key_source is not None else max(1, self.num_query_groups // tp)
        return self.kept_tokens(num_tokens) * keys * (self.kv_channels + self.value_width)

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens of a sample of ``num_tokens`` whose keys generation keeps."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    @property
    def longest_with_state(self) -> int | None:
        """The rotation of all keys of a longer sequence depends on its length with some kinds of scaling."""
        scaling = None if self.rotary is None else self.rotary.rope_scaling
        if scaling is None or scaling.kind not in ("longrope", "dynamic"):
            return None
        return scaling.original_max_position_embeddings

    def symbols(self) -> dict[str, int]:
        return {
            "N": self.num_attention_heads,
            "G": self.num_query_groups,
            "D": self.kv_channels,
            "Vh": self.value_width,
            "W": self.qkv_rows,
        }

    def divided_sizes(self) -> list[tuple[str, int]]:
        return [("num_attention_heads", self.num_attention_heads)]

    def tp_mismatch(self, tp: int) -> str | None:
        return super().tp_mismatch(tp) or self._groups_mismatch(tp)

    def _groups_mismatch(self, tp: int) -> str | None:
        groups = self.num_query_groups
        if groups % tp and tp % groups:
            return f"does not divide num_query_groups={groups}"
        if self.qkv_rows % tp:
            return f"does not divide the {self.qkv_rows} rows of query, key and value"
        return None

    def small(self: AttentionType, sizes: RehearsalSizes) -> AttentionType:
        return replace(
            self,
            num_attention_heads=sizes.heads,
            num_query_groups=sizes.groups,
            kv_channels=sizes.head_dim,
            value_channels=self.value_channels and sizes.least,
        )
