"""Commands and numeric results on a GPU (CUDA or ROCm); run with ``make gpu``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isthmus.platforms.detect import detect

pytestmark = pytest.mark.gpu

TEXTS = ["one two three four five", "six seven eight nine ten", "how are you today", "all is well, thank you"] * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from isthmus.hf.tiny_model import build_tiny_qwen3

    folder = tmp_path_factory.mktemp("gpu") / "model"
    return build_tiny_qwen3(folder, TEXTS, vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


def test_optimizer_offload_gives_same_weights_with_less_memory() -> None:
    from isthmus.engine.optim.adamw import CpuOffloadAdamW, create_state

    results, used_bytes, peak_bytes = [], [], []
    for offload in (False, True):
        torch.manual_seed(0)
        weights = [torch.randn(size, device="cuda") for size in (1 << 20, 7)]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        adam = torch.optim.AdamW(weights, lr=0.1, fused=True)
        if offload:
            adam = CpuOffloadAdamW.from_adamw(adam)
        create_state(adam)
        peak_bytes.append(torch.cuda.max_memory_allocated() - before)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            adam.step()
        results.append([weight.cpu() for weight in weights])
        used_bytes.append(torch.cuda.memory_allocated() - before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert used_bytes[1] < used_bytes[0] - (1 << 22)
    assert peak_bytes[0] > 1 << 23 and peak_bytes[1] < 1 << 16  # moments are never made on the GPU


@pytest.mark.parametrize(
    ("precision", "fsdp"),
    [("fp32", "false"), ("bf16", "false"), ("fp16", "false"), ("fp8", "false"), ("fp32", "true"), ("bf16", "true")],
)
def test_sft_on_device_reduces_loss(model: Path, tmp_path: Path, precision: str, fsdp: str) -> None:
    supported, why = detect().supports(precision)
    if not supported:
        pytest.skip(why)
    data = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two three four"}]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(32)))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "isthmus", "sft", "--model", str(model), "--data", str(data), "--out", str(out)]
    settings = ["train.steps=20", "optim.lr=1e-2", "data.seq_length=64", f"train.precision={precision}"]
    settings.append(f"parallel.fsdp={fsdp}")
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "platform cuda" in done.stderr or "platform rocm" in done.stderr
    losses = [
        json.loads(line)["valid_loss"]
        for line in (out / "metrics.jsonl").read_text().splitlines()
        if "valid_loss" in line
    ]
    assert losses[-1] < 0.5 * losses[0]
    assert (out / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("backward", [False, True])
def test_fp8_matmul_equals_reference(scaling: str, backward: bool) -> None:
    from isthmus.engine.linear.fp8_linear import emulated_scaled_mm, scaled_mm
    from isthmus.engine.linear.fp8_quantization import quantize

    platform = detect()
    supported, why = platform.supports("fp8")
    if not supported:
        pytest.skip(why)
    e4m3, e5m2 = platform.fp8_types()
    torch.manual_seed(0)
    a = quantize(torch.randn(40, 64, device="cuda"), e5m2 if backward else e4m3, scaling)
    b = quantize(torch.randn(48, 64, device="cuda"), e4m3, scaling)
    got, expected = scaled_mm(a, b, torch.bfloat16, fast=not backward), emulated_scaled_mm(a, b, torch.float32)
    assert (got.float() - expected).norm() < 0.01 * expected.norm()


def test_dropout_masks() -> None:
    """Masks of hidden states are those of a CPU; those of attention kernels depend on their key only."""
    from dataclasses import replace

    from isthmus.config.schema.parallel import ParallelConfig
    from isthmus.data.batching.packed_batch import DropoutKeys, PackedBatch
    from isthmus.engine.attention.backends.sdpa import sdpa_attention
    from isthmus.engine.layers.dropout import AttentionDropout, keep_mask
    from isthmus.engine.parallel.process_groups import close_groups, open_groups

    rows, columns = torch.randint(-(2**31), 2**31, (2, 512), dtype=torch.int64).int()
    mask = keep_mask(rows[:, None], columns, 0.1)
    assert torch.equal(keep_mask(rows.cuda()[:, None], columns.cuda(), 0.1).cpu(), mask)
    q, k, v = (torch.ones(64, 2, *heads, 64, device="cuda", dtype=torch.bfloat16) for heads in ((2,), (), ()))
    batch = PackedBatch.for_inference([torch.zeros(64, dtype=torch.int64)])

    def attended(seed: int) -> torch.Tensor:
        keyed = replace(batch, dropout=DropoutKeys(seed, torch.zeros(64, dtype=torch.int64)))
        return sdpa_attention(q, k, v, (64,), dropout=AttentionDropout(0.25, 1, 0, keyed)).float()

    open_groups(ParallelConfig(), detect(), seed=0)
    try:
        first = attended(1)
        assert torch.equal(attended(1), first) and not torch.equal(attended(2), first)
        mean = torch.stack([attended(seed) for seed in range(200)]).mean(0)
    finally:
        close_groups()
    assert (mean - 1).abs().max() < 0.25
