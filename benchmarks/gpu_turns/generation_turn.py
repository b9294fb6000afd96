"""Greedy answers in bf16: Isthmus, or transformers' ``generate``, beside the bound by the memory bandwidth."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_turns.rows import append

Answers = list[list[int]]
ROUNDS = 3


def run(spec: dict[str, Any]) -> None:
    """Append a row for each run, and one for the first tokens of the answers."""
    from isthmus.platforms.detect import detect
    from isthmus.platforms.environment import apply_env

    platform = detect(spec["platform"])
    apply_env(platform)
    platform.prepare_process()
    prompt_tokens, new_tokens = (8, 4) if spec["dry"] else (128, 128)
    config = json.loads((Path(spec["weights"]) / "config.json").read_text())
    random = torch.Generator().manual_seed(0)
    answer = {"isthmus": _isthmus, "transformers": _transformers, "transformers-compiled": _transformers}
    build = answer[spec["contestant"]](spec, platform)
    for sequences in (1, 2 if spec["dry"] else 32):
        prompts = torch.randint(config["vocab_size"], (sequences, prompt_tokens), generator=random)
        generate = build(prompts, new_tokens)
        first = [tokens[0] for tokens in generate()]  # also compiles
        append("first-tokens", sequences=sequences, tokens=first)
        bound = bandwidth_bound(config, spec, platform, sequences, prompt_tokens + new_tokens / 2)
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            tokens = sum(map(len, generate()))
            time_s = time.perf_counter() - started_s
            append("generation", sequences=sequences, tokens=tokens, time_s=time_s, bound_tokens_per_s=bound)


def bandwidth_bound(
    config: dict[str, Any], spec: dict[str, Any], platform: Any, sequences: int, context: float
) -> float | None:
    """Tokens/s if reading the weights once a token and the keys and values took all of the time; None: unknown GPU."""
    part = platform.part() if hasattr(platform, "part") else None
    if part is None:
        return None
    weights = sum(path.stat().st_size for path in Path(spec["weights"]).glob("*.safetensors"))
    if not config.get("tie_word_embeddings", False):
        weights -= 2 * config["vocab_size"] * config["hidden_size"]  # the embedding is looked up
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    states = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width * context
    return float(sequences / ((weights + sequences * states) / (1e9 * part.memory_gb_s)))


def _isthmus(spec: dict[str, Any], platform: Any) -> Callable[[torch.Tensor, int], Callable[[], Answers]]:
    from isthmus.config.schema import ParallelConfig
    from isthmus.engine.generation.inference import Inference
    from isthmus.engine.generation.schedule import Decoding
    from isthmus.engine.step import Evaluator
    from isthmus.recipes.model.load_model import build_from_folder

    built = build_from_folder(spec["weights"], precision="bf16")

    def prepared(prompts: torch.Tensor, new_tokens: int) -> Callable[[], Answers]:
        tokens = prompts.numel() + len(prompts) * new_tokens
        evaluator, slots = Evaluator(built.stages), len(prompts)
        inference = Inference(
            evaluator, built.plan.architecture, ParallelConfig(), batch_tokens=max(4096, tokens), slots=slots
        )
        return lambda: inference.generate(prompts.tolist(), Decoding(new_tokens))

    return prepared


def _transformers(spec: dict[str, Any], platform: Any) -> Callable[[torch.Tensor, int], Callable[[], Answers]]:
    from transformers import AutoModelForCausalLM

    device = platform.device_type
    network: Any = AutoModelForCausalLM.from_pretrained(spec["weights"], dtype=torch.bfloat16).to(device).eval()
    network.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if spec["contestant"] == "transformers-compiled":
        options["cache_implementation"] = "static"  # transformers compiles the forward pass on a GPU then

    def prepared(prompts: torch.Tensor, new_tokens: int) -> Callable[[], Answers]:
        inputs, length = prompts.to(device), prompts.shape[1]
        mask = torch.ones_like(inputs)

        def generate() -> Answers:
            out = network.generate(inputs, attention_mask=mask, max_new_tokens=new_tokens, **options)
            answers: Answers = out[:, length:].tolist()
            return answers

        return generate

    return prepared
