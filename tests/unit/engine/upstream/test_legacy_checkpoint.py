"""Legacy checkpoints load completely into a model with the names of other layers, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.engine.upstream.legacy_checkpoint import LegacyState, _load_all_tensors, _mark_legacy_states, renamed
from isthmus.errors import DataError

LAYER = "decoder.layers.0."
LOCAL = {"input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.experts.local_experts.1.linear_fc1.weight"}
FUSED = {
    "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight", "mlp.experts.linear_fc1.weight1"
}  # fmt: skip


def names(ends: set[str]) -> list[str]:
    return [LAYER + end for end in sorted(ends)]


class Model(nn.Module):
    """Saves its tensors under any names."""

    def __init__(self, ends: set[str]) -> None:
        super().__init__()
        for name in names(ends):
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, nn.Parameter(torch.ones(2)))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def model_class(said: list[str]) -> Any:
    class MegatronModule(Model):
        pass

    _load_all_tensors(said.append, SimpleNamespace(MegatronModule=MegatronModule))
    return MegatronModule


def state(ends: set[str], *, with_optimizer: bool = False) -> LegacyState:
    tensors = {name: torch.full((2,), float(number + 2)) for number, name in enumerate(names(ends))}
    return LegacyState(tensors, "model_optim_rng.pt", with_optimizer=with_optimizer)


@pytest.mark.parametrize(("model", "checkpoint"), [(LOCAL, FUSED), (FUSED, LOCAL)])
def test_names_of_other_layers(model: set[str], checkpoint: set[str]) -> None:
    pairs = renamed(names(model), names(checkpoint))
    assert set(pairs) == set(names(checkpoint))
    assert set(pairs.values()) == set(names(model))
    assert renamed(names(model), names(model)) == {}


def test_fused_norms_and_experts_load_into_local_layers(model_class: Any, said: list[str]) -> None:
    model, checkpoint = model_class(LOCAL), state(FUSED)
    model.load_state_dict(checkpoint)
    assert {float(value[0]) for value in model.state_dict().values()} == {2.0, 3.0, 4.0}
    norm = model.state_dict()[f"{LAYER}input_layernorm.weight"]
    assert torch.equal(norm, checkpoint[f"{LAYER}self_attention.linear_qkv.layer_norm_weight"])
    assert said[0].startswith("checkpoint: 3 tensors")


@pytest.mark.parametrize(
    ("model", "checkpoint", "message"),
    [
        (LOCAL | {"mlp.a.weight"}, FUSED, f"without {LAYER}mlp.a.weight. "),
        (LOCAL, FUSED | {"mlp.b.weight"}, f"unknown {LAYER}mlp.b.weight. "),
    ],
)
def test_a_load_without_strict_does_not_hide_lost_tensors(
    model: set[str], checkpoint: set[str], message: str, model_class: Any
) -> None:
    live, tensors = model_class(model), state(checkpoint)
    for strict in (True, False):  # as Megatron-LM tries it
        with pytest.raises(DataError, match=message) as error:
            live.load_state_dict(tensors, strict=strict)
        assert "--spelling local" in str(error.value)
    assert all(bool((value == 1).all()) for value in live.state_dict().values())


def test_extra_states_are_no_tensors(model_class: Any) -> None:
    model, tensors = model_class(LOCAL), state(FUSED)
    tensors[f"{LAYER}mlp.linear_fc1._extra_state"] = None
    with pytest.raises(RuntimeError, match="_extra_state"):  # torch's own, after which Megatron-LM loads again
        model.load_state_dict(tensors)
    model.load_state_dict(tensors, strict=False)
    assert all(bool((value > 1).all()) for value in model.state_dict().values())


def test_an_optimizer_in_the_order_of_other_layers_is_refused(model_class: Any) -> None:
    with pytest.raises(DataError, match="Add --no-load-optim"):
        model_class(LOCAL).load_state_dict(state(FUSED, with_optimizer=True))
    model_class(FUSED).load_state_dict(state(FUSED, with_optimizer=True))


def test_a_strict_load_of_other_states_is_torchs(model_class: Any) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        model_class(LOCAL).load_state_dict(dict(state(FUSED)))


@pytest.mark.parametrize(
    ("release", "settings", "with_optimizer"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"finetune": True}, False),
        (False, {"no_load_optim": True}, False),
    ],
)
def test_states_of_legacy_checkpoints_are_marked(
    release: bool, settings: dict[str, bool], with_optimizer: bool
) -> None:
    content = {"model0": {"a": 1}, "model1": {"b": 2}, "args": {}, "optimizer": {}}

    def load(load_dir: str, args: Any, rank0: bool = False) -> Any:
        return dict(content), "file.pt", release, SimpleNamespace(name=load_dir)

    checkpointing = SimpleNamespace(_load_base_checkpoint=load)
    _mark_legacy_states(checkpointing)
    args = SimpleNamespace(**{"finetune": False, "no_load_optim": False} | settings)
    loaded, *_ = checkpointing._load_base_checkpoint("LEGACY", args, rank0=False)
    assert [key for key in loaded if isinstance(loaded[key], LegacyState)] == ["model0", "model1"]
    assert loaded["model1"] == {"b": 2}
    assert loaded["model1"].with_optimizer == with_optimizer
    others, *_ = checkpointing._load_base_checkpoint("GLOBAL", args)
    assert others == content
    assert not any(isinstance(value, LegacyState) for value in others.values())
