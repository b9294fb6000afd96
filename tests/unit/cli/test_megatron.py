"""``isthmus convert`` takes the options of Megatron-LM's tools/checkpoint/convert.py."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from isthmus.cli.main import main
from isthmus.convert.open_model import open_model
from isthmus.convert.verify.compare import compare_models
from ranks.tiny import build_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("models") / "model", "llama", tie_word_embeddings=True)


@pytest.mark.slow
def test_from_hugging_face_to_ranks_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    words = f"""convert --model-type GPT --loader llama_mistral --checkpoint-type hf --saver mcore
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --load-dir {model} --save-dir {there}
        --tokenizer-model {model}/tokenizer.model"""
    assert main(shlex.split(words)) == 0
    line = f"isthmus convert {model} {there} --to torch --tp 2 --pp 2  # not needed: --tokenizer-model\n"
    assert line in capsys.readouterr().err
    assert sorted(path.name for path in (there / "release").iterdir()) == [
        f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(2)
    ]
    again = tmp_path / "again"
    words = f"""convert --model-type GPT --loader=mcore --saver=megatron --target-tensor-parallel-size 1
        --target-pipeline-parallel-size 1 --saver-transformer-impl local --sequence-parallel --bf16
        --load-dir {there} --save-dir {again}"""
    assert main(shlex.split(words)) == 0
    printed = capsys.readouterr().err
    assert "--to torch --tp 1 --pp 1 --spelling local --dtype bf16  # --sequence-parallel changes no file" in printed
    assert open_model(again).weights.dtype("embedding.word_embeddings.weight") == torch.bfloat16
    words = f"convert --loader mcore --saver hf --no-checking --load-dir {there} --save-dir {back} --json"
    assert main(shlex.split(words)) == 0
    printed = capsys.readouterr()
    assert '"destination_format": "hf"' in printed.out and "--no-checking has no effect" in printed.err
    compare_models(model, back)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model-type BERT --loader hf --saver mcore", "--model-type BERT: only decoder-only models (GPT)"),
        ("--loader llama_mistral --checkpoint-type meta --saver mcore", "consolidated.*.pth files are not read"),
        ("--loader mcore --saver hf", "is a Hugging Face folder. Use --loader hf for it"),
        ("--loader llama --saver mcore", "--loader llama is not known. Use hf, or mcore"),
        ("--loader hf --saver nemo", "--saver nemo is not known"),
        ("--loader hf --saver hf --target-tensor-parallel-size 2", "has no parallel layout"),
        ("--loader hf --saver mcore --target-tensor-size 2", "--target-tensor-size 2 is not an option"),
        ("--loader hf --saver mcore --target-tensor-parallel-size 3", "tp=3 does not divide"),
    ],
)
def test_refusals(words: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["convert", *shlex.split(words), "--load-dir", str(model), "--save-dir", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_missing_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("convert --loader hf --saver mcore --load-dir nowhere")) == 2
    assert "required: --save-dir" in capsys.readouterr().err
    assert main(shlex.split(f"convert --loader hf --saver mcore --load-dir {tmp_path}/no --save-dir out")) == 66
    assert main(shlex.split(f"convert --loader mcore --saver mcore --load-dir {tmp_path} --save-dir out")) == 2
    assert "give --target-tensor-parallel-size" in capsys.readouterr().err
