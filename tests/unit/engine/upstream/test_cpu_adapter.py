"""The CPU adapter redirects Megatron-Core's CUDA calls and changes nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the CPU adapter is for machines without a GPU; run this where torch sees none")
    script = Path(__file__).with_name("adapter_probe.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_process_that_uses_a_gpu_is_refused(probe: dict[str, Any]) -> None:
    assert "this process uses a GPU" in probe["refused"]
    assert probe["untouched"] == "builtin_function_or_method"


def test_a_second_call_changes_nothing(probe: dict[str, Any]) -> None:
    assert probe["once"]


def test_tensors_for_cuda_are_made_on_the_cpu(probe: dict[str, Any]) -> None:
    assert set(probe["made"].values()) == {"cpu"}
    assert probe["moved"] == "cpu"


def test_other_devices_are_not_redirected(probe: dict[str, Any]) -> None:
    assert probe["meta"] == "meta"


def test_device_contexts_still_work(probe: dict[str, Any]) -> None:
    # transformers builds models in one; without it their rotary tables would be silently wrong.
    assert probe["in meta"] == ["meta", "meta", "meta"]


def test_only_megatron_sees_cuda_types(probe: dict[str, Any]) -> None:
    assert probe["type for megatron"] == "torch.cuda.FloatTensor"
    assert probe["type for us"] == "torch.FloatTensor"
    assert probe["cast for megatron"] == "torch.int64"


def test_events_are_complete(probe: dict[str, Any]) -> None:
    assert probe["query"]


def test_the_random_state_is_the_cpus(probe: dict[str, Any]) -> None:
    assert probe["random"]


def test_cuda_is_not_available(probe: dict[str, Any]) -> None:
    assert not probe["available"]


@pytest.mark.processes
def test_only_megatron_core_calls_torch_cuda() -> None:
    """Our own code passes devices explicitly in a step, an evaluation and a checkpoint on a CPU."""
    script = Path(__file__).with_name("cuda_call_probe.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"rank": 0, "callers": []}
