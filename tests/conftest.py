"""Shared by all tests: no network, one thread, the folder of real data, and skips of GPU tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before torch or transformers is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Each process has its own cache of remote model code.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="isthmus-tests-")

import pytest

from shared_server import server_folder

gc.set_threshold(100_000, 50, 100)  # imports and collection make few objects that are garbage
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
server_folder()  # the workers of pytest-xdist have that of the process that started them
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    """The contents of pyproject.toml."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10, where pytest requires tomli
        import tomli as tomllib
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Restore the default action of SIGHUP: ``nohup`` ignores the signal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data files and the Llama 2 tokenizer, from ``ISTHMUS_SHARED_DATA`` or next to the checkout; read-only."""
    variable = os.environ.get("ISTHMUS_SHARED_DATA")
    folder = Path(variable) if variable else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set ISTHMUS_SHARED_DATA to the folder that holds alpaca_en_demo.json")
    return folder


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking the imported libraries again and again."""
    gc.collect()
    gc.freeze()


def mark_cases(config: pytest.Config, items: list[pytest.Item], tier: str) -> None:
    """Give the cases that ``<tier>_cases`` names the marker of the tier; a name without a case is an error.

    Names are not checked where the command selects single cases.
    """
    cases: dict[str, set[str]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], set()).add(item.callspec.id)
    for item in items:
        marker = item.get_closest_marker(f"{tier}_cases")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        missing = set(marker.args) - cases.get(test, set())
        if missing and not any("[" in argument for argument in config.args):
            raise pytest.UsageError(
                f"{test}: {tier}_cases names {sorted(missing)}; the cases are {sorted(cases.get(test, ()))}"
            )
        if item.callspec.id in marker.args:
            item.add_marker(tier)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases with their tier; skip ``gpu`` tests without a GPU: torch is imported only if one is collected."""
    for tier in ("sweep", "slow", "thorough"):
        mark_cases(config, items, tier)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no GPU: needs torch with CUDA or ROCm"))
