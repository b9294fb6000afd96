"""What config.json says of an ``isthmus`` model: every number and switch of its decoder, one to one."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class IsthmusConfig(PretrainedConfig):  # type: ignore[misc, unused-ignore]  # transformers is typed in part
    """A decoder-only model of many forms.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of an ordinary feed-forward block.
        num_hidden_layers: layers.
        num_attention_heads: heads of queries.
        num_key_value_heads: heads of keys and values; None for as many.
        head_dim: width of a head; None shares ``hidden_size`` out.
        max_position_embeddings: positions, and rows of their embedding where they are learned.
        position_embedding_type: ``rope`` or ``learned``.
        rope_parameters: rope_type (default, linear, llama3, yarn, longrope), rope_theta, partial_rotary_factor, and
            the constants of the type. ``rope_theta`` and ``rope_scaling`` are the older spelling.
        rotary_interleaved: a rotated pair is two neighbouring channels; else one of each half.
        window_rope_theta: base of the layers with a window, whose frequencies are not stretched; None for the same.
        unrotated_layers: layers, from 0, without positions.
        normalization: ``RMSNorm`` or ``LayerNorm``.
        norm_epsilon: of every norm.
        norm_bias: LayerNorm has a bias.
        norm_zero_centered: norms multiply by one plus their weight.
        layer_form: where the norms of a layer stand; ``pre``, ``post``, ``sandwich``, ``parallel`` (attention and
            feed-forward block side by side behind one norm) or ``parallel_two_norms``.
        qkv_bias: the projections to queries, keys and values have biases.
        proj_bias: the output projection of attention has one.
        qk_norm: queries and keys are normalised.
        qk_norm_over: each ``head`` by itself, or all of a ``projection`` together (by RMSNorm).
        sliding_window: keys that a query sees, itself included, in layers with a window.
        layer_types: ``full_attention`` or ``sliding_attention`` for each layer; None for full attention everywhere.
        attention_scale: what scores are multiplied by; None is one over the root of ``head_dim``.
        attention_softcap: scores s become softcap * tanh(s / softcap).
        attention_sinks: each head has a learned logit that takes part in the softmax and has no value.
        hidden_act: ``silu``, ``gelu``, ``gelu_pytorch_tanh`` or ``clamped_swiglu``.
        gated_mlp: act(gate(x)) * up(x); else act(up(x)).
        mlp_bias: ordinary feed-forward blocks have biases.
        num_experts: of a mixture-of-experts layer; 0 for a model without.
        num_experts_per_tok: how many of them a token visits.
        moe_intermediate_size: width of one.
        shared_expert_intermediate_size: width of the experts that every token visits, all together.
        shared_expert_gate: they are weighted by a sigmoid of their own.
        mlp_only_layers: layers, from 0, with an ordinary feed-forward block.
        scoring_func: ``softmax`` or ``sigmoid`` of all logits, or ``softmax_of_chosen``.
        norm_topk_prob: the weights of the chosen are divided by their sum, by ``norm_topk_min`` at least.
        norm_topk_min: see there.
        routed_scaling_factor: what the weights are multiplied by in the end.
        router_expert_bias: a bias takes part in the choice of experts and not in their weights.
        n_group: groups of experts.
        topk_group: experts are chosen among the best so many of them.
        group_score: what a group is judged by; its ``max`` or the sum of its ``top2``.
        router_bias: the router adds a learned bias to its logits.
        router_float32: the router's weights are float32 whatever the model's type is.
        expert_mlp_bias: experts have biases.
        tie_word_embeddings: logits come from the embedding.
        embedding_multiplier: what embeddings are multiplied by.
        residual_multiplier: what a block adds to the residual stream is multiplied by it.
        logits_multiplier: what logits are multiplied by.
        logits_softcap: logits l become softcap * tanh(l / softcap).
        initializer_range: standard deviation of random weights.
    """

    model_type = "isthmus"
    _auto_class = "AutoConfig"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 2048,
        position_embedding_type: str = "rope",
        rope_parameters: dict[str, Any] | None = None,
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        rotary_interleaved: bool = False,
        window_rope_theta: float | None = None,
        unrotated_layers: list[int] | None = None,
        normalization: str = "RMSNorm",
        norm_epsilon: float = 1e-5,
        norm_bias: bool = True,
        norm_zero_centered: bool = False,
        layer_form: str = "pre",
        qkv_bias: bool = False,
        proj_bias: bool = False,
        qk_norm: bool = False,
        qk_norm_over: str = "head",
        sliding_window: int | None = None,
        layer_types: list[str] | None = None,
        attention_scale: float | None = None,
        attention_softcap: float | None = None,
        attention_sinks: bool = False,
        hidden_act: str = "silu",
        gated_mlp: bool = True,
        mlp_bias: bool = False,
        num_experts: int = 0,
        num_experts_per_tok: int = 2,
        moe_intermediate_size: int | None = None,
        shared_expert_intermediate_size: int = 0,
        shared_expert_gate: bool = False,
        mlp_only_layers: list[int] | None = None,
        scoring_func: str = "softmax",
        norm_topk_prob: bool = False,
        norm_topk_min: float = 1e-20,
        routed_scaling_factor: float = 1.0,
        router_expert_bias: bool = False,
        n_group: int = 1,
        topk_group: int = 1,
        group_score: str = "top2",
        router_bias: bool = False,
        router_float32: bool = False,
        expert_mlp_bias: bool = False,
        tie_word_embeddings: bool = False,
        embedding_multiplier: float = 1.0,
        residual_multiplier: float = 1.0,
        logits_multiplier: float = 1.0,
        logits_softcap: float | None = None,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        """Keep everything under its name."""
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.position_embedding_type = position_embedding_type
        rotary = dict(rope_parameters or rope_scaling or {"rope_type": "default"})
        rotary["rope_theta"] = rotary.get("rope_theta") or rope_theta or 10000.0
        rotary.setdefault("partial_rotary_factor", kwargs.pop("partial_rotary_factor", 1.0))
        self.rope_parameters = rotary
        self.rotary_interleaved = rotary_interleaved
        self.window_rope_theta = window_rope_theta
        self.unrotated_layers = unrotated_layers or []
        self.normalization = normalization
        self.norm_epsilon = norm_epsilon
        self.norm_bias = norm_bias
        self.norm_zero_centered = norm_zero_centered
        self.layer_form = layer_form
        self.qkv_bias = qkv_bias
        self.proj_bias = proj_bias
        self.qk_norm = qk_norm
        self.qk_norm_over = qk_norm_over
        self.sliding_window = sliding_window
        self.layer_types = layer_types or ["full_attention"] * num_hidden_layers
        self.attention_scale = attention_scale
        self.attention_softcap = attention_softcap
        self.attention_sinks = attention_sinks
        self.hidden_act = hidden_act
        self.gated_mlp = gated_mlp
        self.mlp_bias = mlp_bias
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size or intermediate_size
        self.shared_expert_intermediate_size = shared_expert_intermediate_size
        self.shared_expert_gate = shared_expert_gate
        self.mlp_only_layers = mlp_only_layers or []
        self.scoring_func = scoring_func
        self.norm_topk_prob = norm_topk_prob
        self.norm_topk_min = norm_topk_min
        self.routed_scaling_factor = routed_scaling_factor
        self.router_expert_bias = router_expert_bias
        self.n_group = n_group
        self.topk_group = topk_group
        self.group_score = group_score
        self.router_bias = router_bias
        self.router_float32 = router_float32
        self.expert_mlp_bias = expert_mlp_bias
        self.embedding_multiplier = embedding_multiplier
        self.residual_multiplier = residual_multiplier
        self.logits_multiplier = logits_multiplier
        self.logits_softcap = logits_softcap
        self.initializer_range = initializer_range
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)
