"""Generation from the states of blocks equals the packed forward pass and transformers, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.config.load import load_config
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.data.batching.batches import BatchSettings, BatchShard
from isthmus.data.batching.rollout_batches import GeneratedAnswers, RolloutBatches
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Decoding
from isthmus.engine.generation.token_recorders import LogpRecorder
from isthmus.engine.layers.sequence_states import SequenceStates
from isthmus.engine.step import Evaluator
from isthmus.platforms.detect import detect
from isthmus.recipes.model.load_model import build_from_folder
from isthmus.recipes.model.rank_model import RankModel, join_and_build
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder, load_network
from ranks.tiny_families.gemma4 import SMALL
from sweep import BLOCK_FAMILIES

NEW_TOKENS = 6
PROMPTS = [[3, 17, 4, 60, 9], [8], [22, 22, 5, 41, 70, 2, 6, 33, 50], [11, 76]]
CASES: dict[str, dict[str, Any]] = {family: {} for family in BLOCK_FAMILIES} | {
    "glm_moe_dsa": {"index_topk": 128},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0},
    "gemma4_text": SMALL | {"enable_moe_block": False},  # layers that share keys
    "gemma4_unified_text": {},  # values are keys
    "llama4_text": {"attention_chunk_size": 4},
    "falcon_h1": {},  # attention and Mamba-2 in one layer
}
RECOMPUTED: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    "max_position_embeddings": 8,
}
"""The frequencies of a sample depend on its length, beyond 8 tokens."""
LAYER_OPERATIONS = 62
"""Most operations of a layer of Qwen3 in a step: 3 norms, 4 matmuls, rotation, attention and SwiGLU."""
OTHER_OPERATIONS = 95
"""Most operations of the rest: inputs, what layers share, logits, choice of the tokens."""


def generate(
    *, model: str, temperature: float = 0.0, top_p: float = 1.0, order: list[int], **parallel: Any
) -> dict[str, Any]:
    """Task of a rank: continuations of the prompts in this order, and their scores in packed forward passes.

    At a temperature, the scores are those that training computes.
    """
    return generate_with(
        build_from_folder(model, parallel),
        ParallelConfig(**parallel),
        temperature=temperature,
        top_p=top_p,
        order=order,
    )


def generate_with_adapters(*, model: str, quantize: str | None) -> dict[str, Any]:
    """Task of a rank: :func:`generate` with random adapters of all linear layers."""
    flags = {"model": model, "data": ["unused"], "out": "unused", "train.precision": "fp32", "lora.rank": 2}
    config = load_config("pretrain", None, flags=flags | {"lora.quantize": quantize})
    built = join_and_build(config, plan_model(open_run_model(config), config), detect(), "fp32")
    torch.manual_seed(0)
    for stage in built.stages:
        for name, parameter in stage.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return generate_with(built, config.parallel, temperature=0.0, top_p=1.0, order=[0, 1, 2, 3])


def generate_with(
    built: RankModel, parallel: ParallelConfig, *, temperature: float, top_p: float, order: list[int]
) -> dict[str, Any]:
    evaluator = Evaluator(built.stages)
    inference = Inference(evaluator, built.plan.architecture, parallel, batch_tokens=16)
    decoding = Decoding(NEW_TOKENS, (), temperature, seed=3, top_p=top_p)
    answers = inference.answers([PROMPTS[number % len(PROMPTS)] for number in order], decoding, order)
    by_number = dict(zip(order, answers, strict=True))
    prompts = [PROMPTS[number % len(PROMPTS)] for number in sorted(order)]
    tokens, logps = zip(*((by_number[number].tokens, by_number[number].logps) for number in sorted(order)), strict=True)
    if temperature:
        packed = training_logps(evaluator, built, prompts, tokens, temperature).tolist()
    else:
        samples = [([*prompt, *answer], NEW_TOKENS) for prompt, answer in zip(prompts, tokens, strict=True)]
        packed = [[-loss for loss in losses] for losses, _ in inference.score(samples)]
    return {"tokens": list(tokens), "logps": list(logps), "packed": packed}


def training_logps(
    evaluator: Evaluator, model: RankModel, prompts: list[list[int]], tokens: tuple[list[int], ...], temperature: float
) -> torch.Tensor:
    """Log-probabilities of answers of equal length as training computes them, float64 [answers, tokens]."""
    zeros, parallel = np.zeros(len(tokens)), model.plan.parallel
    answers = GeneratedAnswers(
        prompts=prompts,
        answers=tokens,
        advantages=zeros,
        weights=zeros,
        sampling_logps=[np.zeros(NEW_TOKENS)] * len(tokens),
    )
    settings = BatchSettings(seq_length=24, micro_batch_size=1, global_batch_size=len(tokens), packing=True)
    shard = BatchShard(
        dp_rank=model.position.dp_rank,
        dp_size=parallel.dp(dist.get_world_size()),
        pad_to_multiple_of=parallel.length_multiple,
    )
    recorder = LogpRecorder(answers.store())
    evaluator.evaluate(RolloutBatches(answers, temperature, settings, shard).eval_batches(), recorder)
    return recorder.gathered(evaluator.device).view(len(tokens), NEW_TOKENS)


def state_elements(*, model: str) -> tuple[int, int]:
    """Task of a rank: elements of the states of 4 sequences, and those that the blocks say."""
    allocated: list[SequenceStates] = []

    class Watched(Inference):
        def _release(self) -> None:
            allocated.append(self._states)

    built = build_from_folder(model, {})
    inference = Watched(Evaluator(built.stages), built.plan.architecture, ParallelConfig(), batch_tokens=16)
    inference.answers(PROMPTS, Decoding(NEW_TOKENS))
    (states,) = allocated
    mixers = [mixer for layer in built.plan.architecture.layers for mixer in layer.mixers]
    return states.elements, states.slots * sum(mixer.state_elements(states.capacity) for mixer in mixers)


class _DispatchedOperations(TorchDispatchMode):
    """Counts the operations that reach the dispatcher from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def step_operations(*, model: str) -> int:
    """Task of a rank: operations of the last forward pass of a generation, a step of all sequences."""
    counts: list[int] = []

    class Counted(Inference):
        def _run_pass(self, *arguments: Any) -> Any:
            with _DispatchedOperations() as operations:
                result = super()._run_pass(*arguments)
            counts.append(operations.count)
            return result

    built = build_from_folder(model, {})
    inference = Counted(Evaluator(built.stages), built.plan.architecture, ParallelConfig(), batch_tokens=16)
    inference.answers(PROMPTS, Decoding(NEW_TOKENS))
    return counts[-1]


