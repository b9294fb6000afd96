"""The parameters of a live model by canonical name, and which of them are trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn


def live_tensors(model: Any) -> dict[str, Tensor]:
    """The data of :func:`live_parameters`."""
    return {name: parameter.data for name, parameter in live_parameters(model).items()}


def freeze(model: Sequence[Any], names: Collection[str]) -> None:
    """Stop the training of the parameters with these canonical names; before the data-parallel wrapper is built."""
    for stage in model:
        stage.frozen = names
    for name, parameter in live_parameters(list(model)).items():
        if name in names:
            parameter.requires_grad_(False)


def live_parameters(model: Any) -> dict[str, nn.Parameter]:
    """This rank's parameters by canonical name, with model-wide layer and expert numbers, without adapters.

    ``model`` is a decoder, wrapped or not, or the list of this rank's stages. The last stage of a tied model
    has a copy of the embedding as ``output_layer.weight``, and with MTP layers under the embedding's name.
    """
    if isinstance(model, list):
        return {name: parameter for chunk in model for name, parameter in live_parameters(chunk).items()}
    decoder = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    parameters = decoder.named_parameters()
    return {canonical_name(decoder, name): parameter for name, parameter in parameters if "lora" not in name.split(".")}


def canonical_name(decoder: Any, name: str) -> str:
    """The name of a parameter or module of ``decoder`` with model-wide layer and expert numbers."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(decoder.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts[:-1]:
        index = parts.index("local_experts") + 1
        ep = parallel_state.get_expert_model_parallel_world_size()
        experts = decoder.config.num_moe_experts or 0
        parts[index] = str(parallel_state.get_expert_model_parallel_rank() * experts // ep + int(parts[index]))
    return ".".join(parts)


def mtp_shared_tensors(model: list[Any]) -> dict[str, Tensor]:
    """Embedding and projection that the last stage shares with MTP layers, by the names of their copies in HF files."""
    last = get_attr_wrapped_model(model[-1], "mtp_process", return_model_obj=True)
    if not last.mtp_process:
        return {}
    shared = {"embed_tokens": last.embedding.word_embeddings.weight, "output_layer": last.output_projection()[0]}
    depths = range(last.config.mtp_num_layers)
    return {f"mtp.layers.{depth}.{name}.weight": weight.data for depth in depths for name, weight in shared.items()}
