"""Free memory of the machine or of a container."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from isthmus.platforms.free_memory import free_bytes, trim_memory


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 50000\n")
    return tmp_path


def test_free_memory_of_a_container(group: Path) -> None:
    assert free_bytes(group) == 350000


@pytest.mark.parametrize("limit", ["max", str(1 << 60), "nonsense", None])
def test_free_memory_of_the_machine(limit: str | None, group: Path) -> None:
    (group / "memory.max").unlink() if limit is None else (group / "memory.max").write_text(f"{limit}\n")
    available = psutil.virtual_memory().available
    assert abs(free_bytes(group) - available) < available / 4


@pytest.mark.parametrize("calls", [[0], []], ids=["glibc", "without-malloc-trim"])
def test_trim_memory(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    library = SimpleNamespace(malloc_trim=lambda size: trimmed.append(size.value)) if calls else SimpleNamespace()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    trim_memory()
    assert trimmed == calls
