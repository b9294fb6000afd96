"""``isthmus config from-megatron`` and ``from-primus`` print configs of the described models."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from isthmus.cli.main import parse_and_run
from isthmus.config.load import load_config
from isthmus.errors import MissingInput, UsageError
from isthmus.families.registry import family_for
from unit.config.dialects.examples import DEEPSEEK_V2_LITE, GPT_345M, LLAMA3_8B, MIXTRAL, MODEL_FILES, experiment


def parameters(file: Path) -> int:
    config = load_config(None, file)
    family = family_for(config.model.config)
    return sum(map(prod, family.hf_shapes(family.to_architecture(config.model.config)).values()))


@pytest.mark.parametrize(
    ("words", "family", "count"),
    [
        (LLAMA3_8B, "llama", 8_030_261_248),
        (MIXTRAL, "mixtral", 46_702_792_704),
        (DEEPSEEK_V2_LITE, "deepseek_v2", 15_706_484_224),
        (GPT_345M, "gpt2", 354_823_168),
    ],
)
def test_a_file_of_arguments_becomes_a_config(
    words: list[str], family: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "# of the launcher\n" + " \\\n  ".join(words) + "  # and ours"
    (tmp_path / "train.txt").write_text(text)
    assert parse_and_run(["config", "from-megatron", str(tmp_path / "train.txt"), "--log-interval", "7"]) == 0
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


@pytest.mark.processes
def test_run_runs_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = [
        "#!/bin/bash",
        "mkdir -p $1",
        " ".join(["ARGS=(", *LLAMA3_8B[6:], ")"]),
        "torchrun pretrain_gpt.py ${ARGS[@]}",
    ]
    Path("train.sh").write_text("\n".join([*script[:3], script[3] + " --save $1"]))
    with pytest.raises(UsageError, match=r"train.sh is a script.* With --run train.sh bash runs it"):
        parse_and_run(["config", "from-megatron", "train.sh", "mine"])
    assert not Path("mine").exists()
    assert parse_and_run(["config", "from-megatron", "--run", "train.sh", "mine", "--micro-batch-size", "4"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    config = load_config(None, Path("run.yaml"))
    assert (config.out, config.train.micro_batch_size, Path("mine").is_dir()) == ("mine", 4, True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "quote.txt").write_text("--save 'x")
    for name, error, message in (
        ("none.txt", MissingInput, "put -- before arguments"),
        ("train.txt", UsageError, "is not UTF-8"),
        ("quote.txt", UsageError, "No closing quotation"),
    ):
        with pytest.raises(error, match=message):
            parse_and_run(["config", "from-megatron", str(tmp_path / name)])
    with pytest.raises(UsageError, match="give the arguments"):
        parse_and_run(["config", "from-megatron"])


def test_a_model_without_a_family_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="squared_relu=True"):
        parse_and_run(["config", "from-megatron", "--", *GPT_345M, "--squared-relu"])
