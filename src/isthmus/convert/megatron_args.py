"""The arguments that Megatron-LM keeps in a checkpoint; its loader takes the sizes of the model from them.

Names and meaning are those of Megatron-LM core_v0.16.1, ``megatron/training/arguments.py`` and ``checkpointing.py``.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from isthmus.convert.grid import Grid
from isthmus.families.architecture import Architecture


def megatron_args(
    arch: Architecture,
    dtype: torch.dtype,
    *,
    grid: Grid | None = None,
    padded_vocab_size: int | None = None,
    spelling: str = "te",
) -> Namespace:
    """``args`` of a checkpoint that holds the weights of ``arch`` in ``dtype``.

    Args:
        arch: the model.
        dtype: of its tensors.
        grid: ranks of a legacy checkpoint; None for ``torch_dist``, which has none.
        padded_vocab_size: rows of the embedding over all ranks; None where it is not padded.
        spelling: ``te`` or ``local``, whose names a legacy checkpoint has.
    """
    ckpt_format = "torch_dist" if grid is None else "torch"
    grid = grid or Grid()
    scaling = arch.rope_scaling
    return Namespace(
        # Which checkpoint it is.
        ckpt_format=ckpt_format,
        transformer_impl="transformer_engine" if spelling == "te" else "local",
        iteration=0,
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.expert_tp,
        context_parallel_size=1,
        world_size=len(grid.files()),
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        # Which model.
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        group_query_attention=arch.num_query_groups != arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.kv_channels,
        seq_length=arch.max_position_embeddings,
        max_position_embeddings=arch.max_position_embeddings,
        normalization=arch.normalization,
        norm_epsilon=arch.norm_epsilon,
        apply_layernorm_1p=arch.norm_zero_centered,
        swiglu=arch.gated and arch.activation == "silu",
        add_bias_linear=arch.qkv_bias and arch.proj_bias and arch.mlp_bias,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=arch.init_std,
        window_size=None if arch.sliding_window is None else (arch.sliding_window - 1, 0),
        window_attn_skip_freq=_windowed(arch),
        position_embedding_type="rope" if arch.position == "rope" else "learned_absolute",
        add_position_embedding=True,
        use_rotary_position_embeddings=False,
        rotary_base=int(arch.rotary_base) if arch.rotary_base.is_integer() else arch.rotary_base,
        rotary_percent=arch.rotary_percent,
        rotary_interleaved=arch.rotary_interleaved,
        rotary_seq_len_interpolation_factor=scaling.factor if scaling and scaling.kind == "linear" else None,
        use_rope_scaling=scaling is not None and scaling.kind == "llama3",
        rope_scaling_factor=scaling.factor if scaling and scaling.kind == "llama3" else 8.0,
        untie_embeddings_and_output_weights=not arch.tie_embeddings,
        # Which vocabulary.
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=None,
        vocab_size=arch.vocab_size,
        padded_vocab_size=padded_vocab_size or arch.vocab_size,
        make_vocab_size_divisible_by=1,
    )


def flags_to_give(arch: Architecture) -> list[str]:
    """Flags that Megatron-LM 0.16.1 needs for this model and does not take from a checkpoint."""
    flags = ["--qk-layernorm"] if arch.qk_norm else []
    if arch.rope_scaling is not None and arch.rope_scaling.kind == "llama3":
        flags += ["--use-rope-scaling", f"--rope-scaling-factor {arch.rope_scaling.factor:g}"]
    if arch.rope_scaling is not None and arch.rope_scaling.kind == "linear":
        flags += [f"--rotary-seq-len-interpolation-factor {arch.rope_scaling.factor:g}"]
    if arch.sliding_window is not None:
        flags += [f"--window-size {arch.sliding_window - 1},0"]
    if (windowed := _windowed(arch)) is not None:
        flags += [f"--window-attn-skip-freq {windowed}".replace(", ", ",")]
    if arch.unrotated_layers:
        skipped = [int(layer in arch.unrotated_layers) for layer in range(arch.num_layers)]
        flags += [f"--no-rope-freq {skipped}".replace(", ", ",")]
    if arch.attention_sinks:
        flags += ["--softmax-type learnable"]
    return flags


def without_switch(arch: Architecture) -> list[str]:
    """What this model computes and Megatron-LM 0.16.1's own GPT cannot be told; Isthmus builds it.

    A checkpoint of it loads here and converts back, and is of no use there.
    """
    plain_biases = arch.proj_bias == arch.mlp_bias and (arch.qkv_bias or not arch.proj_bias)
    kind = None if arch.rope_scaling is None else arch.rope_scaling.kind
    found = {
        f"norms in the form {arch.form}": arch.form != "pre",
        "norms over all heads": arch.qk_norm and arch.qk_norm_over == "projection",
        "norms without biases": arch.normalization == "LayerNorm" and not arch.norm_bias,
        "biases in some linear layers": not plain_biases,
        "a gated GELU": arch.gated and arch.activation in ("gelu", "gelu_tanh"),
        "scores that are scaled otherwise": arch.attention_scale is not None,
        "scores that are capped": arch.attention_softcap is not None,
        "logits that are scaled or capped": arch.logits_softcap is not None or arch.logits_multiplier != 1,
        "embeddings that are scaled": arch.embedding_multiplier != 1,
        "residuals that are scaled": arch.residual_multiplier != 1,
        "rotary bases that differ by layer": arch.window_rotary_base is not None,
        f"rotary positions of kind {kind}": kind == "longrope" or (kind == "yarn" and arch.mla is None),
    }
    return [name for name, there in found.items() if there]


def _windowed(arch: Architecture) -> list[int] | None:
    """1 for each layer with a window and 0 for each without, where they differ."""
    if not arch.full_attention_layers:
        return None
    return [int(arch.window(layer) is not None) for layer in range(arch.num_layers)]
