"""A decoder that config.json configures completely, for models that transformers has no class for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_isthmus import IsthmusConfig
from .experts_isthmus import IsthmusMlp, MixtureOfExperts, Router
from .rotary_isthmus import Table, inverse_frequencies, rotate


class IsthmusNorm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in float32."""

    def __init__(self, config: IsthmusConfig, width: int, kind: str | None = None) -> None:
        super().__init__()
        self.kind = kind or config.normalization
        self.eps, self.zero_centered = config.norm_epsilon, config.norm_zero_centered
        self.weight = nn.Parameter(torch.ones(width))
        has_bias = self.kind == "LayerNorm" and config.norm_bias
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1 if self.zero_centered else self.weight.float()
        if self.kind == "LayerNorm":
            bias = None if self.bias is None else self.bias.float()
            return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * weight).to(x.dtype)


class IsthmusAttention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: IsthmusConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, groups * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, groups * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=config.proj_bias)
        self.window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.rotated = config.position_embedding_type == "rope" and layer not in config.unrotated_layers
        self.scale = width**-0.5 if config.attention_scale is None else config.attention_scale
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sinks else None
        self.norm_over = config.qk_norm_over if config.qk_norm else None
        if self.norm_over == "projection":
            self.q_norm, self.k_norm = (IsthmusNorm(config, n * width, "RMSNorm") for n in (heads, groups))
        elif self.norm_over == "head":
            self.q_norm, self.k_norm = IsthmusNorm(config, width), IsthmusNorm(config, width)

    def forward(self, x: Tensor, tables: list[Table], padding: Tensor | None, cache: Any, past: int) -> Tensor:
        """Attention of ``x`` [B, S, H] and ``past`` earlier tokens; ``padding`` [B, past + S] is zero for padding.

        ``tables`` are of layers with full attention, and of sliding-window layers.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.norm_over == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in (q, k, v))
        if self.norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.rotated:
            table, interleaved = tables[self.window is not None], self.config.rotary_interleaved
            q, k = (rotate(part, table, interleaved=interleaved) for part in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        mask = self._attention_mask(q.size(2), k.size(2), past + q.size(2), padding, q.device)
        use_sdpa = self.config.attention_softcap is None and self.sinks is None
        if use_sdpa and self.config._attn_implementation != "eager":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        else:
            out = self._eager(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _attention_mask(self, queries: int, keys: int, total: int, padding: Tensor | None, device: Any) -> Tensor:
        """Attention mask [1 or B, 1, S, keys]; a cache may keep only the last keys."""
        index = torch.arange(total, device=device)
        distance = index[total - queries :, None] - index[None, total - keys :]
        mask = distance >= 0
        if self.window is not None:
            mask = mask & (distance < self.window)
        if padding is None:
            return mask[None, None]
        # A padding query attends to itself: softmax of a fully masked row is NaN.
        return (mask & padding[:, None, None, total - keys :].bool()) | (distance == 0)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention with soft-capped scores and sinks, which PyTorch's kernel does not support."""
        k, v = (part.repeat_interleave(q.size(1) // part.size(1), dim=1) for part in (k, v))
        scores = (q @ k.mT).float() * self.scale
        if (cap := self.config.attention_softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        return scores.softmax(-1)[..., : k.size(2)].to(v.dtype) @ v


class IsthmusLayer(nn.Module):
    """Attention and feed-forward block, with norms placed according to ``layer_form``."""

    def __init__(self, config: IsthmusConfig, layer: int) -> None:
        super().__init__()
        self.form, self.multiplier = config.layer_form, config.residual_multiplier
        width = config.hidden_size
        if self.form != "post":
            self.input_layernorm = IsthmusNorm(config, width)
        if self.form not in ("post", "parallel"):
            self.post_attention_layernorm = IsthmusNorm(config, width)  # applied before the MLP, as in Llama
        if self.form in ("post", "sandwich"):
            self.post_self_attn_layernorm = IsthmusNorm(config, width)
            self.post_mlp_layernorm = IsthmusNorm(config, width)
        self.self_attn = IsthmusAttention(config, layer)
        dense = config.num_experts == 0 or layer in config.mlp_only_layers
        self.mlp = (
            IsthmusMlp(config, config.intermediate_size, bias=config.mlp_bias) if dense else MixtureOfExperts(config)
        )

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """[B, S, H] -> [B, S, H]; ``context`` is passed to attention."""
        normed = x if self.form == "post" else self.input_layernorm(x)
        attn_out = self.self_attn(normed, *context)
        if self.form in ("post", "sandwich"):
            attn_out = self.post_self_attn_layernorm(attn_out)
        attn_out = attn_out * self.multiplier
        parallel = self.form in ("parallel", "parallel_two_norms")
        residual = x if parallel else x + attn_out
        if self.form == "post":
            mlp_out = self.post_mlp_layernorm(self.mlp(residual))
        else:
            mlp_out = self.mlp(normed if self.form == "parallel" else self.post_attention_layernorm(residual))
            mlp_out = self.post_mlp_layernorm(mlp_out) if self.form == "sandwich" else mlp_out
        return residual + attn_out + mlp_out * self.multiplier if parallel else residual + mlp_out * self.multiplier


class IsthmusPreTrainedModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]  # transformers is typed in part
    config: IsthmusConfig
    config_class = IsthmusConfig
    base_model_prefix = "model"
    _no_split_modules = ["IsthmusLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]  # noqa: RUF012

    def __init__(self, config: IsthmusConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.router_float32:
            self._keep_in_fp32_modules_strict = ["e_score_correction_bias", "mlp.gate.weight"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | Router):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, IsthmusNorm):
            nn.init.constant_(module.weight, 0.0 if module.zero_centered else 1.0)
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            nn.init.zeros_(bias)


class IsthmusModel(IsthmusPreTrainedModel):
    """Embedding, layers and final norm."""

    _auto_class = "AutoModel"  # save_pretrained copies these files

    def __init__(self, config: IsthmusConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position_embedding_type == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(IsthmusLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = IsthmusNorm(config, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **_unused: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, S, H] of ``input_ids`` [B, S]; ``attention_mask`` [B, past + S] is zero for padding.

        ``cache`` is the name of ``past_key_values`` in transformers 5.24 and newer.
        """
        config = self.config
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if config.embedding_multiplier != 1:
            x = x * torch.tensor(config.embedding_multiplier, dtype=x.dtype)
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        past = 0 if cache is None else int(cache.get_seq_length())
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must be [batch, length], got {tuple(attention_mask.shape)}")
        if position_ids is None:
            position_ids = torch.arange(past, past + x.size(1), device=x.device)[None]
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
        tables = [self._table(position_ids, windowed) for windowed in (False, True)]
        for layer in self.layers:
            x = layer(x, tables, padding, cache, past)
        return BaseModelOutputWithPast(self.norm(x), cache)  # by position, since the name depends on the version

    def _table(self, position_ids: Tensor, windowed: bool) -> Table:
        longest = int(position_ids.max()) + 1
        inv_freq, attention_factor = inverse_frequencies(self.config, windowed=windowed, length=longest)
        angles = position_ids[:, None, :, None].float() * inv_freq.to(position_ids.device)
        return angles.cos() * attention_factor, angles.sin() * attention_factor


class IsthmusForCausalLM(IsthmusPreTrainedModel, GenerationMixin):
    """The decoder with its output projection."""

    _auto_class = "AutoModelForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  # transformers modifies it

    def __init__(self, config: IsthmusConfig) -> None:
        super().__init__(config)
        self.model = IsthmusModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: Any) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, S, V], only of the last ``logits_to_keep`` tokens if not 0; a loss with ``labels`` [B, S]."""
        states = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cache)
        hidden, *caches = states.to_tuple()
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, positions]) * self.config.logits_multiplier
        if (cap := self.config.logits_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, *caches)
