"""Every setting of an architecture, changed, is either written exactly by each writer or refused with a reason.

A setting that is new in a component is a case here. Its writers must express or refuse it: the args of Megatron-LM, the
legacy checkpoint, whose args also have the layout, and the family ``isthmus`` with its modelling files.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from isthmus.convert.canonical import unique_placements
from isthmus.convert.legacy.from_legacy import LegacyFolder, LegacyWeights
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.legacy.megatron_args import megatron_args, unsupported_features
from isthmus.convert.legacy.model_from_args import architecture_from_args
from isthmus.convert.legacy.to_legacy import LegacyWriter, LiveSpelling, padded_vocab_size
from isthmus.errors import UsageError
from isthmus.families.architecture import COMPONENTS, SETTINGS, Architecture, from_settings
from isthmus.families.blocks.block import setting_fields
from isthmus.families.blocks.rotary import QueryScaling, RopeScaling
from isthmus.families.family import Family
from isthmus.families.family_transfer import transfer_architecture
from isthmus.families.known_keys import is_metadata
from isthmus.families.registry import all_families
from isthmus.hf.shim import modeling_isthmus
from isthmus.hf.shim.configuration_isthmus import IsthmusConfig

ISTHMUS = all_families()["isthmus"]
OTHER = replace(ISTHMUS, name="other")
"""A family with the same tensors, from which models are transferred."""
LAYOUT = LegacyLayout(tp=2, pp=2)
KNOWN_KEYS = {*IsthmusConfig().to_dict(), "rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Keys that the modelling files know; the last three are the older ones of ``rope_parameters``."""
LAYERS = 4
PLAIN: dict[str, Any] = {
    "family": "other", "num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 16, "vocab_size": 77, "max_position_embeddings": 128, "norm_epsilon": 1e-5,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "delta_net": {
        "mixers": (("gated_delta_net",), ("attention",)) * 2, "delta_net.num_key_heads": 2,
        "delta_net.num_value_heads": 4, "delta_net.key_head_dim": 8, "delta_net.value_head_dim": 8,
        "delta_net.conv_kernel": 4,
    },
    "mamba2": {
        "mixers": (("mamba2",), ("attention",)) * 2, "mamba2.num_heads": 4, "mamba2.head_dim": 8,
        "mamba2.state_size": 8, "mamba2.num_groups": 2, "mamba2.kernel": 4,
    },
    "mamba": {
        "mixers": (("mamba",), ("attention",)) * 2, "mamba.inner_size": 32, "mamba.state_size": 8,
        "mamba.time_step_rank": 4, "mamba.kernel": 4,
    },
    "short_convolution": {
        "mixers": (("short_convolution",), ("attention",)) * 2, "short_convolution.kernel": 3,
    },
}  # fmt: skip
LATENT = {
    "num_query_groups": 4, "kv_channels": 18, "rotary_interleaved": True, "norm_epsilon": 1e-6,
    "mla.kv_lora_rank": 12, "mla.qk_nope_head_dim": 10, "mla.qk_rope_head_dim": 8, "mla.v_head_dim": 6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "": {},
    "moe": {"moe.num_experts": 8, "moe.top_k": 4, "moe.ffn_hidden_size": 12, "moe.normalize": True},
    "mla": LATENT,
    "indexer": LATENT | {
        "mla.q_lora_rank": 8, "indexer.top_k": 4, "indexer.num_heads": 2, "indexer.head_dim": 8,
    },
    "window_attention": {"sliding_window": 8, "full_attention_layers": (1, 3), "window_attention.kv_channels": 8},
    **RECURRENT,
}  # fmt: skip
"""A small model for each prefix of settings; that of settings without a prefix is plain."""
NEEDS: dict[str, dict[str, Any]] = {
    "qk_norm_over": {"qk_norm": True},
    "qk_norm_after_rotation": {"qk_norm": True},
    "window_kind": {"sliding_window": 8},
    "full_attention_layers": {"sliding_window": 8},
    "window_rotary_base": {"sliding_window": 8},
    "mtp_hidden_first": {"mtp_layers": 1},
    "sharing_layers_wide": {"key_sharing_layers": 2},
    "position_offset": {"position": "learned"},
    "norm_bias": {"normalization": "LayerNorm"},
    "form_without_attention": RECURRENT["mamba2"],
    "moe.shared_mean": {"moe.shared_ffn_hidden_size": 8},
    "moe.shared_gate": {"moe.shared_ffn_hidden_size": 8},
    "moe.branch_norms": {"moe.shared_ffn_hidden_size": 8},
    "moe.group_top_k": {"moe.num_groups": 4, "moe.score": "sigmoid"},
    "moe.group_score": {"moe.num_groups": 2, "moe.score": "sigmoid"},
    "moe.normalize_min": {"moe.score": "sigmoid"},
    "moe.score_tolerance": {"moe.score": "sparsemixer"},
    "moe.normalize_offset": {"moe.score": "sigmoid"},
}
"""Settings without which a setting has no effect."""
YARN = RopeScaling(kind="yarn", factor=4.0)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0)
SCALINGS = (
    *(LLAMA3, replace(LLAMA3, factor=2.0), replace(LLAMA3, low_freq_factor=2.0), replace(LLAMA3, high_freq_factor=8.0)),
    *(replace(LLAMA3, original_max_position_embeddings=64), RopeScaling(kind="linear", factor=2.0)),
    *(RopeScaling(kind=kind, factor=2.0, original_max_position_embeddings=128) for kind in ("dynamic", "ntk_alpha")),
    RopeScaling(kind="longrope", factor=2.0, short_factor=(1.0,) * 8, long_factor=(3.0,) * 8),
    *(RopeScaling(kind="proportional", partial_rotary_factor=0.5), YARN, replace(YARN, truncate=False)),
    *(replace(YARN, beta_fast=16.0), replace(YARN, beta_slow=2.0), replace(YARN, attention_factor=0.7)),
    *(replace(YARN, mscale=0.5), replace(YARN, mscale_all_dim=0.5), replace(YARN, mscale=0.5, mscale_all_dim=0.7)),
    replace(YARN, original_max_position_embeddings=4096),
)
VALUES: dict[str, tuple[Any, ...]] = {
    "mixers": ((("mamba2",), ("attention",)) * 2, (("attention", "mamba2"),) * LAYERS, ((), ("attention",)) * 2),
    "num_layers": (6,),
    "ffn_hidden_size": (64,),
    "layers_without_mlp": ((1,),),
    "unrotated_layers": ((3,),),
    "full_attention_layers": ((0, 2),),
    "rope_scaling": SCALINGS,
    "query_scaling": (QueryScaling(rate=0.1, period=16),),
    "num_query_groups": (1, 4),
    "kv_channels": (20,),
    "value_channels": (8,),
    "sliding_window": (8,),
    "rotary_percent": (0.5,),
    "attention_scale": (0.5,),
    "attention_multipliers": ((2.0, 1.0), (1.0, 2.0)),
    "mlp_multipliers": ((2.0, 1.0), (1.0, 2.0)),
    "swiglu_limits": ((None, 7.0, None, None),),
    "layer_input_size": (8,),
    "num_attention_heads": (8,),
    "moe.swiglu_limits": ((None, 7.0, None, None),),
    "moe.dense_layers": ((0,),),
    "moe.num_groups": (2,),
    "moe.group_top_k": (2,),
    "moe.ffn_hidden_size": (16,),
    "moe.latent_size": (8,),
    "moe.num_experts": (16,),
    "moe.shared_ffn_hidden_size": (8,),
    "moe.top_k": (2,),
    "mla.qk_nope_head_dim": (12,),
    "mla.qk_rope_head_dim": (6,),
    "indexer.shared_layers": ((1,),),
    "window_attention.rotary_percent": (0.5,),
    "mamba2.multipliers": ((2.0, 1.0), (1.0, 2.0)),
    "mamba2.section_multipliers": ((1.0, 2.0, 1.0, 1.0, 1.0),),
    "mamba2.time_step_limit": ((0.0, 1.0),),
    "mamba2.num_groups": (4,),
    "delta_net.num_key_heads": (4,),
    "delta_net.num_value_heads": (8,),
    "delta_net.least_log_decay": (-5.0,),
}
"""Other values, where those of :func:`other_values` do not suit."""
ALONG: dict[str, dict[str, Any]] = {
    "mixers": {name: value for name, value in RECURRENT["mamba2"].items() if name != "mixers"},
    "mla.qk_nope_head_dim": {"kv_channels": 20},
    "mla.qk_rope_head_dim": {"kv_channels": 16},
    "num_attention_heads": {"num_query_groups": 4},
}
"""Settings that change with a setting."""


