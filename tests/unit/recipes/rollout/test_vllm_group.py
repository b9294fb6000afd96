"""Weights through process groups: the engine of vLLM's workers, in a small server of this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.engine.generation.schedule import Decoding
from isthmus.errors import CheckFailed, Hang, UsageError
from isthmus.recipes.rollout import vllm_engine, vllm_group
from isthmus.recipes.rollout.vllm_engine import VllmEngine
from unit.recipes.rollout.fake_vllm import FakeVllm, Policy, rollout_config
from unit.recipes.rollout.group_vllm import SHAPES, GroupVllm, engine_module


@pytest.fixture(scope="module")
def transfer_module() -> Iterator[Any]:
    with engine_module() as module:
        yield module


@pytest.fixture
def server(transfer_module: Any) -> Iterator[GroupVllm]:
    server = GroupVllm(transfer_module)
    yield server
    server.close()


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return Policy(tmp_path)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors_of(step: int) -> dict[str, Tensor]:
    return {name: torch.full(shape, float(step + number)) for number, (name, shape) in enumerate(SHAPES.items())}


def build(policy: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *servers: FakeVllm, **rollout: Any) -> VllmEngine:
    """An engine whose policy has other weights at each transfer, in buckets of two tensors."""
    steps = iter(range(1, 9))
    monkeypatch.setattr(vllm_engine, "full_tensors", lambda model: iter(tensors_of(next(steps)).items()))
    monkeypatch.setattr(vllm_group.packed, "__defaults__", (96,))
    config = rollout_config(*(server.url for server in servers), transfer="group", **rollout)
    return VllmEngine.build(config, policy, policy, policy, folder, policy.messages.append, torch.device("cpu"))


@pytest.mark.slow
def test_workers_get_the_tensors_in_buckets(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(policy, tmp_path, monkeypatch, server)
    for step in (0, 1):
        engine.update_weights(step)
        for model in server.models:
            assert model.loads == 2 * (step + 1)
            assert all(torch.equal(model.values[name], tensor) for name, tensor in tensors_of(step + 1).items())
    update = ["start_weight_update", "update_weights", "update_weights", "finish_weight_update"]
    assert server.paths == ["init_weight_transfer_engine", *update, *update]
    answers = engine.start([[10, 11]], [3], Decoding(3, frozenset({2}), temperature=1.0)).wait(lambda: None)
    assert answers[0].tokens == [11, 7, 7]
    engine.close()
    assert server.paths[-1] == "shutdown_weight_transfer_engine" and not (tmp_path / "vllm").exists()


@pytest.mark.slow
def test_a_tensor_that_arrives_otherwise_is_named(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(policy, tmp_path, monkeypatch, server)
    server.alters = "model.norm.weight"
    with pytest.raises(CheckFailed, match=r"the tensor model\.norm\.weight differs \(1 of 3 tensors\)"):
        engine.update_weights(0)


@pytest.mark.slow
def test_a_parameter_without_tensor_is_named(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models[1].ignored = "lm_head.weight"
    engine = build(policy, tmp_path, monkeypatch, server)
    with pytest.raises(CheckFailed, match=r"has not loaded its parameter lm_head\.weight"):
        engine.update_weights(0)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights"])
def test_a_server_that_fails_gets_the_next_weights_through_a_new_group(
    path: str, server: GroupVllm, transfer_module: Any, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = GroupVllm(transfer_module)
    engine = build(policy, tmp_path, monkeypatch, server, other)
    server.fails_at = path
    started_s = time.monotonic()
    engine.update_weights(0)
    assert time.monotonic() - started_s < 15  # of rollout.timeout_s=20
    (message,) = [text for text in policy.messages if text.startswith("warning")]
    assert f"{server.url} has failed at {path}: out of memory" in message
    server.fails_at = ""
    engine.update_weights(1)
    assert server.paths.count("init_weight_transfer_engine") == 2
    for model in (*server.models, *other.models):
        assert torch.equal(model.values["lm_head.weight"], tensors_of(2)["lm_head.weight"])
    engine.close()
    other.close()


@pytest.mark.slow
def test_workers_that_die_are_lost_without_an_answer_of_the_server(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_group, "_REASON_S", 0.1)
    engine = build(policy, tmp_path, monkeypatch, server)
    server.hangs_s = 15.0
    started_s = time.monotonic()
    with pytest.raises(Hang, match="no vLLM server is left"):
        engine.update_weights(0)
    assert time.monotonic() - started_s < server.hangs_s
    assert "has left the process group" in policy.messages[-1]


@pytest.mark.slow
def test_the_only_server_fails(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(policy, tmp_path, monkeypatch, server)
    server.fails_at = "/update_weights"
    with pytest.raises(Hang, match="no vLLM server is left"):
        engine.update_weights(0)


@pytest.mark.slow
def test_the_update_of_a_killed_run_is_ended(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply("/start_weight_update", {})
    build(policy, tmp_path, monkeypatch, server).update_weights(0)
    assert torch.equal(server.models[0].values["lm_head.weight"], tensors_of(1)["lm_head.weight"])


def test_a_server_without_the_engine_is_refused(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.settings["weight_transfer"] = "nccl"
    with pytest.raises(UsageError, match=r"does not join process groups\. Start it with --weight-transfer-config"):
        build(policy, tmp_path, monkeypatch, server)


def test_an_adapter_is_refused(
    server: GroupVllm, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "has_adapter", lambda *_: True)
    with pytest.raises(UsageError, match=r"rollout\.transfer=group: servers get the adapter of this run alone"):
        build(policy, tmp_path, monkeypatch, server)


def test_buckets_have_tensors_of_several_dtypes() -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.arange(4, dtype=torch.float32).view(2, 2),
        "large": torch.arange(40, dtype=torch.float32),
        "scalar": torch.tensor(2.0),
        "none": torch.zeros(0, 3),
    }
    contents, sizes = {}, []
    for bucket in vllm_group.packed(tensors.items(), limit=48):
        sizes.append(bucket.buffer.numel())
        contents |= {name: view.clone() for name, view in zip(bucket.names, bucket.views, strict=True)}
    assert sizes == [32, 160, 16]
    assert contents.keys() == tensors.keys()
    assert all(torch.equal(contents[name], tensor) for name, tensor in tensors.items())
