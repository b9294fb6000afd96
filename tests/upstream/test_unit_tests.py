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
