"""Description of a decoder-only model in Megatron-Core's terms, independent of Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from isthmus.errors import DataError
from isthmus.families.mixer_sizes import (
    DeltaNet,
    KeyIndexer,
    Mamba,
    Mamba2,
    Mla,
    QueryScaling,
    ShortConvolution,
    WindowAttention,
)

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_swiglu"]
Mixer = Literal["attention", "gated_delta_net", "kimi_delta_attention", "mamba2", "mamba", "short_convolution"]
"""What mixes the tokens of a sample in a layer. The Architecture has the sizes of each kind."""
Form = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]
"""Placement of the norms in a layer; ``f`` is attention or the feed-forward block:

``pre``: x + f(norm(x)); ``post``: x + norm(f(x)); ``sandwich``: x + norm(f(norm(x)));
``parallel``: x + attention(norm(x)) + mlp(norm(x)) with one norm, ``parallel_two_norms`` with one for each.
"""

MAX_INT = 2**31 - 1
"""Largest integer of a config."""
MAX_LAYERS, MAX_HEADS, MAX_EXPERTS = 4096, 1 << 16, 1 << 17
"""Largest sizes of a model; experts in all its layers."""


def check_sizes(*, layers: int, heads: int = 1, experts: int = 0) -> None:
    """Refuse a model with more layers, heads, or experts in all layers, than can be enumerated in seconds."""
    sizes = (
        ("layers", layers, MAX_LAYERS),
        ("attention heads", heads, MAX_HEADS),
        ("experts in all layers", layers * experts, MAX_EXPERTS),
    )
    for name, size, most in sizes:
        if size > most:
            raise DataError(f"the config has {size:,} {name}; at most {most:,} are supported. Correct it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than the original training length.

    ``llama3`` divides the frequencies whose wavelength exceeds ``original_max_position_embeddings /
    low_freq_factor`` by ``factor``, keeps those below ``... / high_freq_factor`` and interpolates in between;
    ``linear`` divides all of them; ``yarn`` (arXiv 2309.00071) interpolates between the dimensions that rotate
    ``beta_fast`` and ``beta_slow`` times within the original length, and scales cosines and sines; ``longrope`` (arXiv
    2402.13753) divides each by its own factor, with one list up to the original length and another beyond it;
    ``ntk_alpha`` multiplies the base by ``factor ** (R / (R - 2))`` for R rotated channels; ``dynamic`` does so for a
    sample of L tokens beyond the original length C, with ``factor * L / C - (factor - 1)`` in place of ``factor``;
    ``proportional`` divides the frequencies by ``factor`` and rotates only the first ``partial_rotary_factor`` of the
    pairs of a head, whose frequencies are those of a head with all pairs rotated.
    """

    kind: Literal["llama3", "linear", "yarn", "longrope", "ntk_alpha", "dynamic", "proportional"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YaRN: whether the bounds of the interpolation are rounded to whole dimensions."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """Multiplier of cosines and sines; None: derived from the factor."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Mixture-of-experts blocks and their router."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Width of one expert."""
    latent_size: int | None = None
    """Width of the inputs and outputs of routed experts, between two projections; None: the hidden size."""
    shared_ffn_hidden_size: int = 0
    """Total width of the shared experts; 0: none."""
    shared_mean: bool = False
    """With shared experts, the output is half the sum of routed and shared experts."""
    shared_gate: bool = False
    """Multiplies the output of the shared experts by a sigmoid gate."""
    dense_layers: tuple[int, ...] = ()
    """Layers, counted from 0, with a dense feed-forward block."""
    score: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"] = "softmax"
    """Score function; ``softmax_of_chosen`` is applied after top-k selection, to the selected logits only.
    ``sparsemixer`` (arXiv 2409.12136) selects one expert after another, each with its probability among those left
    whose logits are within ``score_tolerance`` of the best, relative to the larger one; for inference only."""
    score_tolerance: float = 0.0
    normalize: bool = False
    """The weights of the selected experts are divided by their sum."""
    normalize_min: float = 1e-20
    """Lower bound of the divisor."""
    normalize_offset: float = 0.0
    """Added to the divisor."""
    scaling_factor: float = 1.0
    """Multiplier of the final weights."""
    expert_bias: bool = False
    """A float32 bias that affects the selection of experts but not their weights (arXiv 2408.15664)."""
    num_groups: int = 1
    group_top_k: int = 1
    """Experts are selected from the best ``group_top_k`` of ``num_groups`` groups."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert, or the sum of its two best."""
    router_bias: bool = False
    router_float32: bool = False
    """The router's weights are always float32."""
    router_norm: bool = False
    """The router's input is divided by its root mean square and multiplied by learned gains, and the logits are divided
    by the root of its width."""
    expert_gains: bool = False
    """The final weight of each expert is multiplied by a learned number."""
    branch_norms: bool = False
    """Routed and shared experts have norms of their own, before and after them; the router has the input before these.
    """
    swiglu_limits: tuple[float | None, ...] = ()
    """Limits of routed experts, as :attr:`Architecture.swiglu_limits`."""
    weighs_inputs: bool = False
    """The weight of an expert multiplies its input and not its output."""
    expert_mlp_bias: bool = False
    output_bias: bool = False
    """A bias that is added to the weighted sum of the experts' outputs."""

    def __post_init__(self) -> None:
        if not any(self.swiglu_limits):
            object.__setattr__(self, "swiglu_limits", ())

    def invalid_reason(self) -> str | None:
        if self.branch_norms and not self.shared_ffn_hidden_size:
            return "experts with norms of their own need shared experts beside them"
        if self.weighs_inputs and self.expert_mlp_bias:
            return "experts with weighted inputs cannot have biases"
        if self.num_experts % self.num_groups:
            return f"{self.num_groups} groups do not divide {self.num_experts} experts"
        in_group = self.num_experts // self.num_groups
        if self.group_top_k > self.num_groups:
            return f"group_top_k={self.group_top_k} is more than the {self.num_groups} groups"
        if self.num_groups > 1 and self.group_score == "top2" and in_group < 2:
            return f"groups of {in_group} experts have no two best experts"
        if self.top_k > self.group_top_k * in_group:
            return f"top_k={self.top_k} is more than the {self.group_top_k * in_group} experts to select from"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """Dropout rates in training, in [0, 1)."""

    attention: float = 0.0
    """Rate of attention probabilities."""
    hidden: float = 0.0
    """Rate of the outputs of attention and of the feed-forward block, before they are added to the residual stream."""
    embedding: float = 0.0
    """Rate of the sum of token and position embeddings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Everything that determines the tensors and the computation of a decoder-only model."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (``num_key_value_heads`` in Hugging Face configs)."""
    kv_channels: int
    """Width of one head's queries and keys (``head_dim`` in Hugging Face configs)."""
    vocab_size: int
    """Rows of the embedding, without tensor-parallel padding."""
    max_position_embeddings: int
    norm_epsilon: float

    # Layer pattern.
    mixers: tuple[tuple[Mixer, ...], ...] = ()
    """Mixers of each layer: one, none, or several whose outputs are added. Empty: attention in every layer."""
    layers_without_mlp: tuple[int, ...] = ()
    """Layers, counted from 0, without a feed-forward block."""

    # Positions.
    position: Literal["rope", "learned", "none"] = "rope"
    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_percent: float = 1.0
    """Fraction of a head's channels that are rotated: the first ones."""
    rotary_interleaved: bool = False
    """Rotary pairs are adjacent channels; otherwise one channel of each half."""
    rotary_reversed: bool = False
    """Rotations are by the opposite angles."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers, counted from 0, without rotary embedding."""
    position_offset: int = 0
    """Rows of the table of learned positions before that of position 0."""

    # Norms.
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_weight: bool = True
    """Norms have weights; without them they have no biases either."""
    norm_bias: bool = True
    norm_zero_centered: bool = False
    """Norms multiply by one plus their weight."""
    form: Form = "pre"
    form_without_attention: Form | None = None
    """Form of layers whose mixers do not include attention; None: ``form``."""
    embedding_norm: bool = False
    """A norm of the embeddings, before the first layer."""

    # Attention.
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
    sliding_window: int | None = None
    """Number of keys a query attends to, including its own; None: all preceding keys."""
    window_kind: Literal["sliding", "chunks"] = "sliding"
    """``chunks``: samples are cut into chunks of as many tokens, and a query attends to the keys of its chunk."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers, counted from 0, to which the window does not apply."""
    window_rotary_base: float | None = None
    """Rotary base of sliding-window layers, which have no rope scaling; None: the same as in other layers."""
    window_attention: WindowAttention | None = None
    """Sizes of sliding-window layers, if they differ."""
    value_channels: int | None = None
    """Width of one head's values; None: ``kv_channels``."""
    value_multiplier: float = 1.0
    value_norm: bool = False
    """The values of each head are divided by their root mean square."""
    values_are_keys: bool = False
    """There is no value projection: values are the outputs of the key projection, before their norm and rotation."""
    key_sharing_layers: int = 0
    """The last layers, which have queries only: keys and values are those of the last layer before them with the same
    reach, a window or none."""
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
    mla: Mla | None = None
    delta_net: DeltaNet | None = None
    """Sizes of layers with the mixer ``gated_delta_net`` or ``kimi_delta_attention``."""
    indexer: KeyIndexer | None = None
    """Indexer of latent attention with low-rank queries."""
    mamba2: Mamba2 | None = None
    mamba: Mamba | None = None
    short_convolution: ShortConvolution | None = None

    # Feed-forward block.
    activation: Activation = "silu"
    gated: bool = True
    mlp_bias: bool = False
    sharing_layers_wide: bool = False
    """The feed-forward blocks of layers that share keys are twice as wide."""
    swiglu_limits: tuple[float | None, ...] = ()
    """Limit of each layer: ``silu(gate)`` is clamped to at most this, and the other factor to plus or minus this, in
    dense feed-forward blocks and shared experts. Empty: no limits."""
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """Multipliers of the gate before its activation, SiLU, and of the output."""
    moe: Moe | None = None
    mtp_layers: int = 0
    """Multi-token prediction layers (arXiv 2412.19437)."""
    mtp_hidden_first: bool = False
    """In the inputs of MTP layers, the hidden state comes before the embedding of the next token."""

    # Ends.
    tie_embeddings: bool = False
    score_head: bool = False
    """A reward model: one score, a product of the hidden state and the only row of ``output_layer.weight``, in place of
    logits. Multiplier and soft cap of logits do not apply."""
    embedding_multiplier: float = 1.0
    output_bias: bool = False
    """The output layer has a bias, which a reward model does not have."""
    layer_input_size: int = 0
    """Width of a token's vector for each layer, from a table and a projection of its embedding, which the layer gates
    and adds to its output (Gemma 3n); 0: none."""
    layer_scalars: bool = False
    """The output of each layer, with its residual, is multiplied by a number of the layer that is not trained."""
    residual_multiplier: float = 1.0
    """Multiplier of the outputs of attention and feed-forward block."""
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Refuse senseless sizes, and reset fields without effect, so that equal models compare equal."""
        if not self.qk_norm:
            object.__setattr__(self, "qk_norm_over", "head")
        if not self.mtp_layers:
            object.__setattr__(self, "mtp_hidden_first", False)
        if all(mixers == ("attention",) for mixers in self.mixers):
            object.__setattr__(self, "mixers", ())
        if not any(self.swiglu_limits):
            object.__setattr__(self, "swiglu_limits", ())
        experts = 0 if self.moe is None else self.moe.num_experts
        check_sizes(layers=self.num_layers + self.mtp_layers, heads=self.num_attention_heads, experts=experts)
        if self.sliding_window is None:
            object.__setattr__(self, "full_attention_layers", ())
            object.__setattr__(self, "window_rotary_base", None)
            object.__setattr__(self, "window_kind", "sliding")

    def swiglu_limit(self, layer: int, *, routed: bool) -> float | None:
        """Limit of the layer, from 0, of its routed experts or its other feed-forward blocks; None in MTP layers."""
        limits = self.moe.swiglu_limits if routed and self.moe is not None else self.swiglu_limits
        return limits[layer] if layer < len(limits) else None

    def is_moe(self, layer: int) -> bool:
        """Whether the layer, counted from 0, has experts. MTP layers follow the last layer and do."""
        return self.moe is not None and layer not in self.moe.dense_layers and layer not in self.layers_without_mlp

    def mixers_of(self, layer: int) -> tuple[Mixer, ...]:
        """The mixers of a layer, counted from 0. MTP layers follow the last layer and have attention."""
        return self.mixers[layer] if layer < len(self.mixers) else ("attention",)

    def form_of(self, layer: int) -> Form:
        return self.form_with(self.mixers_of(layer))

    def form_with(self, mixers: Sequence[Mixer]) -> Form:
        """Form of a layer with these mixers."""
        other = self.form_without_attention
        return self.form if other is None or "attention" in mixers else other

    @property
    def has_norms_before_blocks(self) -> bool:
        """Whether a layer normalizes the input of a block."""
        return any(self.form_of(layer) != "post" for layer in range(self.num_layers))

    def layer_kinds(self, layer: int) -> frozenset[str]:
        """What rules can select layers by.

        Mixers, ``moe``, ``dense`` or ``wide``, ``windowed`` or ``full`` attention, with ``_queries`` if it shares keys,
        and ``indexed`` if it has an indexer.
        """
        dense = "wide" if self.mlp_width(layer) > self.ffn_hidden_size else "dense"
        feed_forward = () if layer in self.layers_without_mlp else ("moe" if self.is_moe(layer) else dense,)
        reach = "full" if self.window(layer) is None else "windowed"
        reach += "" if self.key_source(layer) is None else "_queries"
        indexed = ("indexed",) if self.is_indexed(layer) else ()
        return frozenset((*self.mixers_of(layer), *feed_forward, reach, *indexed))

    def is_indexed(self, layer: int) -> bool:
        """Whether the attention of the layer, counted from 0, has an indexer."""
        return self.indexer is not None and layer not in self.indexer.shared_layers

    def key_source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer, both from 0, attends to; None: its own."""
        first = self.num_layers - self.key_sharing_layers
        if not first <= layer < self.num_layers:
            return None
        return max(other for other in range(first) if self.window(other) == self.window(layer))

    def mlp_width(self, layer: int) -> int:
        """Width of the dense feed-forward block of a layer, from 0."""
        wide = self.sharing_layers_wide and self.key_source(layer) is not None
        return 2 * self.ffn_hidden_size if wide else self.ffn_hidden_size

    def mean_keys(self, layer: int) -> float | None:
        """Keys of a query in a long sample, on average; None: half of the sample."""
        window = self.window(layer)
        return None if window is None else window / (2 if self.window_kind == "chunks" else 1)

    def window(self, layer: int) -> int | None:
        """Sliding window of this layer; None: full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window

    @property
    def value_width(self) -> int:
        """Width of one head's values."""
        return self.mla.v_head_dim if self.mla is not None else self.value_channels or self.kv_channels

    @property
    def windowed(self) -> Architecture:
        """This model with the attention sizes and the rotary embedding of sliding-window layers in every layer."""
        if self.sliding_window is None or (self.window_attention is None and self.window_rotary_base is None):
            return self
        changed: dict[str, Any] = {"window_attention": None, "window_rotary_base": None}
        if self.window_rotary_base is not None:
            changed |= {"rotary_base": self.window_rotary_base, "rope_scaling": None}
        for field in fields(WindowAttention) if self.window_attention is not None else ():
            if (value := getattr(self.window_attention, field.name)) is not None:
                changed[field.name] = value
        return replace(self, **changed)

    def attention_of(self, layer: int) -> Architecture:
        """This model with the attention sizes and the rotary embedding of one layer, from 0, in every layer."""
        return self if self.window(layer) is None else self.windowed

    @property
    def attention_kinds(self) -> tuple[Architecture, ...]:
        """This model with the attention of each kind of layer: full, and sliding-window if it differs."""
        return tuple(dict.fromkeys((self, self.windowed)))

    @property
    def rotary_kinds(self) -> tuple[Architecture, ...]:
        """The ``attention_kinds`` whose rotary embeddings differ: one or two."""
        names = ("rotary_base", "rope_scaling", "rotary_percent", "kv_channels")
        first, *others = self.attention_kinds
        differ = (other for other in others if any(getattr(first, n) != getattr(other, n) for n in names))
        return first, *differ
