"""What Megatron-Core asks of CUDA lands on the CPU; nobody else notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the CPU adapter is for machines without a GPU; run this where torch sees none")
    probe = Path(__file__).with_name("adapter_probe.py")
    done = subprocess.run([sys.executable, str(probe)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_refuses_where_a_gpu_is_in_use(found: dict[str, Any]) -> None:
    assert "this process uses a GPU" in found["refused"]
    assert found["untouched"] == "builtin_function_or_method"


def test_a_second_call_changes_nothing(found: dict[str, Any]) -> None:
    assert found["once"]


def test_tensors_for_cuda_are_made_on_the_cpu(found: dict[str, Any]) -> None:
    assert set(found["made"].values()) == {"cpu"}
    assert found["moved"] == "cpu"


def test_other_devices_stay_what_they_are(found: dict[str, Any]) -> None:
    assert found["meta"] == "meta"


def test_a_device_context_still_holds(found: dict[str, Any]) -> None:
    # transformers builds models in one: without it their rotary tables would be wrong, and nothing would say so.
    assert found["in meta"] == ["meta", "meta", "meta"]


def test_types_look_like_cuda_to_megatron_alone(found: dict[str, Any]) -> None:
    assert found["type for megatron"] == "torch.cuda.FloatTensor"
    assert found["type for us"] == "torch.FloatTensor"
    assert found["cast for megatron"] == "torch.int64"


def test_nothing_is_waited_for(found: dict[str, Any]) -> None:
    assert found["query"]


def test_the_random_state_is_the_cpus(found: dict[str, Any]) -> None:
    assert found["random"]


def test_no_gpu_is_claimed(found: dict[str, Any]) -> None:
    assert not found["available"]


@pytest.mark.processes
def test_only_megatron_core_calls_torch_cuda() -> None:
    """Our own code passes devices explicitly in a step, an evaluation and a checkpoint on a CPU."""
    probe = Path(__file__).with_name("cuda_call_probe.py")
    done = subprocess.run([sys.executable, str(probe)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"rank": 0, "callers": []}
