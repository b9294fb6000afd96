"""Keys of Primus that Megatron-LM does not have, defaults of its modules and names of its models."""

from __future__ import annotations

from typing import Any

DIFFERENT: dict[str, str] = {
    "Isthmus chooses kernels by the capabilities of the platform.": """
        enable_primus_turbo use_turbo_* enable_turbo_* turbo_* moe_use_fused_router_with_aux_score use_sink_attention
        sink_* mxfp4_* use_deprecated_20241209_moe_layer disable_primus_topk_router use_rocmoe
        no_fp8_weight_transpose_cache enable_fused_linear_ce use_fla_* fused_ce_* disable_delayed_scaling_patches
    """,
    "Each line of the log is one step; metrics.jsonl has all steps.": """
        log_avg_skip_iterations log_avg_reset_interval stderr_sink_level stdout_sink_level file_sink_level sink_level
        use_rocm_mem_info use_rocm_mem_info_iters
    """,
    "logging.tensorboard turns TensorBoard files on and off.": "disable_tensorboard",
    "The loggers are metrics.jsonl and TensorBoard.": "disable_wandb disable_mlflow mlflow_*",
    "train.profile is the only setting of the profiler.": """
        disable_profiler_activity_cpu torch_profiler_* profile_memory_iter use_nsys_profiler record_shapes nvtx_ranges
        pytorch_profiler_collect_shapes
    """,
    "Isthmus has no extension to compile.": "disable_compile_dependencies",
    "Packing is data.packing; attention stays within each sample.": """
        enable_packed_sequences use_packed_attention sft_conversation_format sft_bridge_compat_inline_bos
    """,
    "It tells Primus where and how to run the module.": "trainable stage platform sink_settings",
}
UNSUPPORTED: dict[str, str] = {
    "The pipeline schedule is 1F1B, interleaved with parallel.vpp.": """
        patch_zero_bubble enable_zb_runtime pre_communication_optimization zero_bubble_* enable_zero_bubble
        enable_optimizer_post_validation enable_exactly_numeric_match enable_1f1b_v allow_padding_num_layers
        interleave_group_size num_seq_splits patch_primus_pipeline pp_algorithm pp_warmup dump_pp_data
        decoder_pipeline_manual_split_list
    """,
    "Only optimizer state can be offloaded to the host (optim.offload).": """
        cpu_offload offload_chunk_num offload_time auto_offload_time offload_overlap_sr stash_modules moe_paged_stash
        moe_expert_rank_capacity_factor
    """,
    "Isthmus does not support it.": """
        patch_moe_overlap recompute_layer_ids enable_odc* odc_* empty_cache_interval lb_mini_* sft_sanitize_nan_grads
        multiprocessing_context muon_weight_decay* lfm_layer_types conv_L_cache conv_bias use_uccl_ep
    """,
}
REFUSED: dict[str, str] = {
    "these arguments cannot describe soft caps: give the model as model.path": """
        final_logit_softcapping attn_logit_softcapping router_logit_softcapping
    """,
    "Isthmus does not support LoRA adapters: leave it out to train all weights": "lora",
}
"""Keys by reason, in the three tables; ``*`` matches the rest of a name."""
PLACES = ("work_group", "user_name", "exp_name", "workspace")
"""Keys of the run folder, which Primus requires."""
_PRE: dict[str, Any] = {
    "bf16": True,
    "micro_batch_size": 2,
    "global_batch_size": 128,
    "seq_length": 4096,
    "lr": 2.5e-4,
    "min_lr": 2.5e-5,
    "lr_decay_style": "cosine",
    "adam_beta2": 0.95,
    "split": "99,1,0",
    "eval_iters": 32,
    "eval_interval": 2000,
    "save_interval": 20000,
    "sequence_parallel": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "pre_trainer": _PRE,
    "sft_trainer": _PRE
    | {
        "train_iters": 1000,
        "micro_batch_size": 1,
        "seq_length": 2048,
        "lr": 1e-5,
        "min_lr": 0.0,
        "lr_warmup_iters": 50,
        "weight_decay": 0.1,
        "eval_iters": 10,
        "eval_interval": 50,
        "save_interval": 100,
        "log_interval": 1,
        "split": None,
        "finetune": True,
        "sft_dataset_name": "tatsu-lab/alpaca",
        "sft_dataset_split": "train",
    },
}
"""Defaults that differ from Megatron-LM's, for experiments without a checkout of Primus."""
PRESETS = {
    name.lower(): name.lower().replace("_", "-")
    for name in """
    llama2_7B llama2_13B llama2_70B llama3_8B llama3_70B llama3.1_8B llama3.1_70B llama3.2_1B llama3.2_3B llama3.3_70B
    mixtral_8x7B qwen2.5_7B qwen2.5_72B qwen3_0.6B qwen3_8B qwen3_30B_A3B deepseek_v2_lite deepseek_v3
    """.split()
}
"""Presets by the name of Primus' model file."""
INEXACT = {
    "llama3.": "Primus' file has no RoPE scaling, the model has",
    "llama3.2": "Primus' file has no RoPE scaling and untied embeddings, the model has tied ones",
    "qwen2.5": "Primus' file has no QKV bias, the model has",
    "qwen3": "Primus' file has no QK norm, the model has",
}
"""How Primus' model files differ from the models; the longest matching prefix is used."""
CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "vocab_size": "vocab_size",
    "padded_vocab_size": "vocab_size",
}
"""Arguments that can override a preset's model, and the keys in its ``config.json``."""
