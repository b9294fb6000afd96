"""Rank task: Megatron-Core's GPTModel with its local layers, built from the arguments in a checkpoint."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from isthmus.engine.parallel.live_parameters import live_tensors
from isthmus.platforms.detect import detect
from isthmus.recipes.model.rank_model import join_and_build
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from ranks.tasks import _plain_config


def load_into_megatron_model(
    *, model: str, checkpoint_folder: str, strict: str, tp: int = 1, pp: int = 1
) -> dict[str, Any]:
    """Load a converted checkpoint into Megatron-Core's GPTModel.

    Args:
        model: the model folder that was converted.
        checkpoint_folder: the converted checkpoint.
        strict: a value of ``StrictHandling``.
        tp: tensor-parallel ranks.
        pp: pipeline stages.

    Returns:
        ``max_difference`` from the tensors that Isthmus loads from the model folder, over all ranks, and the number of
        ``tensors``.
    """
    config = _plain_config(model, tp, pp)
    ours = join_and_build(
        config, plan_model(open_run_model(config), config), detect("cpu"), "fp32", training=False
    ).stages
    expected = live_tensors(ours)
    args = dist_checkpointing.load_common_state_dict(checkpoint_folder)["args"]
    theirs = build_megatron_model(args, tp, pp)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    state = dist_checkpointing.load(
        {"model": theirs.sharded_state_dict()}, checkpoint_folder, strict=StrictHandling(strict)
    )
    theirs.load_state_dict(state["model"])
    result = live_tensors(theirs)
    assert result.keys() == expected.keys(), result.keys() ^ expected.keys()
    difference = max((tensor - expected[name]).abs().max().item() for name, tensor in result.items())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (difference, len(result)))
    return {
        "max_difference": max(difference for difference, _ in gathered),
        "tensors": sum(count for _, count in gathered),
    }


def build_megatron_model(args: Namespace, tp: int, pp: int) -> GPTModel:
    """Build the model from arguments like Megatron-LM's ``gpt_builders.py``."""
    fields = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(TransformerConfig)
        if hasattr(args, field.name)
    }
    fields |= {
        "num_moe_experts": args.num_experts,
        "gated_linear_unit": args.swiglu,
        "activation_func": F.silu if args.swiglu else F.gelu,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_tensor_parallel_size": tp,
        "pipeline_dtype": torch.float32,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "transformer_impl": "local",
    }
    config = TransformerConfig(**fields)
    if args.num_experts:
        spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-args.padded_vocab_size // tp) * tp,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
    )
