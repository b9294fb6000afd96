"""The saver of real checkouts of Megatron-LM fails, and works with the runtime patch and with the static patch.

Set ``MEGATRON_LM_OLD`` to checkouts of core 0.9 to 0.12 or of ROCm's fork, separated by ``:``. The newest version is
that of ``MEGATRON_LM``.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint import filesystem

from isthmus.engine.upstream import startup_hook
from isthmus.engine.upstream.saver_patch import plan_patch, plan_revert

OLD = [Path(name) for name in os.environ.get("MEGATRON_LM_OLD", "").split(":") if name]
NEW = os.environ.get("MEGATRON_LM", "")
DRIVER = str(Path(__file__).with_name("async_save.py"))


def save(megatron: Path, mode: str, *site_packages: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", DRIVER, str(megatron), mode, *map(str, site_packages)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.stdout if done.returncode == 0 else done.stderr


def modes(megatron: Path) -> list[str]:
    source = (megatron / "megatron/core/dist_checkpointing/strategies/async_utils.py").read_text()
    return ["async", "persistent"] if "PersistentAsyncCaller" in source else ["async"]


@pytest.mark.skipif(not OLD, reason="no older Megatron-LM: set MEGATRON_LM_OLD to checkouts of core 0.9 to 0.12")
@pytest.mark.skipif(
    "serialization_format" not in inspect.signature(filesystem._write_item).parameters,
    reason="the saver of older Megatron-LM works with torch 2.6: needs torch 2.8",
)
@pytest.mark.parametrize("original", OLD, ids=lambda path: path.name)
def test_faulty_saver_is_fixed(original: Path, tmp_path: Path) -> None:
    checkout, site_packages = tmp_path / "Megatron-LM", tmp_path / "site-packages"
    shutil.copytree(original / "megatron", checkout / "megatron")
    assert "_write_item() " in save(checkout, "async")
    site_packages.mkdir()
    startup_hook.install(startup_hook.hook_files(site_packages))
    for mode in modes(original):
        assert save(checkout, mode, site_packages) == "loaded what was saved\n"
    plan_patch(checkout).write()
    for mode in modes(original):
        assert save(checkout, mode) == "loaded what was saved\n"
    plan_revert(checkout).write()
    assert plan_patch(checkout).before == plan_patch(original).before


@pytest.mark.skipif(not NEW, reason="no Megatron-LM: set MEGATRON_LM to a checkout of core_v0.16.1")
@pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="Megatron-LM imports einops: pip install einops")
def test_newest_saver_needs_no_patch() -> None:
    assert plan_patch(Path(NEW)).fault is None
    assert save(Path(NEW), "async") == "loaded what was saved\n"
