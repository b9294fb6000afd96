"""``--rehearse``: the run on CPUs with a small model of the same architecture and layout, and a few steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.config.schema.model import ModelConfig
from isthmus.convert.hf.hf_weights import open_weights
from isthmus.engine.linear.fp8_quantization import ALIGNMENT, named_scaling, width_multiple
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.block import RehearsalSizes
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.recipes.model.model_source import open_source
from isthmus.recipes.plan.model_plan import teacher_config
from isthmus.recipes.registry import recipe_of

STEPS = 5
_MOCK_VOCABULARY = 512
_LENGTH = {True: 128, False: 512}
"""Tokens of a sequence, by whether the data is mock data."""


def rehearse(config: RunConfig, world_size: int) -> tuple[RunConfig, list[str]]:
    """The config of a rehearsal, and one line per changed setting.

    Recipe, model family, kind of layers, parallel layout, precision, micro batch size, data and schedule stay. FP8 is
    emulated; random weights replace those of the model. Widths are multiples that ``parallel`` and FP8 can divide.

    Raises:
        MissingInput: the config or tokenizer of the model cannot be read.
        UsageError: the family does not support the model's config.
    """
    models = {"model.config": config.model}
    if recipe_of(config).has_teacher:
        models["distill.teacher_config"] = teacher_config(config).model
    settings, former = _settings(config, world_size), dict[str, Any]()
    for section, model in models.items():
        former_keys, keys = _small_model(model, config)
        settings |= {f"{section}.{key}": value for key, value in keys.items()}
        former |= {f"{section}.{key}": former_keys.get(key) for key in keys}
    values: dict[str, Any] = config.model_dump(mode="json")
    lines = []
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place[section]
        before = former[name] if name in former else place.get(last)
        place[last] = value
        if before != value:
            lines.append(f"{name}: {before} -> {value}")
    return RunConfig.model_validate(values), lines


def _small_model(model: ModelConfig, config: RunConfig) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The config of a model, and the keys that make it small."""
    source = open_source(model.model_copy(update={"init": "random"}))
    family = family_for(source.config)
    vocab_size = _MOCK_VOCABULARY if config.data.mock else None
    multiple = width_multiple(named_scaling(config.train.fp8_scaling))
    arch = open_weights(source, family).arch
    small = small_architecture(arch, config.parallel, vocab_size=vocab_size, multiple=multiple)
    return source.config, _changed_keys(family, small, source.config)


