"""Rank task: Megatron-Core's MambaModel on a CPU, built without mamba_ssm and TransformerEngine to load checkpoints."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from isthmus.engine.parallel.live_parameters import live_tensors
from isthmus.recipes.model.rank_model import join_and_build
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from ranks.pool_worker import platform
from ranks.tasks import _plain_config

_SYMBOLS = {"mamba2": "M", "attention": "*"}


class NormedColumnParallelLinear(ColumnParallelLinear):
    """The parameters of TransformerEngine's linear layer with a norm before it."""

    def __init__(self, input_size: int, output_size: int, *, tp_comm_buffer_name: str = "", **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        self.layer_norm_weight = nn.Parameter(torch.zeros(input_size))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        result: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
        return result


class GatedNormWeight(nn.Module):
    """The parameter of the gated norm of mamba_ssm."""

    def __init__(self, size: int, **_settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


def load_into_mamba_model(*, model: str, checkpoint_folder: str, strict: str, tp: int = 1) -> dict[str, Any]:
    """Load a converted checkpoint with exactly the tensors of a MambaModel; see :mod:`ranks.megatron_core_model`.

    Returns:
        ``max_difference`` from the tensors that Isthmus loads from the model folder, the number of ``tensors``, and the
        dtypes of ``A_log``, in Megatron-Core and here.
    """
    config = _plain_config(model, tp)
    plan = plan_model(open_run_model(config), config)
    expected = live_tensors(join_and_build(config, plan, platform(), "fp32", training=False).stages)
    theirs = _mamba_model(plan.architecture, tp)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.fill_(torch.nan)
    entries = {"model": theirs.sharded_state_dict()}
    if strict == StrictHandling.RAISE_ALL.value:
        del entries["model"]["output_layer._extra_state"]  # an object of TransformerEngine, and None here
    state = dist_checkpointing.load(entries, checkpoint_folder, strict=StrictHandling(strict))
    theirs.load_state_dict(state["model"], strict=strict == StrictHandling.RAISE_ALL.value)
    values = {_own_name(name, expected): parameter.data for name, parameter in theirs.named_parameters()}
    assert values.keys() == expected.keys(), values.keys() ^ expected.keys()
    return {
        "max_difference": max(float((values[name] - expected[name]).abs().max()) for name in expected),
        "tensors": len(values),
        "dtypes": [str(tensors["decoder.layers.0.mixer.A_log"].dtype) for tensors in (values, expected)],
    }


def _own_name(name: str, names: dict[str, Tensor]) -> str:
    """The name that Isthmus has for a parameter of theirs: norms are modules of their own."""
    if name.endswith(".layer_norm_weight"):
        norm = "pre_mlp_layernorm" if "linear_fc1" in name else "input_layernorm"
        return ".".join([*name.split(".")[:3], norm, "weight"])
    return name if name in names else name.replace("final_norm", "final_layernorm")


def _mamba_model(arch: Any, tp: int) -> Any:
    stubs = {name: ModuleType(name) for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")}
    einops = ModuleType("einops")
    for function in ("rearrange", "repeat"):
        setattr(einops, function, None)
    norm, scan = ModuleType("mamba_ssm.ops.triton.layernorm_gated"), ModuleType("mamba_ssm.ops.triton.ssd_combined")
    norm.RMSNorm = GatedNormWeight  # type: ignore[attr-defined]
    for function in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"):
        setattr(scan, function, None)  # not called
    kernels = ModuleType("megatron.core.inference.contexts.attention_context.triton.tensor_ops")  # needs Triton
    for function in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
        setattr(kernels, function, None)
    stubs |= {item.__name__: item for item in (einops, norm, scan, kernels)}
    with patch.dict(sys.modules, stubs):
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm import mamba_block, mamba_mixer
        from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
        from megatron.core.ssm.mlp_layer import MLPLayer
    mixer = ModuleSpec(
        mamba_mixer.MambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(in_proj=NormedColumnParallelLinear, out_proj=RowParallelLinear),
    )
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=NormedColumnParallelLinear, linear_fc2=RowParallelLinear))
    add = get_bias_dropout_add
    stack = ModuleSpec(
        mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add)),
            ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=add),
            ),
            ModuleSpec(MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=add)),
        ),
    )
    pattern = "".join(
        _SYMBOLS[mixers[0]] if mixers else "-" for mixers in map(arch.pattern.mixers_of, range(arch.num_layers))
    )
    with patch.object(mamba_block, "TENorm", WrappedTorchNorm):
        return MambaModel(
            config=_config(arch, tp),
            mamba_stack_spec=stack,
            vocab_size=-(-arch.vocab_size // tp) * tp,
            max_sequence_length=arch.max_position_embeddings,
            hybrid_override_pattern=pattern,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )


def _config(arch: Any, tp: int) -> TransformerConfig:
    two = arch.setting("mamba2")
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.mlp.ffn_hidden_size,
        num_attention_heads=arch.attention.num_attention_heads,
        num_query_groups=arch.attention.num_query_groups,
        kv_channels=arch.attention.kv_channels,
        add_bias_linear=False,
        normalization="RMSNorm",
        activation_func=lambda x: F.relu(x).square(),
        mamba_state_dim=two.state_size,
        mamba_head_dim=two.head_dim,
        mamba_num_groups=two.num_groups,
        mamba_num_heads=two.num_heads,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
