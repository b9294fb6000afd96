"""``train.deterministic`` on a GPU: two runs give the same bits, and so does a run that is resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.platforms.detect import detect

pytestmark = pytest.mark.gpu
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def train(model: Path, out: Path, *settings: str) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each step, of ten steps on random tokens."""
    command = [sys.executable, "-m", "isthmus", "pretrain", "--model", str(model), "--out", str(out)]
    command += ["model.init=random", "data.mock=true", "data.seq_length=1024", "train.steps=10", "optim.lr=1e-3"]
    command += ["train.global_batch_size=4", "train.deterministic=true", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deterministic: torch uses deterministic kernels" in done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "grad_norm" in row]


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_two_runs_and_a_resumed_run_have_the_same_bits(tmp_path: Path, precision: str, config: dict[str, Any]) -> None:
    supported, why = detect().supports(precision)
    if not supported:
        pytest.skip(why)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    of_precision = f"train.precision={precision}"
    first = train(tmp_path / "model", tmp_path / "a", of_precision)
    assert [step for step, _, _ in first] == list(range(1, 11))
    saving = ("checkpoint.every=4", "checkpoint.keep=9")
    assert train(tmp_path / "model", tmp_path / "b", of_precision, *saving) == first
    resume = f"checkpoint.resume={tmp_path / 'b' / 'checkpoints' / 'iter_0000004'}"
    assert train(tmp_path / "model", tmp_path / "c", of_precision, resume) == first[4:]
    weights = {(tmp_path / run / "hf" / "model.safetensors").read_bytes() for run in "abc"}
    assert len(weights) == 1


def test_allocator_is_as_the_log_says() -> None:
    (line,) = detect().prepare_process()
    on = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert f"expandable segments {'on' if on else 'off'}" in line
    allocated = torch.zeros(1 << 24, device="cuda")
    results = {segment["is_expandable"] for segment in torch.cuda.memory._snapshot()["segments"]}
    assert allocated.is_cuda and (True in results) == on
