"""A few inputs of `make fuzz` for each reader, and all that it once found, in ``findings``: ``<reader>--<what>``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hostile.contract import attempt
from hostile.readers import BY_NAME, READERS, SEEDS, Reader

FINDINGS = Path(__file__).parent / "findings"
SLOW = 0.2
"""Share of readers that take more than a few milliseconds."""


@pytest.fixture
def folder(reader: Reader, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reader.seed, tmp_path / "seed"))


@pytest.mark.thorough_cases("arrow-state", "arrow")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_inputs_are_read_or_refused(reader: Reader, folder: Path) -> None:
    assert attempt(reader, (SEEDS / reader.file).read_bytes(), folder) == "read"
    outcomes = [attempt(reader, reader.content(number), folder) for number in range(2 if reader.share <= SLOW else 8)]
    assert len(outcomes) == 2 or "refused" in outcomes or reader.name in ("metrics", "tracker-ids")


@pytest.mark.parametrize("finding", sorted(FINDINGS.iterdir()), ids=lambda path: path.name)
def test_findings_stay_fixed(finding: Path, tmp_path: Path) -> None:
    reader = BY_NAME[finding.name.partition("--")[0]]
    folder = Path(shutil.copytree(reader.seed, tmp_path / "seed"))
    attempt(reader, finding.read_bytes(), folder)


def test_the_files_stay_small() -> None:
    files = [path for folder in (SEEDS, FINDINGS) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
