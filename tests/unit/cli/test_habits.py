"""What users of other programs type first is answered with the command or the setting of Isthmus."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from isthmus.cli.habits import COMMANDS
from isthmus.cli.main import app, main
from isthmus.cli.verb_help import EXAMPLES, GROUPS, SETTINGS
from isthmus.config.load import load_config
from isthmus.config.recipes import RECIPE_SETTINGS
from isthmus.config.setting_errors import dotted, settings

VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.slow_cases("--learning_rate 1e-4-optim.lr=1e-4")
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--learning_rate 1e-4", "optim.lr=1e-4"),
        ("--learning-rate=1e-4", "optim.lr=1e-4"),
        ("--lr 1e-4", "optim.lr=1e-4"),
        ("--num_train_epochs 3", "train.epochs=3"),
        ("--epochs 3", "train.epochs=3"),
        ("--lora", "lora.rank=16"),
        ("--lora_rank 8", "lora.rank=8"),
        ("--lora_r 8", "lora.rank=8"),
        ("--tp 2", "parallel.tp=2"),
        ("--optim.lr 1e-4", "optim.lr=1e-4"),
        ("--bf16", "train.precision=bf16"),
        ("--report_to none", "logging.to=[]"),
        ("--gradient_checkpointing", "train.recompute=full"),
        ("--gradient_checkpointing true", "train.recompute=full"),
        ("--torch_dtype bfloat16", "train.precision=bf16"),
        ("--report_to wandb,tensorboard", "logging.to=[tensorboard,wandb]"),
        ("--fsdp full_shard", "parallel.fsdp=true"),
        ("--lr_scheduler_type cosine_with_restarts", "optim.schedule=cosine_with_restarts"),
        ("--quantization_bit 4", "lora.quantize=nf4"),
        ("--lora_target q_proj,v_proj", "lora.targets=[q_proj,v_proj]"),
        ("--max_seq_length 512", "data.seq_length=512"),
    ],
)
def test_an_option_of_another_program_is_answered_with_a_setting(
    words: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The setting in the answer is one that a config accepts."""
    assert main(["sft", *words.split()]) == 2
    error = capsys.readouterr().err
    option = words.partition(" ")[0].partition("=")[0]
    assert error == f"isthmus: isthmus has no {option}. Write {answer}, without dashes.\n"
    load_config(
        "sft",
        None,
        [answer, *(["lora.rank=8"] if answer.startswith("lora.") else [])],
        {"model": "m", "data": ["d"], "out": "o"},
    )


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("sft --model_name_or_path Qwen/Qwen3-0.6B", "Write --model Qwen/Qwen3-0.6B instead."),
        ("sft --output_dir runs/a", "Write --out runs/a instead."),
        ("sft --num_gpus 8", "Write --nproc 8 instead."),
        (
            "sft --deepspeed ds.json",
            "see the setting parallel.fsdp, or nothing, since optimizer states are always sharded",
        ),
        ("sft --tf32 true", "isthmus has no --tf32: matmuls of fp32 are exact."),
        ("sft --config run.yaml", "name the file without an option"),
        ("dpo --beta 0.1", "Write dpo.beta=0.1, without dashes."),
        ("kto --beta 0.1", "Write kto.beta=0.1, without dashes."),
        ("sft --ouut x", "Possible options: --out"),
        ("convert --epochs 3", "no such option: --epochs"),
    ],
)
def test_other_options(words: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert answer in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("train", "isthmus sft"),
        ("export", "OUT/hf"),
        ("serve", "vLLM"),
        ("finetune", "isthmus sft"),
        ("lora", "lora.rank"),
    ],
)
def test_a_command_of_another_program_is_answered(word: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--whatever", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"isthmus: isthmus has no command {word!r}: ") and answer in error


def test_answers_name_commands_that_exist() -> None:
    assert not COMMANDS.keys() & VERBS.keys()
    for answer in COMMANDS.values():
        for part in answer.split("`")[1::2]:
            words = part.split()
            assert words[0] != "isthmus" or words[1] in VERBS


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("isthmus ")


def test_help_lists_each_verb_in_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(VERBS)
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:-1] for line in lines if line.rstrip(":") in GROUPS] == list(GROUPS)
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in listed)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_of_a_verb_has_two_examples_that_parse(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    for example in EXAMPLES[verb]:
        assert f"    {example}\n" in text
        words = example.partition(" > ")[0].removeprefix('eval "$(').removesuffix(')"').split()
        assert words[0] == "isthmus"
        if words[1] != verb:
            assert words[1] == "--version"
            continue
        command, rest = VERBS[verb], words[2:]
        if hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(verb, list(rest))
        if verb in RECIPE_SETTINGS:
            overrides = [word for word in rest if "=" in word]
            load_config(verb, None, overrides, {"model": rest[1], "data": ["d"], "out": "o"})


def test_help_of_a_training_verb_has_the_settings_of_most_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dpo", "--help"]) == 0
    text = capsys.readouterr().out
    assert len(SETTINGS) == 10 and SETTINGS.keys() <= {dotted(key) for key in settings()}
    assert all(f"    {name} " in text for name in SETTINGS)


def completions(words: str) -> set[str]:
    """What the command answers bash, whose cursor is at the end of ``words``."""
    environment = {
        "_ISTHMUS_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
    }
    command = [sys.executable, "-m", "isthmus"]
    return set(subprocess.run(command, env=os.environ | environment, capture_output=True, text=True).stdout.split())


@pytest.mark.processes
def test_completion_of_verbs_options_and_settings() -> None:
    assert {"report", "reward", "run"} == completions("isthmus r")
    assert completions("isthmus sft --mod") == {"--model"}
    assert completions("isthmus sft optim.lr") == {"optim.lr=", "optim.lr_multipliers="}


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_ISTHMUS_COMPLETE=complete_{shell}" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
        assert "compopt -o nospace" in script
