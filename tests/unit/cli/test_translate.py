"""``isthmus config from-megatron`` and ``from-primus`` print configs, whose models are those that were described."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from isthmus.cli.main import parse_and_run
from isthmus.config.load import load_config
from isthmus.errors import MissingInput, UsageError
from isthmus.families.registry import family_for
from unit.config.dialects.scripts import DEEPSEEK_V2_LITE, GPT_345M, LLAMA3_8B, MIXTRAL, MODEL_FILES, experiment


def parameters(file: Path) -> int:
    config = load_config(None, file)
    family = family_for(config.model.config)
    return sum(map(prod, family.hf_shapes(family.to_architecture(config.model.config)).values()))


@pytest.mark.parametrize(
    ("script", "family", "count"),
    [
        (LLAMA3_8B, "llama", 8_030_261_248),
        (MIXTRAL, "mixtral", 46_702_792_704),
        (DEEPSEEK_V2_LITE, "deepseek_v2", 15_706_484_224),
        (GPT_345M, "gpt2", 354_823_168),
    ],
)
def test_a_script_becomes_a_config_of_its_model(
    script: str,
    family: str,
    count: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHECKPOINT_PATH", "ck")
    (tmp_path / "train.sh").write_text(script)
    assert parse_and_run(["config", "from-megatron", str(tmp_path / "train.sh"), "--log-interval", "7"]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    config = load_config(None, tmp_path / "run.yaml")
    assert (config.model.config["model_type"], config.logging.every) == (family, 7)
    assert parameters(tmp_path / "run.yaml") == count


def test_an_experiment_becomes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in MODEL_FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "first.yaml").write_text(experiment("llama3_8B"))
    assert parse_and_run(["config", "from-primus", str(tmp_path / "first.yaml")]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert parameters(tmp_path / "run.yaml") == 8_030_261_248
    assert "not done" not in (tmp_path / "run.yaml").read_text()


def test_arguments_alone_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    )
    words += (
        " --train-iters 3 --micro-batch-size 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
    )
    assert parse_and_run(["config", "from-megatron", "--json", "--", *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["train"]["global_batch_size"] == 8
    assert found["config"]["model"]["config"]["vocab_size"] == 100
    assert found["command"] == "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 -m isthmus pretrain run.yaml"
    with pytest.raises(UsageError, match="size of the vocabulary"):
        parse_and_run(["config", "from-megatron", *words.split()[:-4]])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_bytes(b"\xff\xfe")
    with pytest.raises(MissingInput):
        parse_and_run(["config", "from-megatron", str(tmp_path / "none.sh")])
    with pytest.raises(UsageError, match="is not UTF-8"):
        parse_and_run(["config", "from-megatron", str(tmp_path / "train.sh"), "pretrain_gpt.py"])
    with pytest.raises(UsageError, match="give a script"):
        parse_and_run(["config", "from-megatron"])


def test_a_model_that_no_family_says_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(GPT_345M.replace("$CHECKPOINT_PATH", "ck"))
    with pytest.raises(UsageError, match="squared_relu=True"):
        parse_and_run(["config", "from-megatron", str(tmp_path / "train.sh"), "--squared-relu"])