def _changed_keys(family: Family, small: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``small`` to lay over ``config``, without other spellings of the same settings."""
    target = dict(family.to_hf_config(small, config))
    layers = family.to_architecture(config).num_layers
    for key, value in target.items():  # transformers lists the kinds of layers for models of one kind, too
        if isinstance(value, list) and len(value) == layers:
            target[key] = value[: small.num_layers]
    keys = {key: value for key, value in target.items() if config.get(key) != value}
    meant = family.to_architecture({**config, **keys})
    for key in list(keys):
        rest = {name: value for name, value in keys.items() if name != key}
        with suppress(DataError, UsageError):  # sizes that do not fit together
            if family.to_architecture({**config, **rest}) == meant:
                keys = rest
    return keys


def small_architecture(
    arch: Architecture, parallel: ParallelConfig, *, vocab_size: int | None, multiple: int = ALIGNMENT
) -> Architecture:
    """A model with the same kinds of layers, small enough for a CPU, that ``parallel`` divides.

    ``vocab_size`` None keeps the vocabulary; heads and MLPs are ``multiple`` wide on a rank, or a multiple of it.
    """
    arch = _first_layers(arch, parallel.pp * parallel.vpp)
    ratio = arch.attention.num_attention_heads // arch.attention.num_query_groups
    groups = min(arch.attention.num_query_groups, max(parallel.tp, 2 if ratio > 1 else 4))
    sizes = RehearsalSizes(
        heads=next(groups * n for n in range(min(ratio, 2), ratio + 1) if groups * n % parallel.tp == 0 or n == ratio),
        groups=groups,
        head_dim=_head_width(arch, multiple),
        ffn_hidden_size=max(32, multiple) * math.lcm(4, parallel.tp, parallel.expert_tp),
        tp=parallel.tp,
        ep=parallel.ep,
        etp=parallel.expert_tp,
    )
    windows, pairs = arch.windows.window_attention, int(sizes.head_dim * arch.rotary.rotary_percent) // 2
    rope = arch.rotary.rope_scaling and replace(
        arch.rotary.rope_scaling,
        short_factor=arch.rotary.rope_scaling.short_factor[:pairs],
        long_factor=arch.rotary.rope_scaling.long_factor[:pairs],
    )
    as_wide = arch.moe is not None and arch.moe.ffn_hidden_size == arch.mlp.ffn_hidden_size
    small = replace(
        arch,
        attention=arch.attention.small(sizes),
        windows=replace(arch.windows, window_attention=windows and windows.small(arch.attention, sizes)),
        recurrences=tuple(block.small(sizes) for block in arch.recurrences),
        mlp=arch.mlp.small(sizes),
        moe=arch.moe and arch.moe.small(replace(sizes, expert_size=sizes.ffn_hidden_size if as_wide else None)),
    )
    return small.with_settings(
        {
            "hidden_size": sizes.hidden_size,
            "rope_scaling": rope,
            "vocab_size": vocab_size or arch.vocab_size,
            "mtp_layers": min(arch.pattern.mtp_layers, 1),
            "layer_input_size": min(arch.embedding.layer_input_size, sizes.least),
        }
    )


def _first_layers(arch: Architecture, stages: int) -> Architecture:
    """The first layers of a model: every kind of layer occurs, and ``stages`` divide their number.

    Of several dense layers before those with experts, one is left.
    """
    if arch.moe is not None and arch.moe.dense_layers == tuple(range(len(arch.moe.dense_layers))):
        arch = replace(arch, moe=replace(arch.moe, dense_layers=arch.moe.dense_layers[:1]))
    least = max(2, 1 + max(map(arch.layers.index, arch.layers)))
    numbers: Sequence[int] = range(math.ceil(least / stages) * stages, arch.num_layers, stages)
    if arch.windows.window_attention is not None:  # some configs say the kind of the last layer, such as Gemma 4's
        numbers = [number for number in numbers if arch.layers[number - 1] == arch.layers[-1]]
    return arch.first_layers(next(iter(numbers), arch.num_layers))


def _head_width(arch: Architecture, multiple: int) -> int:
    """The smallest multiple of ``multiple`` of which each kind of attention rotates an even number of channels."""
    shares = [kind.rotary.rotary_percent for kind in arch.attention_kinds if kind.rotary is not None]
    widths = range(multiple, arch.attention.kv_channels, multiple)
    fitting = (width for width in widths if all(int(width * share) % 2 == 0 for share in shares))
    return next(fitting, arch.attention.kv_channels)


def _settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    """All changed settings except ``model.config``."""
    train, optim, parallel = config.train, config.optim, config.parallel
    settings: dict[str, Any] = {"platform": "cpu", "model.init": "random"}
    steps = min(train.steps or STEPS, STEPS)
    settings |= {"train.steps": steps, "train.epochs": None}
    rank_samples = train.micro_batch_size * parallel.dp(world_size)
    if rank_samples and train.global_batch_size % rank_samples == 0:  # else the usual error
        settings["train.global_batch_size"] = min(train.global_batch_size, rank_samples * 2 * parallel.pp)
    settings["train.precision"] = train.precision or "bf16"
    if train.precision == "fp8":
        settings["train.emulate_fp8"] = True
    if train.profile is not None:
        settings["train.profile"] = f"{steps}-{steps}"
    settings["data.seq_length"] = min(config.data.seq_length, _LENGTH[config.data.mock])
    settings["data.length_buckets"] = []
    if config.tokenizer.type == "NullTokenizer" and config.data.mock:
        settings["tokenizer.vocab_size"] = _MOCK_VOCABULARY - 1
    if optim.warmup_steps + (optim.decay_steps or 0) > steps - 1:
        settings |= {"optim.warmup_steps": min(optim.warmup_steps, 1), "optim.decay_steps": optim.decay_steps and 1}
    if recipe_of(config).has_teacher:
        settings["distill.teacher_init"] = "random"
    settings |= {"optim.offload": False, "train.attention": "auto", "tune.file": None}
    if config.checkpoint.push is not None:
        settings |= {"checkpoint.push": None, "checkpoint.push_public": False}
    if config.checkpoint.resume != "never":
        settings["checkpoint.resume"] = "auto"
    return settings
