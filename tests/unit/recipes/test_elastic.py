"""The number of ranks that an elastic run uses."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.platforms import rank_env
from isthmus.recipes.elastic import Fit, fit, with_fitting_ranks


def config(batch: int, micro: int = 1, **parallel: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "out": "no-such-folder",
            "model": {"path": "m"},
            "data": {"files": ["chats.json"]},
            "train": {"global_batch_size": batch, "micro_batch_size": micro},
            "parallel": {"elastic": True, **parallel},
        }
    )


@pytest.mark.parametrize(
    ("settings", "world_size", "expected"),
    [
        ({"batch": 16, "micro": 2}, 8, Fit(8, 2)),
        ({"batch": 16, "micro": 2}, 16, Fit(16, 1)),
        ({"batch": 16, "micro": 4}, 7, Fit(4, 4)),
        ({"batch": 12, "micro": 4}, 6, Fit(6, 2)),
        ({"batch": 16, "tp": 2, "pp": 2}, 15, Fit(8, 1)),
        ({"batch": 8, "micro": 2, "pp": 2, "vpp": 2}, 8, Fit(8, 1)),
        ({"batch": 8, "ep": 4}, 7, Fit(4, 1)),
        ({"batch": 8, "fsdp": 4}, 6, Fit(4, 1)),
        ({"batch": 1}, 64, Fit(1, 1)),
    ],
)
def test_fit(settings: dict[str, Any], world_size: int, expected: Fit) -> None:
    use = fit(config(**settings), world_size)
    assert use == expected
    dp = config(**settings).parallel.dp(use.ranks)
    assert settings["batch"] % (dp * use.micro_batch_size) == 0


def test_no_fit_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"no number of ranks up to 3 fits .*Start at least 4 ranks"):
        fit(config(16, tp=2, pp=2), 3)
    with pytest.raises(UsageError, match=r"no number of ranks up to 4 fits"):
        fit(config(1, pp=2, vpp=2), 4)


def test_ranks_that_are_not_needed_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Machines of 4 ranks, 6 of 8 ranks are used."""
    for name, value in {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"RANK": "6", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        with_fitting_ranks(config(6))
    assert ended.value.code == 0
    assert capsys.readouterr().err == "rank 6 ends: train.global_batch_size=6 fits 6 of 8 ranks (parallel.elastic)\n"

    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    used, (message,) = with_fitting_ranks(config(6, 2))
    assert (rank_env.world_size(), rank_env.local_world_size()) == (6, 2)
    assert used.train.micro_batch_size == 1
    assert message.startswith("elastic: 6 of 8 ranks, tp=1 pp=1 dp=6, train.micro_batch_size=1 in place of 2; train.gl")
