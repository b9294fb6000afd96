"""Models run by transformers at once and layer by layer, the memory check, and rejected models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from isthmus.convert.open_model import OpenedModel, open_model
from isthmus.convert.verify import model_runner
from isthmus.convert.verify.model_runner import float32_bytes, memory_plan, open_network, run_layers
from isthmus.errors import DataError, UsageError
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.transformers_model import TransformersModel
from ranks.tiny import build_model_folder

IDS = torch.arange(22).view(2, 11)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_model(build_model_folder(tmp_path_factory.mktemp("qwen3") / "hf", "qwen3"))


@pytest.mark.slow
@pytest.mark.sweep_cases("deepseek_v3-tied", "qwen3-untied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@torch.no_grad()
def test_layer_by_layer_gives_the_same_logits(family: str, tied: bool, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "hf", family, dtype=torch.bfloat16, tie_word_embeddings=tied)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")(IDS)
    for by_layer in (False, True):
        with open_network(open_model(folder), by_layer=by_layer) as network:
            for _ in range(2):  # the second run loads the weights again
                passed: list[int] = []
                result = run_layers(network, IDS, lambda number, _, to=passed: to.append(number), by_layer=by_layer)
            assert all(parameter.is_meta == by_layer for parameter in network.module.parameters())
        assert torch.equal(result, expected.logits.flatten(0, 1))
        assert passed == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_missing_weights_are_refused(qwen3: OpenedModel, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "hf", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "k_norm" not in name}, folder / "model.safetensors")
    for by_layer in (False, True):
        with pytest.raises(DataError, match=r"finds no tensor for model\.layers\.0\.self_attn\.k_norm\.weight"):
            TransformersModel(ModelFolder.open(folder), ModelFolder.open(folder), by_layer=by_layer)


def test_unknown_model_type_is_refused(qwen3: OpenedModel) -> None:
    with pytest.raises(UsageError, match="no causal language model of type unheard-of"):
        TransformersModel(
            ModelFolder.from_config("model", {"model_type": "unheard-of"}), qwen3.hf_folder, by_layer=False
        )


def test_memory_decides_on_layer_by_layer(qwen3: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = float32_bytes(qwen3)
    needed, largest = sum(sizes.values()), max(sizes.values())
    assert needed == sum(tensor.nbytes for tensor in load_file(qwen3.path / "model.safetensors").values())
    for free, expected in ((2 * needed, False), (2 * needed - 1, True), (largest, True)):
        monkeypatch.setattr(model_runner, "free_bytes", lambda free=free: free)
        by_layer, reason = memory_plan(qwen3, qwen3, by_layer=False)
        assert by_layer == expected and ("are free" in reason) == expected
    monkeypatch.setattr(model_runner, "free_bytes", lambda: largest - 1)
    with pytest.raises(UsageError, match="the largest layer takes"):
        memory_plan(qwen3, qwen3, by_layer=False)


@pytest.mark.processes
def test_verify_without_logits_imports_no_framework(qwen3: OpenedModel) -> None:
    """Conversions do not, either: metadata of torch checkpoints is read without torch.distributed.checkpoint."""
    code = (
        "import json, sys\n"
        "import isthmus.convert.transfer\n"
        "from isthmus.cli.main import main\n"
        "assert main(['verify', sys.argv[1], sys.argv[1]]) == 0\n"
        "print(json.dumps(list(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(qwen3.path)], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "isthmus.convert.verify.compare" in modules
    assert not {"transformers", "megatron", "torch.distributed.checkpoint"} & modules
