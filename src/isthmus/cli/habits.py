"""Answers to commands and options of other programs: the command or the setting of Isthmus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.config.recipes import RECIPE_SETTINGS

_RL = "`isthmus grpo` trains on rewards of the model's own answers"
COMMANDS: Mapping[str, str] = {
    word: answer
    for words, answer in (
        ("train", "the training commands are sft, dpo, kto, reward, distill, grpo and pretrain, such as `isthmus sft`"),
        ("finetune fine-tune ft tuning", "`isthmus sft` fine-tunes a model on chats"),
        (
            "lora qlora peft",
            "`isthmus sft ... lora.rank=16` trains LoRA adapters; lora.quantize=nf4 also quantizes the other weights "
            "(QLoRA)",
        ),
        ("pt pretraining", "`isthmus pretrain` trains a model on text"),
        ("rm", "`isthmus reward` trains a reward model"),
        ("rlhf", f"`isthmus dpo`, `isthmus kto` and `isthmus reward` train on preferences; {_RL}"),
        ("orpo", "`isthmus dpo ... dpo.loss=orpo` is ORPO"),
        ("simpo", "`isthmus dpo ... dpo.loss=simpo` is SimPO"),
        ("cpo", "`isthmus dpo ... dpo.loss=cpo` is CPO"),
        ("gkd", "`isthmus distill` learns the probabilities of a teacher"),
        ("rl", _RL),
        ("ppo", f"{_RL}; it has no critic"),
        ("rloo", "`isthmus grpo ... grpo.loss=rloo` is RLOO"),
        ("dapo", "`isthmus grpo ... grpo.loss=dapo` is DAPO"),
        ("gspo", "`isthmus grpo ... grpo.loss=gspo` is GSPO"),
        (
            "export save",
            "a run exports its model to OUT/hf; `isthmus convert CHECKPOINT OUT --to hf` exports a checkpoint, and "
            "`isthmus merge` a LoRA adapter",
        ),
        (
            "serve deploy api vllm-serve webui",
            "Isthmus has no server; the folder OUT/hf of a run is a Hugging Face model for vLLM, SGLang and others, "
            "and `isthmus chat MODEL` answers in the terminal",
        ),
        ("webchat infer inference generate predict", "`isthmus chat MODEL` answers prompts in the terminal"),
        ("evaluate", "`isthmus eval` runs tasks of lm-evaluation-harness"),
        (
            "test",
            "`isthmus eval` runs tasks of lm-evaluation-harness; data.test_files gives the loss of a test set",
        ),
        (
            "preprocess tokenize preprocess_data",
            "`isthmus prepare` tokenizes data once; a run also tokenizes its data itself",
        ),
        ("merge-lora merge_lora", "`isthmus merge` merges a LoRA adapter into its base model"),
        (
            "quantize",
            "lora.quantize=nf4 quantizes the frozen weights of a LoRA run; exports have the dtype of the source",
        ),
        ("env", "`isthmus doctor` checks this machine; a run writes environment.json"),
        ("presets list ls", "`isthmus config ls` lists presets"),
        ("models", "`isthmus config ls` lists presets, docs/reference/families.md the supported models"),
        ("login", "`hf auth login`, or HF_TOKEN, gives access to the Hub"),
        ("download", "--model ORG/NAME downloads a model from the Hub, --data hf:ORG/NAME data"),
        ("upload push", "--push NAMESPACE/NAME of a run, convert or merge uploads a model"),
        ("resume", "the same training command with the same --out resumes from its last checkpoint"),
        ("estimate", "`isthmus plan MODEL --gpus 8xH100` estimates memory and speed"),
        ("torchrun", "--nproc N starts N ranks, and `torchrun ... -m isthmus` works as well"),
    )
    for word in words.split()
}
"""Commands of other programs, and what does the same."""
_EXAMPLE = {"lora.rank": "16", "train.recompute": "full", "parallel.fsdp": "true", "lora.quantize": "nf4"}
"""Values of settings that are switches in other programs."""
_SHORT = {
    "lora": "lora.rank",
    "use_lora": "lora.rank",
    "resume_from_checkpoint": "no, a run resumes from the newest checkpoint in --out, or from checkpoint.resume=FOLDER",
    "qlora": "lora.quantize",
    "fp8": "train.precision, =fp8",
    "fp32": "train.precision, =fp32",
    "batch_size": "train.global_batch_size",
    "max_length": "data.seq_length",
    "max_seq_len": "data.seq_length",
    "max_seq_length": "data.seq_length",
    "epoch": "train.epochs",
    "resume": "checkpoint.resume",
    "gpus": "--nproc",
    "num_gpus": "--nproc",
    "num_processes": "--nproc",
    "nproc_per_node": "--nproc",
    "dp": "no, data parallel ranks are those that parallel.tp, pp and cp leave",
    "config": "no, name the file without an option: isthmus sft run.yaml",
    "config_file": "no, name the file without an option: isthmus sft run.yaml",
}
"""Names that are not in the tables of other programs, or mean something else there."""


def command_answer(name: str) -> str | None:
    """The error for a command of another program; None for other words."""
    answer = COMMANDS.get(name.lower())
    return None if answer is None else f"isthmus has no command {name!r}: {answer}."


def option_answer(verb: str, option: str, argv: Sequence[str]) -> str | None:
    """The error for an unknown option of a training verb that is a setting here, or an option of another program.

    ``argv`` has the value of the option: ``--lr 1e-4`` or ``--lr=1e-4``.
    """
    if verb not in RECIPE_SETTINGS:
        return None
    name = option.lstrip("-").replace("-", "_").lower()
    answer = _setting(name, verb)
    if answer is None:
        return None
    setting, _, explanation = answer.partition(", ")
    if setting == "no":
        return f"isthmus has no {option}: {explanation}."
    value = _value(option, argv)
    if explanation.startswith("="):
        fixed, _, more = explanation[1:].partition(" ")
        value, explanation = (value if more and value else fixed.rstrip(",")), ""
    if explanation:
        return f"isthmus has no {option}: see the setting {setting}, {explanation}. Settings are given as {setting}=..."
    return f"isthmus has no {option}. Write {_written(name, setting, value)}"


def _written(name: str, setting: str, value: str | None) -> str:
    from isthmus.config.setting_errors import GIVEN_BY

    option = next((option for option, key in GIVEN_BY.items() if ".".join(key) == setting), None)
    if setting.startswith("--") or option is not None:
        return f"{option or setting} {value or '...'} instead."
    example = _EXAMPLE.get(setting, "...")
    if value is None:
        return f"{setting}={example}, without dashes."
    if _is_valid(setting, value):
        return f"{setting}={value}, without dashes."
    return f"{' '.join(_translated(name, value)) or f'{setting}={example}'}, without dashes."


def _is_valid(setting: str, text: str) -> bool:
    """Whether the setting can have this value, in some run."""
    from pydantic import ValidationError

    from isthmus.config.schema import RunConfig
    from isthmus.config.yaml_text import Syntax, read_value

    section, _, name = setting.partition(".")
    kind = RunConfig.model_fields[section].annotation
    if not name or kind is None:
        return True
    is_list = "," in text and text[:1] not in ("[", "{")
    try:
        return getattr(kind.model_validate({name: read_value(text)}), name) != (text,) or not is_list
    except Syntax:
        return False
    except ValidationError as error:  # also about other settings, which the command may have
        return all(part["loc"][:1] != (name,) for part in error.errors()) and not is_list


def _translated(name: str, value: str) -> list[str]:
    """The settings of an option whose values have other names, such as torch_dtype."""
    from isthmus.config.dialects.trainers.translate_trainer import translate_option

    return [f"{setting}={_yaml(new)}" for setting, new in translate_option(name, value).items()]


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _setting(name: str, verb: str) -> str | None:
    """The answer to a name, as in the tables of other programs."""
    from isthmus.config.setting_errors import dotted, other_names, settings

    known = [dotted(key) for key in settings()]
    if name in known:
        return name
    if (answer := _SHORT.get(name)) is not None:
        return answer
    same = [setting for setting in known if setting.rpartition(".")[2] == name]
    mine = [setting for setting in same if setting.startswith(f"{verb}.")]
    if len(mine or same) == 1 and name not in RECIPE_SETTINGS:
        return (mine or same)[0]
    return other_names().get(name)


def _value(option: str, argv: Sequence[str]) -> str | None:
    """The word of ``--option WORD`` or ``--option=WORD``."""
    for place, word in enumerate(argv):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option:
            following = argv[place + 1 : place + 2]
            return following[0] if following and not following[0].startswith("-") else None
    return None
