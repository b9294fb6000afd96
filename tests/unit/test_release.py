"""What a release publishes: its notes are the newest section of the changelog, which is that of the version."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def release(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_script", repository / ".ci/release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHANGELOG = """# Changelog

## [1.2.0] - 2026-01-31

### Convert

- Checkpoints can be converted.

## [1.1.0] - 2025-12-31

- Older.
"""


def test_the_version_of_the_package_has_notes_and_a_citation(release: ModuleType, repository: Path) -> None:
    import isthmus

    version = release.package_version((repository / "src/isthmus/__init__.py").read_text())
    assert version == isthmus.__version__
    assert "\n- " in release.release_notes((repository / "CHANGELOG.md").read_text(), version, dated=False)
    release.check_citation((repository / "CITATION.cff").read_text(), version)


def test_notes_are_the_newest_section(release: ModuleType) -> None:
    assert release.release_notes(CHANGELOG, "1.2.0", dated=True) == "### Convert\n\n- Checkpoints can be converted.\n"


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        (CHANGELOG.replace("1.2.0", "1.3.0"), "newest section is '[1.3.0] - 2026-01-31', not that of __version__"),
        (CHANGELOG.replace("- Checkpoints can be converted.", ""), "the section of 1.2.0 lists no change"),
        (CHANGELOG.replace("2026-01-31", "not released yet"), "has no date, got 'not released yet'"),
        ("# Changelog\n", "has no section"),
    ],
)
def test_other_sections_are_refused(release: ModuleType, changelog: str, message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        release.release_notes(changelog, "1.2.0", dated=True)


def test_another_version_in_the_citation_is_refused(release: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"the version is 1\.1\.0, but __version__ is 1\.2\.0"):
        release.check_citation("cff-version: 1.2.0\nversion: 1.1.0\n", "1.2.0")


def test_requirements_are_those_of_the_locked_python(release: ModuleType) -> None:
    lines = ["torch>=2.6", "tomli; python_version < '3.11'", "ray[default]; extra == 'ray'", "Jinja2[i18n]"]
    assert release.direct(lines, frozenset()) == {"torch": frozenset(), "jinja2": {"i18n"}}
    assert release.direct(lines, frozenset({"ray"})).keys() == {"torch", "jinja2", "ray"}