def transformers_answers(folder: Path) -> list[list[int]]:
    network = load_network(folder, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None
    # Its cache has an error for models that start with a delta net, and keeps keys with the rotation of a shorter text.
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": False}
    return [network.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


@pytest.mark.thorough_cases("gemma4_unified_text", "qwen3_vl")
@pytest.mark.parametrize("family", sorted(CASES))
def test_greedy_answers_and_their_log_probabilities(family: str, one_rank: RankPool, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "model", family, **CASES[family])
    result = one_rank.run("ranks.test_generation.generate", model=folder, order=[0, 1, 2, 3])
    assert result["tokens"] == transformers_answers(folder)
    for logps, packed in zip(result["logps"], result["packed"], strict=True):
        assert logps == pytest.approx(packed, abs=1e-5)
    kept, expected = one_rank.run("ranks.test_generation.state_elements", model=folder)
    assert kept == expected


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_latent_attention_absorbs_an_up_projection_with_adapters(
    quantize: str | None, one_rank: RankPool, tmp_path: Path
) -> None:
    folder = build_model_folder(tmp_path / "model", "deepseek_v3")
    result = one_rank.run("ranks.test_generation.generate_with_adapters", model=folder, quantize=quantize)
    plain = one_rank.run("ranks.test_generation.generate", model=folder, order=[0, 1, 2, 3])
    assert result["tokens"] != plain["tokens"]
    for logps, packed in zip(result["logps"], result["packed"], strict=True):
        assert logps == pytest.approx(packed, abs=1e-5)


def test_operations_of_a_step(one_rank: RankPool, tmp_path: Path) -> None:
    """Small models spend most of a step on the number of its operations (docs/decisions/0082)."""
    task = "ranks.test_generation.step_operations"
    three, four = (
        one_rank.run(task, model=build_model_folder(tmp_path / str(layers), "qwen3", num_hidden_layers=layers))
        for layers in (3, 4)
    )
    assert four - three <= LAYER_OPERATIONS
    assert three <= 3 * LAYER_OPERATIONS + OTHER_OPERATIONS


def test_sequences_without_a_state_are_computed_again(one_rank: RankPool, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "model", "llama", **RECOMPUTED)
    result = one_rank.run("ranks.test_generation.generate", model=folder, order=[0, 1, 2, 3])
    assert result["tokens"] == transformers_answers(folder)


@pytest.mark.thorough_cases("convolution-tp2-sp", "mamba-dp2")
@pytest.mark.parametrize(
    ("family", "layout", "top_p"),
    [
        pytest.param("kimi_linear", {"tp": 2}, 0.7, id="delta-latent-tp2-nucleus"),
        pytest.param("nemotron_h", {"pp": 2}, 1.0, id="mamba2-pp2"),
        pytest.param("gpt_oss", {"ep": 2}, 0.7, id="ep2-dp2-nucleus"),
        pytest.param("lfm2", {"tp": 2, "sp": True}, 1.0, id="convolution-tp2-sp"),
        pytest.param("falcon_mamba", {}, 1.0, id="mamba-dp2"),
    ],
)
def test_random_answers_depend_on_seed_and_number_only(
    family: str, layout: dict[str, Any], top_p: float, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
) -> None:
    """Their log-probabilities are those that training computes, over all tokens at the temperature."""
    # More prompts than slots, so that some wait for others.
    order, task = list(range(12)), "ranks.test_generation.generate"
    settings = {"model": build_model_folder(tmp_path / "model", family), "temperature": 1.5, "top_p": top_p}
    result = one_rank.run(task, **settings, order=order)
    assert len({token for tokens in result["tokens"] for token in tokens}) > 2 * NEW_TOKENS
    assert result["tokens"][0] != result["tokens"][4]  # the same prompt
    other = two_ranks.run(task, **settings, order=order[::-1], **layout)
    assert other["tokens"] == result["tokens"]
    for logps, packed in zip(other["logps"], result["packed"], strict=True):
        assert logps == pytest.approx(packed, abs=1e-5)
