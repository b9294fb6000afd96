"""A dense decoder in plain PyTorch, in the style of torchtitan: RMSNorm, RoPE, GQA through SDPA, SwiGLU.

Parameters have the names of transformers' Llama and Qwen3, so it reads the same folder. A caller compiles each block
and the loss, as torchtitan does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal, with grouped keys and values; Qwen3 also normalizes the heads of queries and keys."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.head_dim
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        for name, heads in zip("qkv", self.heads, strict=True):
            setattr(self, f"{name}_proj", nn.Linear(config.hidden_size, heads * width, bias=False))
        self.o_proj = nn.Linear(self.heads[0] * width, config.hidden_size, bias=False)
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.norms = config.model_type == "qwen3"

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]; cos and sin are [S, D]."""
        q, k, v = (
            project(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project, heads in zip((self.q_proj, self.k_proj, self.v_proj), self.heads, strict=True)
        )
        if self.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ((item * cos + _half_turn(item) * sin).to(v.dtype) for item in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        wide = config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(config.hidden_size, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: the ``model`` of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class PlainModel(nn.Module):
    """A causal language model of transformers' ``config``, of model type llama or qwen3."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = LlamaRotaryEmbedding(config)
        self.sum_of_losses = sum_of_losses

    def logits(self, ids: Tensor) -> Tensor:
        """int64 [B, S] -> [B, S, V]."""
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # the residual stream, as with torchtitan's FSDP
        cos, sin = (item[0] for item in self.rotary(x, torch.arange(ids.shape[1], device=ids.device)[None]))
        for block in self.model.layers:
            x = block(x, cos, sin)
        out: Tensor = self.lm_head(self.model.norm(x))
        return out

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Sum of the losses of all tokens; ``labels`` are shifted already."""
        return self.sum_of_losses(self.logits(ids), labels)


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def load_plain(folder: Any, device: torch.device) -> PlainModel:
    """The model of a Hugging Face folder in float32."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    with device:
        model = PlainModel(AutoConfig.from_pretrained(folder))
    state = load_file(folder / "model.safetensors", device=str(device))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{folder} has other tensors than the plain model: {unexpected}, not {missing}")
    return model.float()
