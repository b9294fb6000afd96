"""A checkpoint that any version of megatron-core has written is read under each other one: runs, conversions, its own.

``make test-megatron-core`` installs the versions and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks.tiny import build_model_folder, build_samples

FOLDER = os.environ.get("ISTHMUS_MEGATRON_CORE", "")
"""Contains a folder per version, for PYTHONPATH."""
VERSIONS = sorted(path.name for path in Path(FOLDER).glob("0.*")) if FOLDER else ["none"]
DRIVER = str(Path(__file__).with_name("version_tasks.py"))

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FOLDER, reason="needs several versions of megatron-core: make test-megatron-core"),
]


def run_under(version: str, task: str, **settings: Any) -> dict[str, Any]:
    paths = [str(Path(FOLDER, version)), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", DRIVER, task, json.dumps(settings, default=str)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["version"].startswith(f"{version}.")
    return result


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A dense model and one with experts."""
    root = tmp_path_factory.mktemp("models")
    models = {family: str(build_model_folder(root / family, family)) for family in ("qwen3", "mixtral")}
    return {"models": models, "samples": build_samples(root / "samples")}


@pytest.fixture(scope="module")
def written(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folder and run of each version."""
    values = {}
    for version in VERSIONS:
        root = tmp_path_factory.mktemp("written")
        values[version] = root, run_under(version, "write", root=root, **settings)["runs"]
    return values


@pytest.mark.parametrize("reader", VERSIONS)
def test_reads_checkpoints_of_all_versions(
    reader: str, written: dict[str, tuple[Path, Any]], settings: dict[str, Any], tmp_path: Path
) -> None:
    roots = {version: root for version, (root, _) in written.items()}
    result = run_under(reader, "read", written=roots, out=tmp_path, **settings)["values"]
    for writer, (_, runs) in written.items():
        for family, run in runs.items():
            read = result[writer][family]
            assert read["loss"] == run["loss"][10:] and read["digest"] == run["digest"]
            assert read["max_difference"] == 0 and read["exported"] and read["converted"] and read["saved"]


def test_layout_of_each_version(written: dict[str, tuple[Path, Any]]) -> None:
    """0.19 saves no common.pt; Isthmus writes it for the older ones in any case."""
    for version, (root, _) in written.items():
        assert (root / "qwen3" / "saved" / "iter_0000007" / "common.pt").exists() == (version < "0.19")
        for ours in ("run/iter_0000010", "converted/release"):
            assert (root / "qwen3" / ours / "common.pt").is_file()