def hints() -> dict[str, Any]:
    """Types of settings by name."""
    values: dict[str, Any] = {}
    for component in COMPONENTS:
        types, prefix = get_type_hints(component), f"{component.prefix}." if component.prefix else ""
        values |= {prefix + entry.name: types[entry.name] for entry in setting_fields(component)}
    return values


HINTS = hints()


def other_values(name: str, value: Any) -> tuple[Any, ...]:
    """All other choices; otherwise one other value."""
    if name in VALUES:
        return VALUES[name]
    hint = HINTS[name]
    (kind,) = {*(get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint])} - {NoneType}
    if get_origin(kind) is Literal:
        return tuple(choice for choice in get_args(kind) if choice != value)
    if kind is bool:
        return (not value,)
    if kind is int:
        return ((value or 0) + 1,)
    if kind is float:
        return (2.0 * (value or 1.0),)
    raise NotImplementedError(f"the setting {name} is new: add another value of it to VALUES")


def cases() -> Iterator[Any]:
    for name in SETTINGS:
        if name == "family":  # names the table of tensors, which the writers replace
            continue
        model = PLAIN | MODELS[name.rpartition(".")[0]] | NEEDS.get(name, {})
        default = SETTINGS[name]
        before = model.get(name, None if default is MISSING else default)
        for value in other_values(name, before):
            changed = model | ALONG.get(name, {}) | {name: value}
            yield pytest.param(model, changed, name, id=f"{name}={value}"[:60])
    for value in SCALINGS:  # Megatron-LM has YaRN in latent attention only
        yield pytest.param(PLAIN | LATENT, PLAIN | LATENT | {"rope_scaling": value}, "rope_scaling")


