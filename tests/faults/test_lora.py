"""Complete runs with adapters: files, messages, resume, a second run from the exported adapter, refused settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from faults.fork_server import ForkServer

LORA = ["lora.rank=4", "lora.targets=[q_proj, v_proj, down_proj]", "lora.dropout=0.1"]
RUN = ["checkpoint.every=2", "train.eval_every=2", "optim.lr=3e-2"]


def test_a_run_its_resume_and_a_run_from_its_adapter(
    isthmus: ForkServer, sft_args: list[str], model: Path, tmp_path: Path
) -> None:
    first = isthmus(*sft_args, *LORA, *RUN)
    out, base = tmp_path / "out", tmp_path / "base"
    assert first.result["model"] == str(out / "hf") and first.result["adapter"] == str(out / "adapter")
    assert first.result["valid_loss"] < first.result["valid_loss_before"] - 0.1
    # 2 layers: q 32 -> 32, v 32 -> 16, down 64 -> 32.
    numbers = 2 * 4 * (64 + 48 + 96)
    described = f"LoRA of rank 4 on 6 linear layers (q_proj, v_proj, down_proj), {numbers:,} parameters"
    assert described in first.stderr and f"{numbers:,} trainable" in first.stderr
    saved = out / "checkpoints" / "iter_0000002"
    keys = FileSystemReader(saved).read_metadata().state_dict_metadata
    names = {key.removeprefix("optimizer.state.").partition(".")[2] for key in keys if "optimizer.state" in key}
    assert {key for key in keys if key.startswith(("decoder", "embedding", "output_layer"))} == set()
    assert {name.partition(".")[0] for name in names} == {"adapters"} and len(names) == 12

    # The same adapter, bit by bit, after a resume.
    resumed = isthmus(*sft_args, *LORA, *RUN, "--out", tmp_path / "resumed", f"checkpoint.resume={saved}")
    assert resumed.result["steps"] == 4
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "resumed" / "adapter" / name).read_bytes() == (out / "adapter" / name).read_bytes()

    other = [*LORA, *RUN, "--out", tmp_path / "other", f"checkpoint.resume={saved}"]
    assert "other settings:" in isthmus(*sft_args, *other, "lora.rank=8").error(2)
    assert 'lora.modules_to_save [] -> ["norm"]' in isthmus(*sft_args, *other, "lora.modules_to_save=norm").error(2)
    shutil.copytree(model, base)
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    assert f"other weights in {base}" in isthmus(*sft_args, *other, "--model", base).error(2)

    second = isthmus(
        *sft_args, *RUN, "--out", tmp_path / "second", f"lora.path={out / 'adapter'}", "checkpoint.export_merged=false"
    ).result
    assert second["valid_loss_before"] == pytest.approx(first.result["valid_loss"], rel=1e-6)
    assert second["model"] is None and not (tmp_path / "second" / "hf").exists()
    config = json.loads((tmp_path / "second" / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and sorted(config["target_modules"]) == ["down_proj", "q_proj", "v_proj"]
    changed = load_file(out / "hf" / "model.safetensors")
    different = {name for name, tensor in load_file(model / "model.safetensors").items()
                 if not torch.equal(tensor, changed[name])}  # fmt: skip
    assert {name.split(".")[-2] for name in different} == {"q_proj", "v_proj", "down_proj"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora.alpha=16"], "alpha is for adapters, and rank is not set; set rank"),
        (["lora.rank=0"], "lora.rank"),
        (["lora.rank=4", "lora.quantize=nf4", "train.precision=fp8"], "quantize=nf4 multiplies weights of 16 bits in"),
        (["lora.rank=4", "lora.quantize=int8", "lora.init=pissa"], "what is left of the weights would be rounded"),
        (["lora.rank=4", "lora.targets=wq"], "lora.targets: 'wq' is no linear layer of qwen3"),
        (["lora.rank=4", "lora.modules_to_save=q_proj"], "lora.modules_to_save: q_proj is trained as one tensor with"),
        (["lora.rank=4", "lora.modules_to_save=embed_tokens"], "is one tensor with the other end of this model"),
        (["lora.rank=4", "lora.dora=true", "lora.dropout=0.1"], "dropout=0.1 with dora=true would multiply all base"),
        (["lora.rank=4", "parallel.fsdp=true"], "lora with parallel.fsdp is not supported"),
        (["lora.rank=4", "train.freeze=[lm_head.*]"], "train.freeze with lora"),
    ],
)
def test_refused_settings(isthmus: ForkServer, sft_args: list[str], settings: list[str], message: str) -> None:
    assert message in isthmus(*sft_args, *settings).error(2)


@pytest.mark.thorough
def test_adapters_learn_with_the_default_learning_rate(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    args = [word for word in sft_args if not word.startswith("optim.")]
    steps = ["lora.rank=8", "train.steps=60", "data.packing=false"]
    done = isthmus(*args, *steps)
    assert "learning rate 0.0002, 3% warm-up: the default of sft with adapters" in done.stderr
    full = isthmus(*args, *steps, "optim.lr=2e-5", "--out", tmp_path / "full").result
    learned, barely = (run["valid_loss_before"] - run["valid_loss"] for run in (done.result, full))
    assert learned > 0.02 and learned > 5 * barely
