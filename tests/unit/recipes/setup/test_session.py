"""What a model's config asks for that training cannot do is refused before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.config.schema.optim import OptimConfig
from isthmus.errors import UsageError
from isthmus.platforms.detect import detect
from isthmus.recipes.setup.session import blueprint, check_precision, check_schedule, check_training, fp8_recipe
from ranks.tiny import build_model_folder


def config_of(model: Path, seq_length: int, **train: Any) -> RunConfig:
    data = {"files": ["unused"], "seq_length": seq_length}
    sections = {"model": {"path": str(model)}, "data": data, "train": train}
    return RunConfig.model_validate({"recipe": "sft", "out": "unused", **sections})


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gpt2", {}, r"data.seq_length=129 is more than the 128 positions .* \(gpt2\)\. Use 128 or less\."),
        ("gpt2", {"max_position_embeddings": 129, "attn_pdrop": 0.1}, "attn_pdrop=0.1 is not supported for gpt2"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported for llama"),
    ],
)
def test_what_matters_to_training_alone(family: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", family, num_hidden_layers=1, **settings), 129)
    plans = blueprint(config)  # a model may be looked at
    with pytest.raises(UsageError, match=message):
        check_training(config, plans)


def test_a_run_in_epochs_has_room_for_its_schedule() -> None:
    """One in steps is refused by the schema."""
    optim = OptimConfig(schedule="wsd", warmup_steps=2, decay_steps=2)
    config = config_of(Path("unused"), 9, epochs=0.5).model_copy(update={"optim": optim})
    check_schedule(config, 4)
    with pytest.raises(UsageError, match=r"decay_steps=2 do not fit in the 3 steps that train\.epochs=0\.5"):
        check_schedule(config, 3)


def test_rotary_positions_have_no_end(tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1), 129)
    check_training(config, blueprint(config))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"recompute": "full", "recompute_layers": 3},
            r"recompute_layers=3 is more than the 2 layers .* Use 2 or less",
        ),
        (
            {"recompute": "selective", "recompute_modules": ["moe"]},
            "names moe, and this model has no mixtures of experts",
        ),
    ],
)
def test_what_is_not_there_is_not_recomputed(train: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=2), 24, **train)
    with pytest.raises(UsageError, match=message):
        check_training(config, blueprint(config))


def test_what_the_hardware_does_not_multiply_is_refused() -> None:
    check_precision(detect("cpu"), "fp16")
    with pytest.raises(UsageError, match=r"precision=fp8 cannot be used here: CPUs have no fp8 .* Leave it out or use"):
        check_precision(detect("cpu"), "fp8")


def test_fsdp_has_no_loss_scale(tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1), 24, precision="fp16")
    plans = blueprint(config)
    check_training(config, plans)
    with pytest.raises(UsageError, match=r"fsdp=true with train\.precision=fp16.* Set train\.precision"):
        check_training(config, replace(plans, parallel=ParallelConfig(fsdp=True)))


def test_fp8_rounds_as_it_is_told(tmp_path: Path) -> None:
    model = tmp_path / "unused"
    platform = detect("cpu")
    hybrid = fp8_recipe(config_of(model, 24, precision="fp8"), platform)
    assert (hybrid.scaling, hybrid.forward, hybrid.backward) == ("tensorwise", torch.float8_e4m3fn, torch.float8_e5m2)
    plain = fp8_recipe(config_of(model, 24, precision="fp8", fp8_scaling="rowwise", fp8_format="e4m3"), platform)
    assert (plain.scaling, plain.forward, plain.backward) == ("rowwise", torch.float8_e4m3fn, torch.float8_e4m3fn)
