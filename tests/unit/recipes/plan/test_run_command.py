"""The recorded command is the one that the user typed."""

from __future__ import annotations

import sys

import pytest

from isthmus.platforms import rank_env
from isthmus.recipes.plan.run_record import _command

ARGUMENTS = ["sft", "run.yaml", "--nproc", "2", "data.columns={'prompt': 'a b'}"]
TYPED = """sft run.yaml --nproc 2 'data.columns={'"'"'prompt'"'"': '"'"'a b'"'"'}'"""


@pytest.mark.parametrize(
    ("program", "recorded"),
    [
        ("/opt/env/bin/isthmus", "isthmus"),
        ("/opt/env/site-packages/isthmus/__main__.py", "python -m isthmus"),
        ("train.py", "train.py"),
    ],
)
def test_one_process(monkeypatch: pytest.MonkeyPatch, program: str, recorded: str) -> None:
    monkeypatch.delenv(rank_env.STOP_FILE, raising=False)
    monkeypatch.setattr(sys, "argv", [program, *ARGUMENTS])
    assert _command() == f"{recorded} {TYPED}"


def test_a_rank_of_nproc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_env.STOP_FILE, "/tmp/stop")
    monkeypatch.setattr(sys, "argv", ["-c", *ARGUMENTS])
    assert _command() == f"isthmus {TYPED}"
