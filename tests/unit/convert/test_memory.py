"""The memory of a conversion depends on the chunk size, not on the size of the model or its tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ranks.tiny import build_model_folder

pytestmark = pytest.mark.processes
_CODE = """
import json, sys
from pathlib import Path
import torch
from isthmus.convert import canonical
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def peak(do):
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    do()
    return status("VmHWM") - before

def peaks(model, out):
    return {
        "hf to torch_dist": peak(lambda: convert(model, out / "dist")),
        "torch_dist to legacy": peak(lambda: convert(out / "dist", out / "tp2", "torch", layout=LegacyLayout(tp=2))),
        "legacy to legacy": peak(lambda: convert(out / "tp2", out / "tp4", "torch", layout=LegacyLayout(tp=4))),
        "legacy to hf": peak(lambda: convert(out / "tp4", out / "hf")),
        "merge": peak(lambda: convert(model, out / "merged", "hf", adapter=model / "adapter")),
        "verify": peak(lambda: compare_models(model, out / "tp4")),
    }

canonical.CHUNK_BYTES = int(sys.argv[4])
model, small, out = map(Path, sys.argv[1:4])
peaks(small, out / "small")  # what the libraries themselves take is not counted
print(json.dumps(peaks(model, out / "large")))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured the Linux way")
def test_memory_is_bounded_by_chunks(tmp_path: Path) -> None:
    # Half of it are two tables of 40 MB; layers have matrices of 12 MB that tensor parallelism cuts by columns.
    sizes = {"vocab_size": 40000, "hidden_size": 256, "intermediate_size": 12000, "num_hidden_layers": 2}
    model = build_model_folder(tmp_path / "model", "llama", tie_word_embeddings=False, **sizes)
    small = build_model_folder(tmp_path / "small", "llama")
    size, table = (model / "model.safetensors").stat().st_size, 40000 * 256 * 4
    for folder in (model, small):
        add_adapter(folder)
    (tmp_path / "out" / "small").mkdir(parents=True)
    (tmp_path / "out" / "large").mkdir()
    words = [model, small, tmp_path / "out", 1 << 18]
    command = [sys.executable, "-c", _CODE, *map(str, words)]
    # glibc keeps up to 25 MB of freed buffers of its threads' heaps, differently in each run; so they are unmapped.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    # Enough for the threads' 4 MiB buffers for casts and columns, but not for an embedding table.
    bound = 24 << 20
    assert bound < table < size / 3
    for name, peak in json.loads(done.stdout).items():
        assert peak < bound, name


def add_adapter(model: Path) -> None:
    """A DoRA adapter of the largest matrices, in a subfolder."""
    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["intermediate_size"]
    tensors = {}
    for name, (out, inputs) in {"up_proj": (width, hidden), "down_proj": (hidden, width)}.items():
        prefix = f"base_model.model.model.layers.0.mlp.{name}.lora_"
        tensors |= {f"{prefix}A.weight": torch.ones(4, inputs), f"{prefix}B.weight": torch.ones(out, 4)}
        tensors[f"{prefix}magnitude_vector"] = torch.ones(out)
    (model / "adapter").mkdir()
    save_file(tensors, model / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "use_dora": True}
    (model / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
