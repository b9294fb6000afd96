"""What every test shares: no network, few threads, the folder of real data, and honest skips."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Set before anything imports torch or transformers. Tests share few cores with each other, and reach no hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Where transformers keeps the code of models that bring some: each process has its own.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="isthmus-tests-")

import pytest

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture
def hangups_count() -> Iterator[None]:
    """SIGHUP does what it does in a terminal, also where the tests were started by ``nohup``, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data files and the Llama 2 tokenizer, read only; named by ``ISTHMUS_SHARED_DATA`` or beside the checkout."""
    named = os.environ.get("ISTHMUS_SHARED_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set ISTHMUS_SHARED_DATA to the folder that holds alpaca_en_demo.json")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests, saying so, where there is no GPU; torch is only imported when such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no GPU here: run on a machine whose torch sees one (CUDA or ROCm)"))
