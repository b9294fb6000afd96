"""Megatron-LM's own unit tests run on CPU ranks, and their outcomes are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MEGATRON_LM = os.environ.get("MEGATRON_LM", "")
PACKAGES = ("einops", "six", "pytest_asyncio", "pytest_mock")
MISSING = [name for name in PACKAGES if find_spec(name) is None]


UNIT_TESTS = """
import os, time
import pytest

def test_passes(): ...
def test_fails_on_a_rank(): assert os.environ["RANK"] == "0"
def test_hangs(): time.sleep(60)
def test_ends(): os._exit(3)
@pytest.mark.skip(reason="needs TransformerEngine")
def test_is_skipped(): ...
def test_passes_at_the_end(): ...
"""
RUN = """
import json, sys, time
from pathlib import Path
from upstream.forked_ranks import TestFile
folder = Path(sys.argv[1])
tests = TestFile(folder / "test_some.py", folder, folder / "some", ranks=2, limit_s=1)
lines = tests.run(frozenset(), time.monotonic() + 60)
print(json.dumps([[line["test"].partition("::")[2], line["outcome"]] for line in lines]))
"""


def test_each_test_has_one_outcome(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(UNIT_TESTS)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    paths = os.pathsep.join(str(repository / folder) for folder in ("src", "tests"))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert dict(json.loads(done.stdout)) == {
        "test_passes": "passed",
        "test_fails_on_a_rank": "failed",
        "test_hangs": "failed",
        "test_ends": "failed",
        "test_is_skipped": "skipped",
        "test_passes_at_the_end": "passed",
    }


@pytest.mark.skipif(not MEGATRON_LM, reason="no Megatron-LM: set MEGATRON_LM to a checkout of core_v0.16.1")
@pytest.mark.skipif(bool(MISSING), reason=f"Megatron-LM's tests import other packages: pip install {' '.join(MISSING)}")
def test_outcomes_are_counted(repository: Path, tmp_path: Path) -> None:
    script, out = repository / "benchmarks" / "upstream_tests.py", tmp_path / "result.json"
    # Their mappings need 8 ranks; every collective of tensor parallelism is compared with its definition.
    arguments = ["--only", "tensor_parallel/test_mappings", "--again", "--out", str(out)]
    command = [sys.executable, "-W", "ignore", str(script), MEGATRON_LM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["folders"] == {"tensor_parallel": result["total"]} and result["ranks"] == 8
    assert result["total"]["passed"] == result["total"]["tests"] == 7 and result["other"] == []
    assert str(tmp_path) not in json.dumps(result)
