"""``isthmus config from-megatron``, ``from-primus`` and ``to-megatron``: configs of the described models, and back."""

from __future__ import annotations

import json
import shlex
from math import prod
from pathlib import Path

import pytest

from isthmus.cli.main import parse_and_run
from isthmus.config.load import load_config
from isthmus.config.schema import RunConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.families.registry import family_for
from unit.config.dialects.examples import DEEPSEEK_V2_LITE, GPT_345M, LLAMA3_8B, MIXTRAL, MODEL_FILES, experiment
from unit.hf.tokenizer.gpt2_files import write_gpt2_files


def parameters(file: Path) -> int:
    config = load_config(None, file)
    family = family_for(config.model.config)
    return sum(map(prod, family.hf_shapes(family.to_architecture(config.model.config)).values()))


@pytest.mark.slow
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


def config_of(capsys: pytest.CaptureFixture[str], *words: str) -> RunConfig:
    """The config that ``isthmus config <words>`` prints, which is written to ``run.yaml``."""
    assert parse_and_run(["config", *words]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    return load_config(None, Path("run.yaml"))


@pytest.mark.slow
@pytest.mark.sweep_cases("source2", "source3", "llama3.1_8B")
@pytest.mark.parametrize("source", [LLAMA3_8B, MIXTRAL, DEEPSEEK_V2_LITE, GPT_345M[:-4], "llama3.1_8B", "mixtral_tiny"])
def test_a_config_as_arguments_is_read_as_the_same_config(
    source: list[str] | str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(source, str):
        for name, text in MODEL_FILES.items():
            Path(name).write_text(text)
        Path("first.yaml").write_text(experiment(source))
        first = config_of(capsys, "from-primus", "first.yaml")
    else:
        Path("megatron.txt").write_text(shlex.join(source))
        first = config_of(capsys, "from-megatron", "megatron.txt")
    assert parse_and_run(["config", "to-megatron", "run.yaml"]) == 0
    Path("megatron.txt").write_text(capsys.readouterr().out)
    assert config_of(capsys, "from-megatron", "megatron.txt") == first


@pytest.mark.slow
def test_settings_without_an_argument_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "{recipe: pretrain, out: x, model: {path: 'preset:qwen3-0.6b', init: random}, data: {files: [a.txt]}}"
    )
    more = ["train.steps=9", "checkpoint.keep=5", "train.precision=fp8", "train.fp8_scaling=rowwise"]
    more.append("train.deterministic=true")
    assert parse_and_run(["config", "to-megatron", str(file), *more]) == 0
    out, err = capsys.readouterr()
    assert "--qk-layernorm\n" in out and "--train-iters 9\n" in out and "--fp8-format hybrid\n" in out
    names = {line.split(" (")[0] for line in err.splitlines()}
    assert (
        "--deterministic-mode\n" in out
        and "--eval-iters 100\n" in out
        and any("evaluates the whole validation set" in line for line in err.splitlines())
    )
    assert parse_and_run(["config", "to-megatron", str(file), "train.steps=9", "data.valid_fraction=0"]) == 0
    assert "--eval-iters 0\n" in capsys.readouterr().out
    assert names >= {"checkpoint.keep=5", "train.fp8_scaling=rowwise", "a.txt", "tokenizer.path"}
    words = ["train.steps=9", "train.precision=fp8", "train.fp8_scaling=mxfp8"]
    assert parse_and_run(["config", "to-megatron", str(file), *words]) == 0
    out, err = capsys.readouterr()
    assert "--fp8-recipe mxfp8\n" in out and "fp8_scaling" not in err
    for words, message in (
        (["train.epochs=2"], "Megatron-LM counts steps. Give train.steps=N"),
        (["train.steps=9", "recipe=kto"], "recipe kto: Megatron-LM's arguments have no such training"),
        (["train.steps=9", "model.config.rope_scaling={rope_type: linear, factor: 2.0}"], "no option for rope scaling"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_and_run(["config", "to-megatron", str(file), *words])


@pytest.mark.slow
def test_files_of_gpt2_give_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_gpt2_files(tmp_path / "gpt2", ["the sea is blue " * 9], prefix="gpt2-")
    place = GPT_345M.index("--vocab-file")
    words = [*GPT_345M[:place], *GPT_345M[place + 4 :], "--vocab-file", f"{folder}/gpt2-vocab.json", "--merge-file"]
    args = ["config", "from-megatron", "--json", "--"]
    assert parse_and_run([*args, *words, f"{folder}/gpt2-merges.txt"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["tokenizer"] == {"path": str(folder), "type": "GPT2BPETokenizer"}
    assert config["model"]["config"]["vocab_size"] == len(json.loads((folder / "gpt2-vocab.json").read_text()))
    with pytest.raises(UsageError, match="must be in one folder"):
        parse_and_run([*args, *words, "merges.txt"])


def test_comments_and_quotes_of_a_file_of_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"# don't\n{shlex.join(GPT_345M)} \\\n  # more\n --save 'runs/a #1' --load x#2  # \"end"
    (tmp_path / "train.txt").write_text(text)
    assert parse_and_run(["config", "from-megatron", "--json", str(tmp_path / "train.txt")]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["out"], config["checkpoint"]["resume"]) == ("runs/a #1", "x#2")


@pytest.mark.slow
def test_settings_and_data_win_over_an_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = experiment("llama3.1_8B", "\ndisable_wandb: false\ndisable_mlflow: true\ndisable_tensorboard: true")
    Path("first.yaml").write_text(text.replace("mock_data: true", ""))
    with pytest.raises(UsageError, match=r"^data.files  is missing: .* --data or data.files="):
        parse_and_run(["config", "from-primus", "first.yaml"])
    words = ["from-primus", "first.yaml", "--data", "a.jsonl", "train.steps=3", "model.config.vocab_size=99"]
    config = config_of(capsys, *words)
    assert (config.data.files, config.train.steps, config.model.config["vocab_size"]) == (("a.jsonl",), 3, 99)
    assert (config.model.config["initializer_range"], config.logging.to) == (0.008, ())
    printed = Path("run.yaml").read_text()
    assert "# - disable_wandb: false (unsupported): The trackers are" in printed and "disable_mlflow" not in printed
    assert "steps: 3  # command line" in printed
    Path("first.yaml").write_text(text.replace("min_lr: 0.0", ""))
    with pytest.raises(UsageError, match=r"^pre_trainer, default of Primus: min_lr: 2.5e-05  optim.min_lr"):
        parse_and_run(["config", "from-primus", "first.yaml"])


@pytest.mark.slow
def test_an_experiment_becomes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in MODEL_FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "first.yaml").write_text(experiment("llama3_8B"))
    assert parse_and_run(["config", "from-primus", str(tmp_path / "first.yaml")]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert parameters(tmp_path / "run.yaml") == 8_030_261_248
    assert "not done" not in (tmp_path / "run.yaml").read_text()


@pytest.mark.slow
def test_arguments_alone_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    )
    words += (
        " --train-iters 3 --micro-batch-size 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
    )
    assert parse_and_run(["config", "from-megatron", "--json", "--", *words.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["config"]["train"]["global_batch_size"] == 8
    assert printed["config"]["model"]["config"]["vocab_size"] == 100
    assert printed["command"] == "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 -m isthmus pretrain run.yaml"
    with pytest.raises(UsageError, match="size of the vocabulary"):
        parse_and_run(["config", "from-megatron", *words.split()[:-4]])


@pytest.mark.processes
def test_run_runs_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = [
        "#!/bin/bash",
        "install -d $1",
        " ".join(["ARGS=(", *LLAMA3_8B[6:], ")"]),
        "torchrun pretrain_gpt.py ${ARGS[@]}",
    ]
    Path("train.sh").write_text("\n".join([*script[:3], script[3] + " --save $1"]))
    with pytest.raises(UsageError, match=r"(?s)train.sh: line 2: install: command not found.*With --run train.sh bash"):
        parse_and_run(["config", "from-megatron", "train.sh", "mine"])
    assert not Path("mine").exists()
    assert parse_and_run(["config", "from-megatron", "--run", "train.sh", "mine", "--micro-batch-size", "4"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    config = load_config(None, Path("run.yaml"))
    assert (config.out, config.train.micro_batch_size, Path("mine").is_dir()) == ("mine", 4, True)


@pytest.mark.processes
def test_errors_name_lines_and_mock_data_needs_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        "#!/bin/bash",
        "mkdir -p tokenizer_llama3  # the script downloads --nothing into it",
        "ARGS='--num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --disable-bias-linear'",
        'ARGS="$ARGS --position-embedding-type rope --normalization RMSNorm --hidden-dropout 0 \\',
        "  --attention-dropout 0 \\",
        '  --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer_llama3"',
        'eval "torchrun pretrain_gpt.py $ARGS --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --train-iters 3"',
    ]
    Path("train.sh").write_text("\n".join(lines))
    assert parse_and_run(["config", "from-megatron", "--run", "train.sh"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    config = load_config(None, Path("run.yaml"))
    assert (config.tokenizer.type, config.tokenizer.vocab_size) == ("NullTokenizer", 128255)
    Path("train.sh").write_text("\n".join(lines).replace("--swiglu", "--swigloo --nothing"))
    with pytest.raises(UsageError) as refused:
        parse_and_run(["config", "from-megatron", "--run", "train.sh"])
    assert "\n  train.sh:3: --swigloo  is not an argument of Megatron-LM (did you mean --swiglu?)" in str(refused.value)
    assert "\n  train.sh:3: --nothing  is not" in str(refused.value)


@pytest.mark.slow
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


def test_scripts_for_other_verbs_name_the_verb() -> None:
    convert = ["python", "tools/checkpoint/convert.py", "--loader", "core", "--load-dir", "my models"]
    with pytest.raises(UsageError, match=r"isthmus convert --loader core --load-dir 'my models'$"):
        parse_and_run(["config", "from-megatron", "--", *convert])
    with pytest.raises(UsageError, match=r"`isthmus config from-megatron --run train\.sh` shows"):
        parse_and_run(["run", "train.sh"])


def test_a_model_without_a_family_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="squared_relu=True"):
        parse_and_run(["config", "from-megatron", "--", *GPT_345M, "--squared-relu"])
