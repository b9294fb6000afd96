"""The model card of an export: base model, data, losses, settings, versions, and the code that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from isthmus import __version__
from isthmus.config.schema import RunConfig
from isthmus.config.yaml_text import write_mapping
from isthmus.data.batching.batches import Batches
from isthmus.data.readers.data_names import HUB, hub_name, is_hub_name
from isthmus.errors import counted
from isthmus.hf.card_header import inherited_metadata, render_card
from isthmus.hf.hub import looks_like_id
from isthmus.recipes.data.data_notes import epoch_count
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.plan.run_record import versions
from isthmus.recipes.recipe import Recipe
from isthmus.recipes.registry import recipe_of
from isthmus.train.row_file import rows_until

_UNPUBLISHED = ("recipe", "out", "checkpoint", "logging", "callbacks", "eval", "platform")
"""Settings that do not change the model."""
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank``."""
_CHAT = """\
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
_TEXT = """\
inputs = tokenizer("Once upon a time", return_tensors="pt")"""
_GENERATE = """\
output = model.generate(**inputs, max_new_tokens=200)
print(tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True))"""
_SCORE = """\
messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello, how can I help?"}]
inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
print(model(**inputs).logits.item())"""


def model_card(config: RunConfig, plan: ModelPlan, data: Batches, metrics: Path, step: int, *, adapter: bool) -> str:
    """The text of README.md for the state after ``step``.

    It names no folders of this machine, because it may be published.

    Args:
        data: the training data.
        metrics: ``metrics.jsonl`` of the run.
        adapter: for a folder of PEFT.
    """
    recipe = recipe_of(config)
    base = None if config.model.init == "random" else config.model.path
    from_hub = base is not None and _is_on_hub(base)
    metadata: dict[str, Any] = {} if base is None else inherited_metadata(plan.source.path)
    metadata |= {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if recipe.trains_scores else "text-generation",
        "tags": ["isthmus", "megatron-core", recipe.name, *(["lora"] if config.lora.enabled else [])],
    }
    if from_hub:
        metadata |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    if datasets := _hub_datasets(config):
        metadata["datasets"] = datasets
    origin = "random weights" if base is None else _linked(base)
    name = Path(config.out).absolute().name
    if adapter:
        base_name = base if base is not None and from_hub else str(_public(base or "BASE"))
        usage = _adapter_usage(config, name, base_name, has_experts=plan.architecture.moe is not None)
    else:
        custom_code = bool(plan.family.auto_map) or "auto_map" in plan.source.config
        usage = _model_usage(config, name, custom_code=custom_code)
    sections = [
        f"# {name}",
        f"This {'adapter' if adapter else 'model'} was {recipe.card} with Isthmus {__version__}, on Megatron-Core. "
        f"Base model: {origin}.{_teacher(config) if recipe.has_teacher else ''}",
        *(["## Usage", usage] if usage else []),
        "## Loss",
        _losses(metrics, step),
        "## Data",
        _data(recipe, data, step),
        "## Settings",
        "Settings that differ from the defaults:",
        f"```yaml\n{write_mapping(_changed_settings(config))}```",
        "## Versions",
        "\n".join(f"- {package} {number}" for package, number in versions().items()),
    ]
    return render_card(metadata, "\n\n".join(sections) + "\n")


def _teacher(config: RunConfig) -> str:
    teacher = config.distill.teacher
    return "" if teacher is None else f" It was distilled from the teacher {_linked(teacher)}."


def _is_on_hub(model: str) -> bool:
    return not Path(model).exists() and looks_like_id(model)


def _linked(model: str) -> str:
    """A link to a model of the Hub, or the name of a local folder."""
    return f"[{model}](https://huggingface.co/{model})" if _is_on_hub(model) else str(_public(model))


def _hub_datasets(config: RunConfig) -> list[str]:
    files = [*config.data.files, *(file for data_set in config.data.sets.values() for file in data_set.files)]
    names = (file.removeprefix(HUB).partition(":")[0].split("/") for file in map(hub_name, files) if is_hub_name(file))
    return list(dict.fromkeys("/".join(parts[:2]) for parts in names))


def _losses(metrics: Path, step: int) -> str:
    """A table of the losses up to ``step``, with the other metrics of evaluations."""
    until = list(rows_until(metrics, step))
    valid = [row for row in until if "valid_loss" in row]
    rows = {"validation": valid[:1] + valid[-1:] if len(valid) > 1 else valid}
    rows["test"] = [row for row in until if "test_loss" in row][-1:]
    rows["training"] = [row for row in until if "loss" in row][-1:]
    lines = ["| data | step | loss | other metrics |", "| --- | --- | --- | --- |"]
    for name, part_rows in rows.items():
        prefix = {"validation": "valid_", "test": "test_"}.get(name, "")
        for row in part_rows:
            others = {
                key.removeprefix(prefix): value for key, value in row.items() if prefix and key.startswith(prefix)
            }
            loss = others.pop("loss", row.get("loss"))
            cells = ", ".join(f"{key} {_number(value)}" for key, value in others.items())
            lines.append(f"| {name} | {row['step']} | {_number(loss)} | {cells} |")
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and abs(value) < 1e300 else "not finite"


def _data(recipe: Recipe, data: Batches, step: int) -> str:
    sequences = step * data.global_batch_size
    per_sequence = data.tokens_per_step / data.global_batch_size
    lines = ["| data set | size | epochs |", "| --- | --- | --- |"]
    epochs = data.epochs(step) if step else dict.fromkeys((share.name for share in data.shares), 0.0)
    lines += [
        f"| {share.name} | {recipe.records.counted(share.samples)} | {epoch_count(epochs[share.name])} |"
        for share in data.shares
    ]
    return (
        "\n".join(lines)
        + f"\n\n{counted(step, 'step')} of {data.global_batch_size} sequences: {sequences:,} sequences, "
        f"{'at most' if recipe.generates_answers else 'about'} {sequences * per_sequence:,.0f} tokens."
    )


def _changed_settings(config: RunConfig) -> dict[str, Any]:
    """All settings that are not the default, in sections; of paths only the name."""
    settings: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        section = getattr(config, name)
        if name in _UNPUBLISHED:
            continue
        if not isinstance(section, BaseModel):
            settings |= {name: _public(section)} if section != field.default else {}
            continue
        changed = {
            key: value if name == "chat" and _is_text(key, value) else _public(value)
            for key, value in section.model_dump(mode="json").items()
            if getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True)
        }
        settings |= {name: changed} if changed else {}
    return settings


def _is_text(key: str, value: Any) -> bool:
    """Whether a setting of section chat is text, which may have slashes, and not a file."""
    return key == "system" or (isinstance(value, str) and "{" in value)


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    if not isinstance(value, str) or "/" not in value or value.startswith(HUB):
        return value
    return value if looks_like_id(value) and not Path(value).exists() else Path(value).name


def _model_usage(config: RunConfig, name: str, *, custom_code: bool) -> str:
    """Code for the exported model of the run ``name``; ``custom_code``: it has modeling files."""
    recipe, path = recipe_of(config), config.checkpoint.push or f"{name}/hf"
    model_class = f"AutoModelFor{'SequenceClassification' if recipe.trains_scores else 'CausalLM'}"
    options = ", trust_remote_code=True" if custom_code else ""
    prompt = _SCORE if recipe.trains_scores else f"{_TEXT if recipe.records.is_text else _CHAT}\n{_GENERATE}"
    code = _python(
        f"from transformers import {model_class}, AutoTokenizer\n",
        f'tokenizer = AutoTokenizer.from_pretrained("{path}"{options})',
        f'model = {model_class}.from_pretrained("{path}", dtype="auto"{options})',
        prompt,
    )
    if recipe.trains_scores:  # vLLM has other options for them
        return code
    return f"{code}\n\n{_vllm(f'vllm serve {path}' + (' --trust-remote-code' if custom_code else ''))}"


def _adapter_usage(config: RunConfig, name: str, base: str, *, has_experts: bool) -> str:
    """Code for the exported adapter of the run ``name``; empty for a reward model, whose base has no head."""
    recipe, in_subfolder = recipe_of(config), config.checkpoint.push is not None and config.checkpoint.export_merged
    if recipe.trains_scores:
        return ""
    path, subfolder = config.checkpoint.push or f"{name}/adapter", ', subfolder="adapter"' if in_subfolder else ""
    code = _python(
        "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n",
        f'tokenizer = AutoTokenizer.from_pretrained("{base}")',
        f'model = AutoPeftModelForCausalLM.from_pretrained("{path}", dtype="auto"{subfolder})',
        f"{_TEXT if recipe.records.is_text else _CHAT}\n{_GENERATE}",
    )
    rank = next((rank for rank in _VLLM_RANKS if rank >= (config.lora.rank or 1)), None)
    if has_experts or in_subfolder or config.lora.dora or rank is None:  # vLLM needs other options, or cannot
        return code
    return f"{code}\n\n{_vllm(f'vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned={path}')}"


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _vllm(command: str) -> str:
    return f"With vLLM:\n\n```bash\n{command}\n```"
