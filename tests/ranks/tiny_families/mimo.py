"""The classes of MiMo-7B, as in the code of published models: Qwen2's with MTP layers, which its forward pass skips."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
    num_nextn_predict_layers: int = 0


class MiMoMtpLayer(Qwen2DecoderLayer):
    """The hidden state comes first in the inputs of ``input_proj``."""

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config, 0)
        norms = (Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = norms
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def predict(self, hidden: Tensor, embedded: Tensor, rotary: nn.Module) -> Tensor:
        """Hidden states of the previous depth and embeddings of the shifted tokens, [1, n, H] each."""
        joined = self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], dim=-1))
        length = joined.size(1)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = rotary(joined, torch.arange(length)[None])
        normed: Tensor = self.final_layernorm(self(joined, attention_mask=mask, position_embeddings=angles))
        return normed


class MiMoModel(Qwen2Model):
    config_class = MiMoConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mtp_layers = nn.ModuleList(MiMoMtpLayer(config) for _ in range(config.num_nextn_predict_layers))


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MiMoModel(config)
        self.post_init()


def register() -> None:
    AutoConfig.register("mimo", MiMoConfig)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
