"""The shape of a decoder, in the words of Megatron-Core, with no Megatron in sight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
Form = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]
"""Where the norms of a layer stand, ``f`` being attention or the feed-forward block:

``pre``: x + f(norm(x)); ``post``: x + norm(f(x)); ``sandwich``: x + norm(f(norm(x)));
``parallel``: x + attention(norm(x)) + mlp(norm(x)) with one norm, ``parallel_two_norms`` with one for each.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on.

    ``llama3`` divides the frequencies whose wavelength exceeds ``original_max_position_embeddings /
    low_freq_factor`` by ``factor``, keeps those below ``... / high_freq_factor`` and blends in between;
    ``linear`` divides all of them; ``yarn`` (arXiv 2309.00071) blends between the dimensions that turn ``beta_fast``
    and ``beta_slow`` times within the original length, and scales cosines and sines; ``longrope`` (arXiv 2402.13753)
    divides each by its own factor, one list up to the original length and one beyond it.
    """

    kind: Literal["llama3", "linear", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YaRN: whether the bounds of the blend are rounded to whole dimensions."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """What cosines and sines are multiplied by; None derives it from the factor."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mla:
    """Multi-head latent attention (arXiv 2405.04434): keys and values from one narrow vector a token."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """Width of the vector that queries come from; None projects them directly."""
    norm_epsilon: float = 1e-6
    """Of the norms of those narrow vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Feed-forward blocks that are mixtures of experts, and how their tokens find them."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Width of one expert."""
    shared_ffn_hidden_size: int = 0
    """Width of the experts that every token visits, all together."""
    shared_gate: bool = False
    """The shared experts are weighted by a sigmoid of their own."""
    dense_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that have an ordinary feed-forward block."""
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """What logits become; the last is taken over the chosen experts alone, the others before the choice."""
    normalize: bool = False
    """The weights of the chosen experts are divided by their sum."""
    normalize_min: float = 1e-20
    """The least that they are divided by."""
    scaling_factor: float = 1.0
    """What the weights are multiplied by in the end."""
    expert_bias: bool = False
    """A float32 bias that decides which experts are chosen and not what they weigh (arXiv 2408.15664)."""
    num_groups: int = 1
    group_top_k: int = 1
    """Experts are chosen among the best so many of ``num_groups`` groups."""
    group_score: Literal["max", "top2"] = "top2"
    """What a group is judged by: its best expert, or the sum of its two best."""
    router_bias: bool = False
    """The router adds a learned bias to its logits."""
    router_float32: bool = False
    """The router's weights are float32 whatever the model's type is."""
    expert_mlp_bias: bool = False

    def misfit(self) -> str | None:
        """Why these numbers make no router; None if they do."""
        if self.num_experts % self.num_groups:
            return f"{self.num_groups} groups do not divide {self.num_experts} experts"
        in_group = self.num_experts // self.num_groups
        if self.group_top_k > self.num_groups:
            return f"the best {self.group_top_k} of {self.num_groups} groups cannot be chosen"
        if self.num_groups > 1 and self.group_score == "top2" and in_group < 2:
            return f"groups of {in_group} have no two best experts"
        if self.top_k > self.group_top_k * in_group:
            return f"{self.top_k} experts cannot be chosen among {self.group_top_k * in_group}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Everything that decides the shapes and the arithmetic of one decoder-only model."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (``num_key_value_heads`` in Hugging Face configs)."""
    kv_channels: int
    """Width of one head (``head_dim`` in Hugging Face configs)."""
    vocab_size: int
    """Rows of the embedding, without the padding that tensor parallelism adds."""
    max_position_embeddings: int
    norm_epsilon: float

    # Positions.
    position: Literal["rope", "learned"] = "rope"
    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_percent: float = 1.0
    """Share of a head's channels, the first ones, that are rotated."""
    rotary_interleaved: bool = False
    """A pair is two neighbouring channels; else one of each half."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers, counted from 0, without positions."""

    # Norms.
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_bias: bool = True
    """LayerNorm has a bias; RMSNorm never has one."""
    norm_zero_centered: bool = False
    """A norm multiplies by one plus its weight."""
    form: Form = "pre"

    # Attention.
    qkv_bias: bool = False
    proj_bias: bool = False
    """The output projection of attention has a bias."""
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    """Each head is normalised by itself, or all heads of queries (of keys) together."""
    sliding_window: int | None = None
    """Number of keys a query sees, itself included; None means all that precede it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers, counted from 0, to which the window does not apply."""
    window_rotary_base: float | None = None
    """Base of the layers with a window, whose frequencies are not stretched; None if theirs are those of the rest."""
    attention_scale: float | None = None
    """What scores are multiplied by; None is one over the root of a head's width."""
    attention_softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    attention_sinks: bool = False
    """Each head has a learned logit that takes part in the softmax and has no value."""
    mla: Mla | None = None

    # Feed-forward block.
    activation: Activation = "silu"
    gated: bool = True
    mlp_bias: bool = False
    moe: Moe | None = None
    mtp_layers: int = 0
    """Layers behind the last that predict the token after the next (arXiv 2412.19437)."""

    # Ends.
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """What attention and feed-forward block add to the residual stream is multiplied by it."""
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Settings that have no effect have one spelling, so that equal models compare equal."""
        if self.sliding_window is None:
            object.__setattr__(self, "full_attention_layers", ())
            object.__setattr__(self, "window_rotary_base", None)

    def is_moe(self, layer: int) -> bool:
        """Whether the layer (from 0) is a mixture of experts; the layers behind the last, which predict ahead, are."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def window(self, layer: int) -> int | None:
        """Keys that a query sees in this layer, itself included; None for all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window
