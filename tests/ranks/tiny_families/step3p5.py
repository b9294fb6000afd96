"""The language model of Step 3.7 as a class of its own, with modules that have the names of published tensors.

Published models of Step 3.5 bring such a class, and transformers has none.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7DecoderLayer,
    Step3p7MLP,
    Step3p7PreTrainedModel,
    Step3p7TextModel,
)


class _Stack(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) * 0.02)


class _Experts(nn.Module):
    def __init__(self, config: Step3p7TextConfig, limit: float | None) -> None:
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.config, self.limit = config, limit or torch.inf
        self.gate = _Stack(experts, hidden)
        self.register_buffer("router_bias", torch.zeros(experts))
        self.gate_proj, self.up_proj = _Stack(experts, width, hidden), _Stack(experts, width, hidden)
        self.down_proj = _Stack(experts, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.gate.weight.t()).sigmoid()
        chosen = (scores + self.router_bias).topk(self.config.num_experts_per_tok).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * self.config.moe_router_scaling_factor
        gate, up = (torch.einsum("...h,exh->...ex", x, item.weight) for item in (self.gate_proj, self.up_proj))
        inner = F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        return torch.einsum("...ex,ehx,...e->...h", inner, self.down_proj.weight, weights)


class _Layer(Step3p7DecoderLayer):
    def __init__(self, config: Step3p7TextConfig, layer: int) -> None:
        super().__init__(config, layer)
        if config.mlp_layer_types[layer] == "sparse":
            self.moe = _Experts(config, (config.swiglu_limits or {layer: None})[layer])
            self.share_expert = Step3p7MLP(config, layer, is_shared_expert=True)
            del self.mlp
            self.__dict__["mlp"] = lambda x: self.moe(x) + self.share_expert(x)


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    config_class = Step3p7TextConfig
    config: Step3p7TextConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    input_modalities = ("text",)

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.model.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def register() -> None:
    # Without exist_ok it ignores configs of its own.
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
