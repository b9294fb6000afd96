"""Exporting a model of one family as another family; models that it cannot express are rejected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from isthmus.errors import UsageError
from isthmus.families import family_transfer as module
from isthmus.families.architecture import SETTINGS, from_settings
from isthmus.families.blocks.ends import Head
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.latent_attention import Latent
from isthmus.families.blocks.rotary import RopeScaling
from isthmus.families.family_transfer import transfer_architecture
from isthmus.families.registry import all_families
from isthmus.families.rules.rule import copy

FAMILIES = all_families()
ISTHMUS = FAMILIES["isthmus"]
PLAIN = from_settings(
    {
        "family": "isthmus",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "vocab_size": 77,
        "max_position_embeddings": 64,
        "norm_epsilon": 1e-5,
    }
)
MOE = Experts(num_experts=6, top_k=2, ffn_hidden_size=12)
YARN = RopeScaling(kind="yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.8, truncate=False)


@pytest.mark.parametrize(
    "changed",
    [
        {"form": "sandwich", "normalization": "LayerNorm", "norm_bias": False, "norm_zero_centered": True},
        {"position": "learned", "activation": "gelu_tanh", "gated": False, "mlp_bias": True},
        {"rotary_base": 5e5, "rotary_percent": 0.5, "rotary_interleaved": True, "unrotated_layers": (1, 3)},
        {"rope_scaling": YARN},
        {"rope_scaling": RopeScaling(kind="longrope", factor=2.0, short_factor=(1.0,) * 4, long_factor=(3.0,) * 4)},
        {"sliding_window": 7, "full_attention_layers": (0, 2), "window_rotary_base": 1e4},
        {"attention_scale": 0.3, "attention_softcap": 30.0, "attention_sinks": True, "logits_softcap": 15.0},
        {"qk_norm": True, "qk_norm_over": "projection", "qkv_bias": True, "proj_bias": True},
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_multiplier": 0.25, "tie_embeddings": True},
        {"moe": replace(MOE, dense_layers=(0,), score="sigmoid", expert_bias=True, num_groups=2, group_score="max")},
        {"moe": replace(MOE, shared_ffn_hidden_size=20, shared_gate=True, router_bias=True, expert_mlp_bias=True)},
        {"moe": replace(MOE, output_bias=True)},
        {"moe": replace(MOE, normalize=True, normalize_min=0.5, scaling_factor=2.5, router_float32=True)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_isthmus_family_expresses_everything(changed: dict[str, Any]) -> None:
    arch = PLAIN.with_settings(changed)
    assert ISTHMUS.to_architecture(ISTHMUS.to_hf_config(arch)) == arch != PLAIN


def test_compatible_families_exchange_models() -> None:
    llama = PLAIN.with_settings({"family": "llama", "rotary_base": 5e5, "tie_embeddings": True})
    there = transfer_architecture(llama, FAMILIES["llama"], FAMILIES["mistral"])
    assert there == replace(llama, family="mistral")
    assert transfer_architecture(there, FAMILIES["mistral"], FAMILIES["llama"]) == llama


LATENT = Latent(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)


@pytest.mark.parametrize(
    ("source", "changed", "target", "message"),
    [
        ("deepseek_v3", {"mla": LATENT, "moe": MOE}, "isthmus", "cannot express mla=Latent"),
        ("deepseek_v3", {"mtp_layers": 1, "moe": MOE}, "isthmus", "cannot express mtp_layers=1 .it would become 0."),
        ("isthmus", {"form": "post"}, "llama", "cannot express form=post .it would become pre."),
        ("isthmus", {"qk_norm": True}, "llama", "cannot express qk_norm=True"),
        ("isthmus", {"activation": "clamped_swiglu"}, "starcoder2", "cannot express clamped_swiglu as hidden_act"),
        ("isthmus", {"rope_scaling": YARN, "rotary_percent": 0.5}, "llama", "cannot express rotary_percent=0.5"),
        ("isthmus", {"moe": MOE}, "llama", "cannot express moe=Experts"),
        ("isthmus", {}, "mixtral", "intermediate_size is missing"),
    ],
)  # fmt: skip
def test_inexpressible_architectures_are_rejected(
    source: str, changed: dict[str, Any], target: str, message: str
) -> None:
    arch = PLAIN.with_settings({"family": source, **changed})
    with pytest.raises(UsageError, match=f"this {source} model cannot be exported as {target}: .*{message}"):
        transfer_architecture(arch, FAMILIES[source], FAMILIES[target])


def test_tensors_of_one_family_only_are_rejected() -> None:
    llama = FAMILIES["llama"]
    more = replace(
        llama, name="more", rules=(*llama.rules, copy("decoder.layers.{layer}.dream.weight", "dream.{layer}", "H"))
    )
    with pytest.raises(
        UsageError, match=r"it does not have 4 of the tensors, for example decoder.layers.0.dream.weight"
    ):
        transfer_architecture(PLAIN, more, llama)
    with pytest.raises(UsageError, match=r"it needs 4 more tensors, for example decoder.layers.0.dream.weight"):
        transfer_architecture(PLAIN, llama, more)


def test_new_setting_is_rejected_until_the_family_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Newer(Head):
        dreams: bool = False

    monkeypatch.setattr(module, "SETTINGS", {**SETTINGS, "dreams": False})
    target: Any = _Reading(ISTHMUS, to_architecture=lambda hf: replace(PLAIN, head=Newer()))
    llama = replace(PLAIN, family="llama", head=Newer())
    transfer_architecture(llama, FAMILIES["llama"], target)
    with pytest.raises(UsageError, match=r"cannot express dreams=True \(it would become False\)"):
        transfer_architecture(replace(llama, head=Newer(dreams=True)), FAMILIES["llama"], target)


class _Reading:
    """A family that reads configs into another class of architectures."""

    def __init__(self, family: Any, **methods: Any) -> None:
        self._family = family
        self.__dict__ |= methods

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)
