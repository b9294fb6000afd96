"""What a model's config asks for that training cannot do is refused before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.recipes.session import blueprint, check_training
from ranks.tiny import build_model_folder


def config_of(model: Path, seq_length: int) -> RunConfig:
    data = {"files": ["unused"], "seq_length": seq_length}
    return RunConfig.model_validate({"recipe": "sft", "out": "unused", "model": {"path": str(model)}, "data": data})


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


def test_rotary_positions_have_no_end(tmp_path: Path) -> None:
    config = config_of(build_model_folder(tmp_path / "model", "llama", num_hidden_layers=1), 129)
    check_training(config, blueprint(config))
