from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.errors import OutputExists
from isthmus.hf.staged_folder import StagedFolder


def filled(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(text)
    return folder


def test_existing_folder_is_refused_unless_it_may_be_replaced(tmp_path: Path) -> None:
    old = filled(tmp_path / "hf", "old")
    with pytest.raises(OutputExists), StagedFolder(old):
        pass
    with StagedFolder(old, replace=True) as staged:
        (staged.path / "weights").write_text("new")
        assert (old / "weights").read_text() == "old"
    assert (old / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_replaced_folder_stays_if_the_new_one_fails(tmp_path: Path) -> None:
    old = filled(tmp_path / "hf", "old")
    with pytest.raises(ZeroDivisionError), StagedFolder(old, replace=True) as staged:
        (staged.path / "weights").write_text("half")
        raise ZeroDivisionError
    assert (old / "weights").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_existing_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("mine")
    with pytest.raises(OutputExists):
        StagedFolder(tmp_path / "hf", replace=True).create()
