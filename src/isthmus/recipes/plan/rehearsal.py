"""``--rehearse``: the run on CPUs with a small model of the same architecture and layout, and a few steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.config.schema.model import ModelConfig
from isthmus.convert.hf.hf_weights import open_weights
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, Moe
from isthmus.families.family import Family
from isthmus.families.mixer_sizes import WindowAttention
from isthmus.families.registry import family_for
from isthmus.recipes.model.model_source import open_source
from isthmus.recipes.plan.model_plan import teacher_config
from isthmus.recipes.registry import recipe_of

STEPS = 5
_MOCK_VOCABULARY, _HEAD = 512, 16
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
    small = small_architecture(open_weights(source, family).arch, config.parallel, vocab_size=vocab_size)
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


def small_architecture(arch: Architecture, parallel: ParallelConfig, *, vocab_size: int | None) -> Architecture:
    """A model with the same kinds of layers, small enough for a CPU, that ``parallel`` divides.

    ``vocab_size`` None keeps the vocabulary.
    """
    arch = _first_layers(arch, parallel.pp * parallel.vpp)
    ratio = arch.num_attention_heads // arch.num_query_groups
    groups = min(arch.num_query_groups, max(parallel.tp, 2 if ratio > 1 else 4))
    heads = next(groups * n for n in range(min(ratio, 2), ratio + 1) if groups * n % parallel.tp == 0 or n == ratio)
    head, ffn = _head_width(arch), 32 * math.lcm(4, parallel.tp, parallel.expert_tp)
    mla = arch.mla and replace(
        arch.mla,
        kv_lora_rank=32,
        q_lora_rank=arch.mla.q_lora_rank and 32,
        qk_nope_head_dim=head,
        qk_rope_head_dim=head,
        v_head_dim=head,
    )
    rope = arch.rope_scaling and replace(
        arch.rope_scaling,
        short_factor=arch.rope_scaling.short_factor[: int(head * arch.rotary_percent) // 2],
        long_factor=arch.rope_scaling.long_factor[: int(head * arch.rotary_percent) // 2],
    )
    window = arch.window_attention and _small_windows(arch, arch.window_attention, heads, groups, head)
    experts = arch.moe and _small_experts(
        arch.moe, parallel, ffn if arch.moe.ffn_hidden_size == arch.ffn_hidden_size else None
    )
    return replace(
        arch,
        num_attention_heads=heads,
        num_query_groups=groups,
        hidden_size=heads * head,
        kv_channels=2 * head if mla else head,
        value_channels=arch.value_channels and _HEAD,
        window_attention=window,
        ffn_hidden_size=ffn,
        mla=mla,
        moe=experts,
        rope_scaling=rope,
        vocab_size=vocab_size or arch.vocab_size,
        mtp_layers=min(arch.mtp_layers, 1),
        layer_input_size=min(arch.layer_input_size, _HEAD),
        **_small_mixers(arch, heads, head),
    )


def _first_layers(arch: Architecture, stages: int) -> Architecture:
    """The first layers of a model: every kind of layer occurs, and ``stages`` divide their number.

    Of several dense layers before those with experts, one is left.
    """
    if arch.moe is not None and arch.moe.dense_layers == tuple(range(len(arch.moe.dense_layers))):
        arch = replace(arch, moe=replace(arch.moe, dense_layers=arch.moe.dense_layers[:1]))
    kinds = [arch.layer_kinds(layer) for layer in range(arch.num_layers)]
    least = max(2, 1 + max(map(kinds.index, kinds)))
    layers = min(arch.num_layers, math.ceil(least / stages) * stages)

    def remaining(listed: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(layer for layer in listed if layer < layers)

    return replace(
        arch,
        num_layers=layers,
        mixers=arch.mixers[:layers],
        key_sharing_layers=max(0, layers - (arch.num_layers - arch.key_sharing_layers)),
        layers_without_mlp=remaining(arch.layers_without_mlp),
        unrotated_layers=remaining(arch.unrotated_layers),
        full_attention_layers=remaining(arch.full_attention_layers),
        swiglu_limits=arch.swiglu_limits[:layers],
        moe=arch.moe
        and replace(
            arch.moe, dense_layers=remaining(arch.moe.dense_layers), swiglu_limits=arch.moe.swiglu_limits[:layers]
        ),
        indexer=arch.indexer and replace(arch.indexer, shared_layers=remaining(arch.indexer.shared_layers)),
    )


def _head_width(arch: Architecture) -> int:
    """The smallest multiple of ``_HEAD`` of which each kind of attention rotates an even number of channels."""
    shares = [kind.rotary_percent for kind in arch.attention_kinds]
    widths = range(_HEAD, arch.kv_channels, _HEAD)
    return next((width for width in widths if all(int(width * share) % 2 == 0 for share in shares)), arch.kv_channels)


def _small_windows(arch: Architecture, windows: WindowAttention, heads: int, groups: int, head: int) -> WindowAttention:
    """Sizes of sliding-window layers, multiples of those of other layers if they have more heads."""
    if windows.num_attention_heads:
        heads *= max(1, windows.num_attention_heads // arch.num_attention_heads)
    if windows.num_query_groups:
        groups = min(heads, groups * max(1, windows.num_query_groups // arch.num_query_groups))
    return replace(
        windows,
        num_attention_heads=windows.num_attention_heads and heads,
        num_query_groups=windows.num_query_groups and groups,
        kv_channels=windows.kv_channels and head,
        value_channels=windows.value_channels and _HEAD,
    )


def _small_mixers(arch: Architecture, heads: int, head: int) -> dict[str, Any]:
    """Sizes of other mixers, and of the indexer.

    Tensor parallelism divides ``heads`` and the model's numbers of heads, so also their common divisors. The channels
    of Mamba stay the same multiple of the hidden size.
    """
    delta, two, mamba, indexer = arch.delta_net, arch.mamba2, arch.mamba, arch.indexer
    sizes: dict[str, Any] = {}
    if delta is not None:
        keys = math.gcd(delta.num_key_heads, heads)
        values = keys * min(delta.num_value_heads // delta.num_key_heads, 2)
        sizes["delta_net"] = replace(
            delta, num_key_heads=keys, num_value_heads=values, key_head_dim=_HEAD, value_head_dim=_HEAD
        )
    if two is not None:
        width = head * max(1, two.num_heads * two.head_dim // arch.hidden_size)
        groups = math.gcd(two.num_groups, heads)
        sizes["mamba2"] = replace(two, num_heads=heads, head_dim=width, state_size=_HEAD, num_groups=groups)
    if mamba is not None:
        channels = mamba.inner_size // arch.hidden_size * heads * head
        sizes["mamba"] = replace(mamba, inner_size=channels, time_step_rank=_HEAD)
    if indexer is not None:
        sizes["indexer"] = replace(indexer, num_heads=min(indexer.num_heads, 4), head_dim=2 * head)
    return sizes


def _small_experts(moe: Moe, parallel: ParallelConfig, width: int | None) -> Moe:
    """``width`` is that of an expert; None: as narrow as the layout allows."""
    multiple = math.lcm(parallel.ep, moe.num_groups)
    experts = math.ceil(max(2 * moe.top_k, 2 * moe.num_groups) / multiple) * multiple
    width = width or 32 * math.lcm(parallel.tp, parallel.expert_tp)
    shared = width * max(1, moe.shared_ffn_hidden_size // moe.ffn_hidden_size) if moe.shared_ffn_hidden_size else 0
    return replace(
        moe,
        num_experts=min(experts, moe.num_experts),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
        latent_size=moe.latent_size and 2 * _HEAD,
    )


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