CASES = list(cases())
per_setting = pytest.mark.parametrize(("model", "changed", "name"), CASES)


def lost(arch: Architecture, read: Architecture) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, but for the family: the value in ``arch``, and that in ``read``."""
    values = {name: (arch.setting(name), read.setting(name)) for name in SETTINGS if name != "family"}
    if arch.moe is not None and arch.moe.num_groups == 1 and values["moe.score"] == ("softmax_of_chosen", "softmax"):
        del values["moe.score"]  # with ``moe.normalize``, both compute the same
    return {name: both for name, both in values.items() if both[0] != both[1]}


def shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Of the tensors, by canonical name."""
    placements = unique_placements(family_of(arch), arch)
    return {name: placed.rule.canonical_shape(arch) for name, placed in placements.items()}


def family_of(arch: Architecture) -> Family:
    """A family with the tensors of the model."""
    return ISTHMUS if arch.latent is None else all_families()["deepseek_v3"]


def legacy_args(arch: Architecture, spelling: LiveSpelling) -> Namespace:
    rows = padded_vocab_size(arch, LAYOUT)
    return megatron_args(arch, torch.float32, layout=LAYOUT, padded_vocab_size=rows, spelling=spelling)


def check_legacy_files(arch: Architecture, folder: Path, spelling: LiveSpelling) -> None:
    """Write a checkpoint, derive the model from its args, and read its tensors."""
    tensors = {
        name: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) for name, shape in shapes(arch).items()
    }
    common, dtypes = {"args": legacy_args(arch, spelling)}, dict.fromkeys(tensors, torch.float32)
    folder.mkdir()
    writer = LegacyWriter(folder, family_of(arch), arch, dtypes, common, LAYOUT, spelling)
    with writer.writer:
        for name, tensor in tensors.items():
            writer.put(name, slice(0, len(tensor)), tensor)
    files = LegacyFolder(folder)
    read, _ = architecture_from_args(files.args or {})
    assert lost(arch, read) == {}
    weights = LegacyWeights(files, family_of(arch), read)
    assert all(torch.equal(weights.read(name, slice(0, len(tensors[name]))), tensors[name]) for name in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", MODELS)
def test_models_without_the_change(prefix: str, tmp_path: Path) -> None:
    """Writers that express the model without the change do not refuse its changes for another reason."""
    arch = from_settings(PLAIN | MODELS[prefix])
    assert (not unsupported_features(arch)) == (prefix in ("", "moe", "mla"))
    if prefix in ("", "moe"):
        assert transfer_architecture(arch, OTHER, ISTHMUS) == replace(arch, family="isthmus")
    if not unsupported_features(arch):
        check_legacy_files(arch, tmp_path / "te", "te")


@per_setting
def test_megatron_args(model: Mapping[str, Any], changed: Mapping[str, Any], name: str) -> None:
    arch = from_settings(changed)
    assert arch != from_settings(model), f"{name} has no effect in this model"
    if not unsupported_features(arch):
        assert lost(arch, architecture_from_args(vars(megatron_args(arch, torch.float32)))[0]) == {}


@pytest.mark.sweep  # the args of the layout alone are those of test_megatron_args
@per_setting
def test_legacy_checkpoint(model: Mapping[str, Any], changed: Mapping[str, Any], name: str, tmp_path: Path) -> None:
    arch = from_settings(changed)
    if unsupported_features(arch):
        return
    LAYOUT.check(arch)
    for spelling in get_args(LiveSpelling):
        assert lost(arch, architecture_from_args(vars(legacy_args(arch, spelling)))[0]) == {}
        if shapes(arch) != shapes(from_settings(model)):
            check_legacy_files(arch, tmp_path / spelling, spelling)


@pytest.mark.slow
@per_setting
def test_family_with_modelling_files(model: Mapping[str, Any], changed: Mapping[str, Any], name: str) -> None:
    arch = from_settings(changed)
    try:
        transferred = transfer_architecture(arch, OTHER, ISTHMUS)
    except UsageError as error:
        assert "this other model cannot be exported as isthmus: " in str(error)
        return
    config = ISTHMUS.to_hf_config(transferred)
    assert lost(arch, ISTHMUS.to_architecture(config)) == {}
    assert [key for key in config if not is_metadata(key) and key not in KNOWN_KEYS] == []
    assert [name for name in config["architectures"] if not hasattr(modeling_isthmus, name)] == []
