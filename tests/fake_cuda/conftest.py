"""The fixture of traces, see README.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_cuda.guard import Unavailable
from fake_cuda.runner import FakeCuda


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCuda]:
    """Runs functions in processes where torch sees a GPU."""
    try:
        runner = FakeCuda(tmp_path_factory.mktemp("fake_cuda") / "worker.log")
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield runner
    runner.close()
