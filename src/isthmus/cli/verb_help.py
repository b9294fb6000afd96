"""The help of the verbs: groups, examples, the settings that most runs use, and the commands to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.core

from isthmus import __version__
from isthmus.cli.habits import command_answer
from isthmus.config.recipes import RECIPE_SETTINGS
from isthmus.errors import UsageError

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Start here": ("demo", "init", "doctor", "plan"),
    "Training": (*RECIPE_SETTINGS, "launch"),
    "Data": ("prepare", "data"),
    "Models": ("chat", "eval", "convert", "merge", "verify"),
    "Configs and other programs": ("config", "run", "patch"),
    "Measurements": ("report", "bench", "tune"),
    "This command": ("completion", "version"),
}
"""The verbs of ``isthmus --help`` by group."""
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "demo": ("isthmus demo", "isthmus demo --out demo --nproc 1"),
    "doctor": ("isthmus doctor", "isthmus doctor --json"),
    "init": (
        "isthmus init --model Qwen/Qwen3-0.6B --data chats.jsonl",
        "isthmus init --model Qwen/Qwen3-8B --data pairs.jsonl --gpus 8xMI300X --out dpo.yaml optim.lr=1e-6",
    ),
    "plan": (
        "isthmus plan Qwen/Qwen3-8B --gpus 8xH100",
        "isthmus plan preset:llama3.1-70b --gpus 8xMI300X --nodes 2 --recipe sft",
    ),
    "sft": (
        "isthmus sft --model Qwen/Qwen3-0.6B --data chats.jsonl --out runs/a",
        "isthmus sft --model Qwen/Qwen3-8B --data chats.jsonl --out runs/b --nproc 8 lora.rank=16 parallel.tp=2",
    ),
    "dpo": (
        "isthmus dpo --model Qwen/Qwen3-0.6B --data pairs.jsonl --out runs/a",
        "isthmus dpo --model runs/sft/hf --data pairs.jsonl --out runs/b dpo.beta=0.05 optim.lr=1e-6",
    ),
    "kto": (
        "isthmus kto --model Qwen/Qwen3-0.6B --data labels.jsonl --out runs/a",
        "isthmus kto --model runs/sft/hf --data labels.jsonl --out runs/b kto.undesirable_weight=1.3",
    ),
    "reward": (
        "isthmus reward --model Qwen/Qwen3-0.6B --data pairs.jsonl --out runs/a",
        "isthmus reward --model Qwen/Qwen3-4B --data pairs.jsonl --out runs/b --nproc 4 train.epochs=2",
    ),
    "distill": (
        "isthmus distill --model Qwen/Qwen3-0.6B --data chats.jsonl --out runs/a distill.teacher=Qwen/Qwen3-8B",
        "isthmus distill --model small --data chats.jsonl --out runs/b distill.teacher=large distill.top_k=64",
    ),
    "grpo": (
        "isthmus grpo --model Qwen/Qwen3-0.6B --data prompts.jsonl --out runs/a rollout.reward=exact_match",
        "isthmus grpo --model runs/sft/hf --data math.jsonl --out runs/b rollout.reward=my.py:score grpo.loss=gspo",
    ),
    "pretrain": (
        "isthmus pretrain --model preset:qwen3-0.6b --data text.jsonl --out runs/a model.init=random "
        "tokenizer.path=Qwen/Qwen3-0.6B",
        "isthmus pretrain --model Qwen/Qwen3-0.6B --data prepared/text --out runs/b --nproc 8 train.steps=1000",
    ),
    "launch": (
        "isthmus launch slurm sft run.yaml --out runs/a --gpus 8xMI300X launch.nodes=2 launch.queue=gpu --dry-run",
        "isthmus launch ssh sft run.yaml --out runs/a --gpus 8xH100 launch.nodes=2 launch.hosts=[node0,node1]",
    ),
    "prepare": (
        "isthmus prepare text.jsonl prepared/text --tokenizer Qwen/Qwen3-0.6B",
        "isthmus prepare chats.jsonl prepared/chats --kind chat --tokenizer Qwen/Qwen3-0.6B",
        "isthmus prepare s3://bucket/text prepared/text --tokenizer Qwen/Qwen3-0.6B --engine slurm-array --tasks 64",
    ),
    "chat": ("isthmus chat runs/a", "isthmus chat Qwen/Qwen3-0.6B --file prompts.jsonl --out answers.jsonl"),
    "eval": ("isthmus eval runs/a --tasks arc_easy", "isthmus eval Qwen/Qwen3-0.6B --tasks hellaswag --limit 100"),
    "convert": (
        "isthmus convert Qwen/Qwen3-0.6B megatron --to torch_dist",
        "isthmus convert megatron hf --to hf --hf-like Qwen/Qwen3-0.6B",
    ),
    "merge": (
        "isthmus merge Qwen/Qwen3-0.6B runs/lora/adapter merged",
        "isthmus merge base adapter merged --push me/merged",
    ),
    "verify": ("isthmus verify Qwen/Qwen3-0.6B megatron", "isthmus verify model other --logits"),
    "run": (
        "isthmus run Megatron-LM/pretrain_gpt.py --num-layers 2 --mock-data",
        "isthmus run --nproc 2 Megatron-LM/pretrain_gpt.py --load checkpoint",
    ),
    "config": ("isthmus config ls qwen3 lora", "isthmus config show run.yaml --resolved --origin"),
    "data": ("isthmus data view chats.jsonl --tokenizer Qwen/Qwen3-0.6B", "isthmus data view runs/a -n 5"),
    "patch": ("isthmus patch checkpoint-saver --megatron Megatron-LM", "isthmus patch runtime --install"),
    "report": ("isthmus report runs/a runs/b", "isthmus report runs/a --live"),
    "bench": ("isthmus bench preset:rocm-table", "isthmus bench run.yaml --nproc 8"),
    "tune": ("isthmus tune run.yaml", "isthmus tune run.yaml --out tune.json"),
    "version": ("isthmus version", "isthmus --version"),
    "completion": (
        'eval "$(isthmus completion bash)"',
        "isthmus completion fish > ~/.config/fish/completions/isthmus.fish",
    ),
}
"""Two commands for each verb, or three."""
SETTINGS: Mapping[str, str] = {
    "optim.lr": "peak learning rate",
    "train.epochs": "passes over the data; or train.steps",
    "train.global_batch_size": "sequences, pairs or answers of a step, over all ranks",
    "train.micro_batch_size": "those of a rank in a forward pass",
    "data.seq_length": "longest sequence in tokens",
    "lora.rank": "train LoRA adapters of this rank",
    "parallel.tp": "tensor parallel ranks; also pp, cp, ep and fsdp",
    "train.recompute": "full: less memory, slower",
    "train.eval_every": "steps between validations",
    "checkpoint.every": "steps between checkpoints",
}
"""The settings that most runs set."""


class VerbGroup(typer.core.TyperGroup):
    """Lists its commands by group, and answers commands of other programs."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                limit = formatter.width - 6 - width
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (answer := command_answer(args[0])) is not None:
            raise UsageError(answer)
        return super().resolve_command(ctx, args)


