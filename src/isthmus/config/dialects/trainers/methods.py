"""Adapters, preference losses and chat templates, which the trainers have under different names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from isthmus.config.dialects.trainers.trainer_config import TrainerConfig, tables

_INITS = re.compile(r"gaussian|pissa(_niter_\d+)?")
_ALL_LINEAR = ("all", "all-linear", "all_linear")
_DPO_LOSSES = {"dpo": "sigmoid"} | {
    name: name for name in ("sigmoid", "robust", "ipo", "hinge", "simpo", "cpo", "orpo")
}


def put_lora(keys: TrainerConfig, names: Mapping[str, str], *, init: str | None = None) -> None:
    """Adapters; ``names`` are the program's keys by setting of section ``lora``."""
    path = keys.words(names["path"])
    if len(path) > 1:
        keys.refuse(
            names["path"], "has several adapters; merge all but the last one with isthmus merge, and remove them"
        )
        return
    if path:
        keys.put("lora.path", path[0], names["path"])
        for setting in ("rank", "alpha", "targets", "modules_to_save", "init", "dora", "rslora"):
            keys.ignore(names[setting], "The adapter has its own.")
    else:
        keys.put("lora.rank", keys.integer(names["rank"]), names["rank"])
        if (alpha := keys.number(names["alpha"])) is not None:
            keys.put("lora.alpha", float(alpha), names["alpha"])
        _put_targets(keys, names)
        for setting in ("dora", "rslora"):
            if keys.flag(names[setting]):
                keys.put(f"lora.{setting}", True, names[setting])
        if init is not None:
            keys.put("lora.init", init, names["init"])
    _put_dropout(keys, names["dropout"])
    if (ratio := keys.number(names["lr_ratio"])) is not None:
        keys.put("lora.lr_ratio", float(ratio), names["lr_ratio"])


def _put_targets(keys: TrainerConfig, names: Mapping[str, str]) -> None:
    targets = keys.words(names["targets"])
    if any(target in _ALL_LINEAR for target in targets):
        targets = ["all-linear"]
    for target in targets:
        if re.search(r"[\\()|\[]", target):
            keys.refuse(names["targets"], "is a regular expression; give names such as q_proj, or patterns with *")
            return
    if targets:
        keys.put("lora.targets", targets, names["targets"])
    if modules := keys.words(names["modules_to_save"]):
        keys.put("lora.modules_to_save", modules, names["modules_to_save"])


def _put_dropout(keys: TrainerConfig, name: str) -> None:
    dropout = keys.number(name)
    if dropout and keys.translation.settings.get("lora.dora"):
        keys.different(name, "DoRA has no dropout in Isthmus.")
    elif dropout is not None:
        keys.put("lora.dropout", float(dropout), name)


def drop_lora(keys: TrainerConfig, names: Mapping[str, str]) -> None:
    """The config trains all weights."""
    for name in names.values():
        if keys.has(name):
            keys.ignore(name, "All weights are trained, without adapters.")
        else:
            keys.value(name)


def lora_init(keys: TrainerConfig, name: str) -> str | None:
    """``lora.init`` for PEFT's ``init_lora_weights``; None: its default."""
    value = (keys.text(name) or "").lower()
    if value in ("", "true", "kaiming"):
        return None
    if _INITS.fullmatch(value):
        return value
    keys.refuse(name, "is not an initialization of Isthmus; use true, gaussian, pissa or pissa_niter_4")
    return None


def put_loaded_bits(keys: TrainerConfig, *, adapters: bool) -> None:
    """The switches ``load_in_4bit`` and ``load_in_8bit``."""
    for name, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if keys.is_on(name):
            put_quantization(keys, bits, name, adapters=adapters)


def put_parameter_targets(keys: TrainerConfig, name: str) -> None:
    """Parameters besides the linear layers that get adapters."""
    if parameters := keys.words(name):
        keys.put("lora.targets", [*keys.translation.settings.get("lora.targets", []), *parameters], name)


def put_quantization(keys: TrainerConfig, bits: int | None, name: str, *, adapters: bool) -> None:
    """Frozen weights of 4 or 8 bits."""
    if bits is None:
        return
    if bits not in (4, 8):
        keys.refuse(name, "only 4 and 8 bits of bitsandbytes are supported")
    elif not adapters:
        keys.refuse(name, "quantized weights cannot be trained; train adapters, or remove it")
    else:
        keys.put("lora.quantize", "nf4" if bits == 4 else "int8", name)


def put_preference(keys: TrainerConfig, loss: str, loss_name: str, beta_name: str) -> None:
    """Loss and beta of ``dpo``."""
    if loss not in _DPO_LOSSES:
        keys.refuse(loss_name, f"is not a loss of dpo; use one of {', '.join(sorted(set(_DPO_LOSSES.values())))}")
        return
    keys.translation.recipe = "dpo"
    keys.put("dpo.loss", _DPO_LOSSES[loss], loss_name)
    if (beta := keys.number(beta_name)) is not None:
        keys.put("dpo.beta", float(beta), beta_name)


def put_distillation(keys: TrainerConfig) -> None:
    keys.put("distill.beta", keys.number("beta") if keys.has("beta") else 0.5, "beta")
    if not keys.has("lmbda"):
        why = "The teacher is distilled on the answers of the records, never on answers of the student."
        keys.translation.remark(f"lmbda: 0.5, {keys.origin('lmbda')}", "different", why)


def put_thinking(keys: TrainerConfig) -> None:
    if keys.has("enable_thinking") and not keys.flag("enable_thinking"):
        keys.put("chat.reasoning", "drop", "enable_thinking")
    else:
        keys.ignore_present("Reasoning of answers is trained as far as the template has it.", "enable_thinking")


def put_template(keys: TrainerConfig, name: str) -> None:
    """A chat template of Isthmus, if it has one of that name, else the tokenizer's."""
    template = keys.text(name)
    if template is None:
        return
    known = tables()["templates"]
    if template in known:
        keys.put("chat.template", known[template], name)
    elif template in ("default", "empty", "tokenizer_default") or template.startswith("tokenizer_default_fallback"):
        keys.ignore(name, "It is the chat template of the tokenizer.")
    elif "{%" in template or template.endswith(".jinja"):
        keys.put("chat.template", template, name)
    else:
        keys.different(name, "The chat template of the tokenizer is used; chat.template sets another one.")
