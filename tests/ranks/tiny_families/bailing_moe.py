"""Ling 1 and 2 in plain PyTorch, from their published architecture: the reference, as transformers has no class.

Modules have the names of published tensors. ``architectures`` of the config selects the version, as in published ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

FIRST, SECOND = "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"


class BailingMoeConfig(PreTrainedConfig):
    model_type = "bailing_moe"

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 600000.0
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    use_qkv_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = True
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False

    @property
    def is_first(self) -> bool:
        return FIRST in (self.architectures or ())


class Norm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


class _Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Gate(nn.Module):
    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        if not config.is_first:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token, [T, k] each."""
        config, logits = self.config, x @ self.weight.t()
        if config.is_first:
            weights, chosen = logits.softmax(-1).topk(config.num_experts_per_tok)
            return weights / weights.sum(-1, keepdim=True) if config.norm_topk_prob else weights, chosen
        scores = logits.sigmoid()
        groups = (scores + self.expert_bias).unflatten(-1, (config.n_group, -1))
        best = groups.topk(2).values.sum(-1).topk(config.topk_group).indices
        excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        chosen = (
            groups.masked_fill(excluded[..., None], -torch.inf).flatten(-2).topk(config.num_experts_per_tok).indices
        )
        weights = scores.gather(-1, chosen)
        if config.num_experts_per_tok > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * config.routed_scaling_factor, chosen


class _Experts(nn.Module):
    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = _Gate(config)
        self.experts = nn.ModuleList(_Mlp(hidden, width) for _ in range(config.num_experts))
        if config.num_shared_experts:
            self.shared_experts = _Mlp(hidden, width * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows)
        of_experts = torch.zeros(len(rows), len(self.experts)).to(rows).scatter(-1, chosen, weights)
        outputs = torch.stack([expert(rows) for expert in self.experts], dim=1)
        result = (outputs * of_experts[..., None]).sum(1)
        if self.gate.config.num_shared_experts:
            result = result + self.shared_experts(rows)
        return result.view_as(x)


class _Attention(nn.Module):
    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.head_dim
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        rows = (self.heads + 2 * self.groups) * self.width
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=config.use_qkv_bias)
        self.dense = nn.Linear(self.heads * self.width, config.hidden_size, bias=config.use_bias)
        self.normed = config.use_qk_norm and not config.is_first
        if self.normed:
            self.query_layernorm, self.key_layernorm = (Norm(self.width, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        projected = self.query_key_value(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        q, k, v = projected.split((self.heads, self.groups, self.groups), dim=1)
        if self.normed:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = self._rotated(q), self._rotated(k)
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.dense(result.transpose(1, 2).flatten(-2))
        return output

    def _rotated(self, x: Tensor) -> Tensor:
        share = 1.0 if self.config.is_first else self.config.partial_rotary_factor
        width = int(self.width * share)
        rates = self.config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.arange(x.size(-2), dtype=torch.float32)[:, None] * rates
        first, second = x[..., :width].chunk(2, dim=-1)
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat((*turned, x[..., width:]), dim=-1)


class Layer(nn.Module):
    def __init__(self, config: BailingMoeConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.attention = _Attention(config)
        dense = layer < config.first_k_dense_replace
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size) if dense else _Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class _Decoder(nn.Module):
    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor) -> Tensor:
        for layer in self.layers:
            embedded = layer(embedded)
        normed: Tensor = self.norm(embedded)
        return normed


class BailingMoeV2ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = BailingMoeConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: BailingMoeConfig) -> None:
        self.version = FIRST if config.is_first else SECOND
        super().__init__(config)
        self.model = _Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_unused: Any
    ) -> CausalLMOutputWithPast:
        """``input_ids`` are [B, T] without padding."""
        embedded = self.model.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(embedded)))

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """With the version in ``architectures``, for which transformers writes the name of this class."""
        super().save_pretrained(save_directory, **options)
        self.config.architectures = [self.version]
        self.config.save_pretrained(save_directory)


class BailingMoeV2Config(BailingMoeConfig):
    model_type = "bailing_moe_v2"


class _OtherType(BailingMoeV2ForCausalLM):
    config_class = BailingMoeV2Config


def register() -> None:
    for config, model in ((BailingMoeConfig, BailingMoeV2ForCausalLM), (BailingMoeV2Config, _OtherType)):
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)
