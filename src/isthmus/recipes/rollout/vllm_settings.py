"""Settings of vLLM servers: arguments of those that a run starts, and checks of running ones."""

from __future__ import annotations

from typing import NamedTuple

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError, escaped
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.rollout.routed_experts import SERVER_OPTION
from isthmus.recipes.rollout.vllm_plugin.isthmus_vllm import BACKEND, COMPARED_KEYS
from isthmus.recipes.rollout.vllm_server import (
    EXTENSION,
    GROUP_OPTION,
    PLUGIN,
    ServerLost,
    VllmServer,
    how_to_start,
)
from isthmus.recipes.rollout.vllm_weights import MODEL, has_adapter

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank``."""
_TEXT = "Hello World! 12 + 3 = 15, naïve café\n\tdef f(x): return x"
"""On which tokenizers are compared."""


def server_arguments(config: RunConfig, model: RankModel) -> list[str]:
    """Arguments of a server of this run, besides the model."""
    result = ["--served-model-name", MODEL, "--dtype", str(model.dtype).removeprefix("torch."), "--enforce-eager"]
    result += ["--max-model-len", str(config.data.seq_length), "--logprobs-mode", _logprobs_mode(config)]
    result += ["--generation-config", "vllm", "--worker-extension-cls", EXTENSION]
    if config.rollout.router_replay is True:
        result.append(SERVER_OPTION)
    if config.model.trust_remote_code:
        result.append("--trust-remote-code")
    if has_adapter(config, model):
        rank = config.lora.rank or 1
        result += ["--enable-lora", "--max-lora-rank", str(next((r for r in _LORA_RANKS if r >= rank), rank))]
    return result


class ServerFeatures(NamedTuple):
    """What a server can do besides."""

    returns_experts: bool
    """It returns the experts that it chooses."""
    joins_groups: bool
    """It gets weights through process groups."""


def check_server(
    server: VllmServer, config: RunConfig, plan: ModelPlan, tokenizer: Tokenizer, deadline: float
) -> ServerFeatures:
    """What a server can do; UsageError if it does not fit to the policy."""
    try:
        (settings, *_) = server.rpc("isthmus_settings", deadline=deadline)
        models = server.get("/v1/models", deadline)["data"]
        served, longest = str(models[0]["id"]), int(models[0]["max_model_len"])
        tokens = server.post("/tokenize", {"prompt": _TEXT, "model": served, "add_special_tokens": False}, deadline)
        mode, served_config, model_type = settings["logprobs_mode"], settings["config"], settings["model_type"]
        tokens = tokens["tokens"]
    except ServerLost as error:
        raise UsageError(f"{error}. {how_to_start(server.name)}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{server.name} is not vLLM of a supported version: {escaped(repr(error))}.") from error
    rollout, policy = config.rollout, plan.source.config
    differing = [key for key in COMPARED_KEYS if key in policy and served_config.get(key) != policy[key]]
    if model_type != policy.get("model_type") or differing:
        key = differing[0] if differing else "model_type"
        value = served_config.get(key) if differing else model_type
        raise UsageError(
            f"{server.name} has another model than the policy: {key} is {escaped(str(value))} there and "
            f"{policy.get(key)} in {plan.source.path}. Start it with that model."
        )
    if tokens != tokenizer.encode(_TEXT):
        raise UsageError(
            f"{server.name} has another tokenizer than the policy: it makes other tokens of {_TEXT!r}. Start it "
            f"with the model and tokenizer of {plan.source.path}."
        )
    if longest < config.data.seq_length:
        raise UsageError(
            f"{server.name} has --max-model-len {longest}, less than data.seq_length="
            f"{config.data.seq_length}. Start it with that length."
        )
    expected = _logprobs_mode(config)
    if mode != expected and (rollout.temperature, rollout.top_p) != (1, 1):
        raise UsageError(
            f"{server.name} has --logprobs-mode {escaped(str(mode))}; rollout.temperature={rollout.temperature:g} "
            f"and rollout.top_p={rollout.top_p:g} need {expected}. Start it with that mode."
        )
    if rollout.url and served != MODEL:
        raise UsageError(f"{server.name} serves the name {escaped(served)}. Start it with --served-model-name {MODEL}.")
    returns_experts = bool(settings.get("returns_routed_experts", False))
    if rollout.router_replay is True and not returns_experts:
        raise UsageError(
            f"rollout.router_replay=true: {server.name} does not return the experts that it chooses. Start it with "
            f"{SERVER_OPTION} and the present {PLUGIN.name}, or set rollout.router_replay=false."
        )
    joins_groups = settings.get("weight_transfer") == BACKEND
    if rollout.transfer == "group" and not joins_groups:
        raise UsageError(
            f"rollout.transfer=group: {server.name} does not join process groups. Start it with {GROUP_OPTION} and the "
            f"present files of {PLUGIN.parent}, or set rollout.transfer=files."
        )
    return ServerFeatures(returns_experts, joins_groups)


def _logprobs_mode(config: RunConfig) -> str:
    """vLLM's mode that returns log-probabilities at the temperature, among all tokens."""
    return "raw_logprobs" if config.rollout.temperature == 1 else "processed_logprobs"
