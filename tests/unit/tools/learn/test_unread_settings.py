"""Settings without effect in a small model, which have one in larger ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.errors import UsageError
from isthmus.hf.tiny_model import effective_config
from isthmus.tools.learn.probe_model import ProbeModel
from isthmus.tools.learn.unread_settings import check_unread, smaller_values


def test_smaller_values() -> None:
    assert smaller_values(8192, 8192) == [1, 2, 3] and smaller_values(8192.0, 8192.0) == [1.0, 2.0, 3.0]
    assert smaller_values(0, 20) == [1, 2, 3] and smaller_values(3, 3) == [] and smaller_values(True, False) == []
    assert smaller_values([0, 27], [0, 27]) == [[0], [1]] and smaller_values([0, 1], [0, 1]) == []
    assert smaller_values("word", "word") == smaller_values([0.5, 9.0], None) == smaller_values([], []) == []


@pytest.mark.slow
def test_a_window_that_no_sample_reaches(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 101, "max_position_embeddings": 64}
    config = effective_config({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 1]], **sizes})
    probe = ProbeModel.build(tmp_path / "model", config, seed=1)
    check_unread({"max_position_embeddings", "attention_dropout", "eos_token_id"}, config, config, probe)
    with pytest.raises(UsageError, match=r"config.json: window_size=256 has an effect in models with more layers or"):
        check_unread({"window_size"}, config, config, probe)
