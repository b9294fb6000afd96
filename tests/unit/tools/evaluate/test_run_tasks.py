"""The weights of an evaluated checkpoint are the Hugging Face tensors that it was converted from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isthmus.convert.checkpoint_source import CheckpointSource
from isthmus.convert.open_model import Format
from isthmus.convert.transfer import convert
from isthmus.errors import MissingInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.tools.evaluate import run_tasks
from isthmus.tools.evaluate.run_tasks import evaluate_tasks, plan_of
from isthmus.tools.evaluate.task_settings import TaskSettings
from ranks.tiny import build_model_folder


@pytest.mark.slow_cases("qwen3-torch_dist", "gpt_oss-torch_dist")
@pytest.mark.parametrize(
    ("family", "to"),
    [("qwen3", "torch_dist"), ("gpt2", "torch"), ("gpt_oss", "torch_dist")],
)
def test_tensors_equal_those_of_the_source(tmp_path: Path, family: str, to: Format) -> None:
    folder = build_model_folder(tmp_path / "hf", family, num_hidden_layers=2)
    convert(folder, tmp_path / "megatron", to)
    source = plan_of(str(tmp_path / "megatron"), ())[1].weights.source
    assert isinstance(source, CheckpointSource)
    expected = load_file(folder / "model.safetensors")
    assert source.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (source.tensors[name].dtype, source.tensors[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(source.read(name), tensor), name
    name, tensor = max(expected.items(), key=lambda item: item[1].dim())
    part = torch.empty_like(tensor[1:3])
    assert torch.equal(source.read(name, (slice(1, 3),), into=part), tensor[1:3]) and torch.equal(part, tensor[1:3])


@pytest.mark.slow
def test_data_of_a_task_that_is_neither_cached_nor_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is built, and without the repeated requests of the library."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: eval)")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(run_tasks, "join_and_build", None)
    monkeypatch.setattr("time.sleep", None)
    folder = build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1, vocab_size=300)
    save_tokenizer(train_tokenizer(["the sea"], vocab_size=300), folder)
    task = {"task": "absent", "dataset_path": "org/absent", "output_type": "generate_until", "test_split": "test"}
    (tmp_path / "absent.yaml").write_text(json.dumps(task | {"doc_to_text": "a", "doc_to_target": "b"}))
    settings = TaskSettings(model=str(folder), tasks=["absent"], include_path=[tmp_path])
    with pytest.raises(MissingInput, match="data of task absent is not in the Hub cache, and the Hub does not answer"):
        evaluate_tasks(settings)


def test_texts_longer_than_learned_positions(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: eval)")
    folder = build_model_folder(tmp_path, "gpt2", num_hidden_layers=2)
    with pytest.raises(UsageError, match=r"--max-length 100000 is more than the \d+ learned positions"):
        evaluate_tasks(TaskSettings(model=str(folder), tasks=["any"], max_length=100000))