def epilog(verb: str) -> str:
    """Examples and, for a training verb, settings: paragraphs whose lines are not joined."""
    lines = ["Examples:", *(f"  {command}" for command in EXAMPLES[verb])]
    paragraphs = ["\b\n" + "\n".join(lines)]
    if verb in RECIPE_SETTINGS:
        width = max(map(len, SETTINGS))
        rows = [f"  {name:<{width}}  {text}" for name, text in SETTINGS.items()]
        paragraphs.append("\b\n" + "\n".join(["Settings of most runs, as name=value:", *rows]))
        paragraphs.append("All settings: docs/reference/config.md, or `isthmus config schema`.")
    return "\n\n".join(paragraphs)


def next_steps(folder: Path) -> str:
    """What ``isthmus`` alone prints: the next commands, for a folder with data, a config, or runs."""
    rows = [*_rows(folder), ("isthmus --help", "all commands"), ("isthmus COMMAND --help", "options and examples")]
    width = max(len(command) for command, _ in rows)
    lines = [f"isthmus {__version__}: trains Hugging Face models on Megatron-Core", "", "Next:"]
    return "\n".join([*lines, *(f"  {command:<{width}}  {what}" for command, what in rows)])


def _rows(folder: Path) -> Iterator[tuple[str, str]]:
    config = folder / "run.yaml"
    if config.is_file():
        recipe = _recipe(config)
        yield f"isthmus {recipe} run.yaml", "start the run of run.yaml"
    if (run := _newest_run(folder)) is not None:
        name = shlex.quote(str(run.relative_to(folder)))
        if (run / "hf").is_dir():
            yield f"isthmus chat {name}", "talk to the model of the last run"
        else:
            recipe = _recipe(run / "config.yaml")
            yield f"isthmus {recipe} {name}/config.yaml --out {name}", "continue the last run, which stopped"
        yield f"isthmus report {name}", "its curves, data and settings as a page"
    if not config.is_file():
        yield "isthmus demo", "train and export a small model here, without network"
        yield "isthmus init", "look at your data and write the config of a first run"
    yield "isthmus doctor", "check what this machine can train"


def _recipe(config: Path) -> str:
    """The first line of a config by ``isthmus init`` that names its recipe; sft for other configs."""
    with config.open(errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "recipe" and (recipe := value.partition("#")[0].strip()) in RECIPE_SETTINGS:
                return recipe
    return "sft"


def _newest_run(folder: Path) -> Path | None:
    configs = [path for pattern in ("*/config.yaml", "runs/*/config.yaml") for path in folder.glob(pattern)]
    runs = [path.parent for path in configs if (path.parent / "hf").is_dir() or (path.parent / "checkpoints").is_dir()]
    return max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime, default=None)
