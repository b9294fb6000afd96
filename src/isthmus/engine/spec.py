"""Which module builds which part of a layer: the backend of Isthmus, in Megatron-Core's terms."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from isthmus.engine.activation import SwiGLU
from isthmus.engine.attention import PackedSelfAttention, VarlenAttention
from isthmus.engine.linear import ColumnParallelLinear, RowParallelLinear
from isthmus.engine.names import FUSED_NORMS
from isthmus.engine.norm import LayerNorm, RMSNorm


class TorchProvider(BackendSpecProvider):
    """Layers in plain PyTorch: no TransformerEngine, no Apex, alike on ROCm, CUDA and CPU."""

    def column_parallel_linear(self) -> type:
        """Split by output rows."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Split by input columns."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Norms are modules of their own."""
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        """None: norms are modules of their own."""
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The norm over hidden or head channels."""
        return RMSNorm if rms_norm else LayerNorm

    def core_attention(self) -> type:
        """Scores, softmax and values of packed samples."""
        return VarlenAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        """Experts; refused, this version builds dense layers."""
        raise ValueError("mixture-of-experts layers are not built by this version of Isthmus")

    def activation_func(self) -> type:
        """The gated activation between the two projections."""
        return SwiGLU


def decoder_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage.

    Args:
        config: decides norms and whether queries and keys are normalised.
        num_layers: layers on this stage.
    """
    provider = TorchProvider()
    norm = provider.layer_norm(rms_norm=config.normalization == "RMSNorm")
    qk_norm = norm if config.qk_layernorm else None
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=PackedSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=provider.column_parallel_linear(),
                    core_attention=provider.core_attention(),
                    linear_proj=provider.row_parallel_linear(),
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=provider.column_parallel_linear(),
                    linear_fc2=provider.row_parallel_linear(),
                    activation_func=provider.activation_func(),
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            # The keys of a saved checkpoint follow the fused spelling, so that every spec can load it.
            sharded_state_dict_keys_map=dict(FUSED_NORMS),
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
