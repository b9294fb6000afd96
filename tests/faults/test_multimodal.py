"""A complete run of a multimodal model: its checkpoints and its export have the towers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from faults.fork_server import ForkServer
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from ranks.tiny import build_model_folder

DATA = ["data.mock=true", "data.seq_length=24", "tokenizer.type=NullTokenizer", "tokenizer.vocab_size=70"]
TRAIN = ["train.steps=4", "train.global_batch_size=4", "train.precision=fp32", "optim.lr=0.01", "checkpoint.every=2"]


def test_towers_are_in_checkpoints_and_exports(isthmus: ForkServer, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "gemma3")
    args = ["pretrain", "--model", str(model), *DATA, *TRAIN, "--json"]
    out = tmp_path / "out"
    assert isthmus(*args, "--out", str(out)).result["steps"] == 4
    source, export = (load_file(folder / "model.safetensors") for folder in (model, out / "hf"))
    assert source.keys() == export.keys()
    equal = {name for name in source if torch.equal(source[name], export[name])}
    assert equal == {name for name in source if not name.startswith("language_model.")}
    network, loading = AutoModelForImageTextToText.from_pretrained(out / "hf", output_loading_info=True)
    assert type(network).__name__ == "Gemma3ForConditionalGeneration" and not any(loading.values())

    convert(out / "checkpoints", tmp_path / "converted")
    assert compare_models(tmp_path / "converted", out / "hf").family == "gemma3"
    step = out / "checkpoints/iter_0000002"
    assert isthmus(*args, "--out", str(tmp_path / "again"), f"checkpoint.resume={step}").result["steps"] == 4
    assert compare_models(tmp_path / "again/hf", out / "hf").family == "gemma3"

    alone = isthmus(*args, "--out", str(tmp_path / "random"), "model.init=random", "train.steps=2").result
    assert "vision" not in " ".join(load_file(Path(alone["model"]) / "model.safetensors"))
