"""How to load an export: the code of a model card, for transformers or PEFT, and the command of vLLM."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.registry import recipe_of

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


def model_usage(config: RunConfig, name: str, *, custom_code: bool) -> str:
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


def adapter_usage(config: RunConfig, name: str, base: str, *, has_experts: bool) -> str:
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
