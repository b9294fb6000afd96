"""A server with vLLM's endpoints that generates with transformers, whose routers choose with disturbed logits."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.hf.tokenizer.tokenizer import load_tokenizer
from isthmus.recipes.rollout.vllm_plugin.isthmus_vllm import COMPARED_KEYS
from isthmus.recipes.rollout.vllm_settings import _TEXT
from ranks.tiny import load_network
from unit.recipes.rollout.fake_vllm import FakeVllm, encoded


def route(gate: Any, choose: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router of Qwen3-MoE, with the experts of ``choose(logits)``: their weights are those of the router."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    chosen = choose(logits)
    weights = logits.softmax(-1).gather(-1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen


class TransformersVllm(FakeVllm):
    """Returns the experts that it chooses, which are others than those of the policy for many tokens."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        config = json.loads((model / "config.json").read_text())
        self.settings = {"model_type": config["model_type"], "config": {name: config[name] for name in COMPARED_KEYS}}
        self.settings |= {"logprobs_mode": "raw_logprobs", "returns_routed_experts": True}
        self.tokens = load_tokenizer(model).encode(_TEXT)
        self._network: Any = None
        self._lock = threading.Lock()

    def load(self, folder: str) -> None:
        self._network = load_network(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def prompt_logps(self, tokens: list[int]) -> list[float]:
        with self._lock:
            logps = self._network(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return [float(logps[place, token]) for place, token in enumerate(tokens[1:])]

    @torch.no_grad()
    def choice(self, body: Any) -> dict[str, Any]:
        prompt, random = body["prompt"], torch.Generator().manual_seed(body["seed"] % 2**63)
        tokens, logps = list(prompt), []
        with self._lock:
            while len(tokens) < len(prompt) + body["max_tokens"] and tokens[-1] not in body["stop_token_ids"]:
                last, experts = self._disturbed(tokens)
                tokens.append(int(torch.multinomial(last.exp(), 1, generator=random)))
                logps.append(float(last[tokens[-1]]))
        answer = {"token_ids": tokens[len(prompt) :], "logprobs": {"token_logprobs": logps}}
        return answer | {"routed_experts": encoded(experts)}

    def _disturbed(self, tokens: list[int]) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """Log-probabilities of the next token, and the experts of all tokens, uint8 [tokens, layers, K]."""
        chosen: list[Tensor] = []

        def choose(top_k: int, logits: Tensor) -> Tensor:
            noise = torch.randn(logits.size(1), generator=torch.Generator().manual_seed(len(chosen)))
            chosen.append((logits + 0.3 * noise).topk(top_k).indices)
            return chosen[-1]

        gates = [layer.mlp.gate for layer in self._network.model.layers]
        for gate in gates:
            gate.forward = partial(route, gate, partial(choose, gate.top_k))
        logps = self._network(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        for gate in gates:
            del gate.forward
        return logps, torch.stack(chosen, dim=1).numpy().astype(np.uint8)
