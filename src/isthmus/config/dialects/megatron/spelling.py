"""Names of Megatron-LM's arguments: types and defaults of the translated ones, and old or odd flags.

``name=value`` gives a default that is neither false nor null.
"""

from __future__ import annotations

KINDS: dict[str, str] = {
    "int": """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups=1 kv_channels
        max_position_embeddings moe_ffn_hidden_size moe_router_topk=2 moe_shared_expert_intermediate_size
        moe_router_num_groups moe_router_group_topk q_lora_rank kv_lora_rank=32 qk_head_dim=128
        qk_pos_emb_head_dim=64 v_head_dim=128 mtp_num_layers num_experts moe_latent_size vocab_size
        padded_vocab_size tensor_model_parallel_size=1 pipeline_model_parallel_size=1
        context_parallel_size=1 expert_model_parallel_size=1 expert_tensor_parallel_size
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        distributed_timeout_minutes=10 micro_batch_size global_batch_size train_iters train_samples
        recompute_num_layers seed=1234 loss_scale_window=1000 profile_step_start=10 profile_step_end=12
        eval_iters=100 eval_interval lr_decay_iters lr_decay_samples lr_warmup_iters=0 lr_warmup_samples=0
        lr_wsd_decay_iters lr_wsd_decay_samples seq_length save_interval log_interval=100 exit_interval
    """,
    "float": """
        layernorm_epsilon=1e-05 rotary_percent=1.0 rope_scaling_factor=8.0 rotary_base=10000
        activation_func_clamp_value glu_linear_offset=0.0 rotary_seq_len_interpolation_factor
        moe_router_topk_scaling_factor rotary_scaling_factor=1.0 mscale=1.0 mscale_all_dim=0.0
        init_method_std=0.02 hybrid_attention_ratio=0.0 hybrid_mlp_ratio=0.0 mtp_loss_scaling_factor=0.1
        initial_loss_scale=4294967296 loss_scale lr min_lr=0.0 lr_warmup_fraction lr_warmup_init=0.0
        weight_decay=0.01 start_weight_decay end_weight_decay adam_beta1=0.9 adam_beta2=0.999 adam_eps=1e-08
        clip_grad=1.0 moe_z_loss_coeff moe_expert_capacity_factor moe_router_bias_update_rate=0.001
        hidden_dropout=0.1 attention_dropout=0.1
    """,
    "bool": """
        group_query_attention use_rotary_position_embeddings add_position_embedding=true rotary_interleaved
        use_rope_scaling layernorm_zero_centered_gamma add_qkv_bias add_bias_linear=true qk_layernorm
        multi_latent_attention swiglu quick_geglu bias_gelu_fusion=true moe_shared_expert_gate
        moe_router_pre_softmax moe_router_enable_expert_bias untie_embeddings_and_output_weights
        squared_relu use_legacy_models apply_residual_connection_post_layernorm attention_output_gate
        qk_l2_norm is_hybrid_model moe_apply_probs_on_input sequence_parallel use_torch_fsdp2
        use_megatron_fsdp overlap_grad_reduce overlap_param_gather recompute_activations
        checkpoint_activations moe_layer_recompute fp16 bf16 profile mock_data finetune no_load_optim
        no_load_rng sft trust_remote_code moe_router_force_load_balancing optimizer_cpu_offload
    """,
    "str": """
        position_embedding_type=learned_absolute normalization=LayerNorm softmax_type=vanilla rope_type
        moe_router_score_function=softmax experimental_attention_variant
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json hybrid_override_pattern
        recompute_granularity recompute_method fp8 fp8_recipe=delayed lr_decay_style=linear
        lr_wsd_decay_style=exponential weight_decay_incr_style=constant optimizer=adam split tokenizer_type
        tokenizer_model vocab_file merge_file save load pretrained_checkpoint ckpt_format=torch_dist
        moe_token_dispatcher_type=allgather tensorboard_dir
    """,
    "list": """
        data_path train_data_path valid_data_path test_data_path recompute_modules
        moe_router_load_balancing_type=aux_loss moe_aux_loss_coeff=0.0 spec
    """,
    "layers": "window_size window_attn_skip_freq no_rope_freq moe_layer_freq=1",
}
"""Translated arguments by type; ``layers`` is a number or a pattern such as [0]+[1]*3."""

FLAGS: dict[str, tuple[str, bool | None]] = {
    "apply_layernorm_1p": ("layernorm_zero_centered_gamma", None),
    "ckpt_fully_parallel_save": ("ckpt_fully_parallel_save_deprecated", None),
    "disable_bias_linear": ("add_bias_linear", False),
    "disable_gloo_process_groups": ("enable_gloo_process_groups", False),
    "disable_mamba_mem_eff_path": ("use_mamba_mem_eff_path", False),
    "disable_msc": ("enable_msc", False),
    "dist_ckpt_format": ("dist_ckpt_format_deprecated", None),
    "enable_chunked_prefill": ("disable_chunked_prefill", False),
    "fp4_format": ("fp4", None),
    "fp4_param_gather": ("fp4_param", None),
    "fp8_format": ("fp8", None),
    "inference_max_requests": ("inference_max_batch_size", None),
    "microbatch_group_size_per_virtual_pipeline_stage": ("microbatch_group_size_per_vp_stage", None),
    "muon_no_split_qkv": ("muon_split_qkv", False),
    "bert_no_binary_head": ("bert_binary_head", False),
    "no_barrier_with_level_1_timing": ("barrier_with_L1_time", False),
    "no_initialization": ("perform_initialization", False),
    "no_one_logger": ("enable_one_logger", False),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False),
    "no_position_embedding": ("add_position_embedding", False),
    "no_rope_fusion": ("apply_rope_fusion", False),
    "norm_epsilon": ("layernorm_epsilon", None),
    "overlap_p2p_communication_warmup_flush": ("overlap_p2p_comm_warmup_flush", None),
    "persistent_save_interval": ("save_interval", None),
    "torch_fsdp2_no_reshard_after_forward": ("torch_fsdp2_reshard_after_forward", False),
    "use_dist_ckpt": ("use_dist_ckpt_deprecated", None),
    "use_mcore_models": ("deprecated_use_mcore_models", None),
    "use_nccl_ub": ("nccl_ub", None),
    # Of releases before 0.16.
    "activations_checkpoint_granularity": ("recompute_granularity", None),
    "activations_checkpoint_method": ("recompute_method", None),
    "activations_checkpoint_num_layers": ("recompute_num_layers", None),
    "batch_size": ("micro_batch_size", None),
    "checkpoint_num_layers": ("recompute_num_layers", None),
    "distribute_checkpointed_activations": ("distribute_saved_activations", None),
    "fp32_allreduce": ("accumulate_allreduce_grads_in_fp32", None),
    "min_scale": ("min_loss_scale", None),
    "model_parallel_size": ("tensor_model_parallel_size", None),
    "no_query_key_layer_scaling": ("apply_query_key_layer_scaling", False),
    "override_lr_scheduler": ("override_opt_param_scheduler", None),
    "use_checkpoint_lr_scheduler": ("use_checkpoint_opt_param_scheduler", None),
    "use_custom_fsdp": ("use_megatron_fsdp", None),
    "warmup": ("lr_warmup_fraction", None),
    # Of MegaBlocks; its other arguments are in EXTRA.
    "moe_jitter_eps": ("moe_input_jitter_eps", None),
    "moe_num_experts": ("num_experts", None),
    "moe_zloss_weight": ("moe_z_loss_coeff", None),
}
"""Flags whose argument has another name, and the value of a flag without one. ``no_`` and ``disable_`` before the name
of a switch turn it off and are not listed.
"""

GONE: dict[str, str] = {
    "Megatron-LM has removed it, and Isthmus does not need it.": """
        DDP_impl data_impl mmap_warmup use_contiguous_buffers_in_ddp use_contiguous_buffers_in_local_ddp
        no_contiguous_buffers_in_local_ddp use_contiguous_parameters_in_local_ddp no_scaled_masked_softmax_fusion
        scaled_upper_triang_masked_softmax_fusion delay_param_gather no_delay_grad_reduce log_batch_size_to_tensorboard
        log_learning_rate_to_tensorboard no_log_learnig_rate_to_tensorboard moe_token_dropping s3_cache_path
        standalone_embedding_stage keep_fp8_transpose_cache_when_using_custom_fsdp renormalize_blend_weights
        use_ring_exchange no_torch_compile disable_te_fused_rope moe_lbl_in_fp32 one_logger_entity
    """,
}
"""Arguments of older releases and of ROCm's fork, which core_v0.16.1 does not have."""
NEVER: dict[str, str] = {
    "gradient_accumulation_steps": "Megatron-LM has no such argument: it accumulates micro batches up to "
    "global-batch-size sequences. Raise --global-batch-size.",
    "fused_bias_gelu": "Megatron-LM has no such argument: it fuses by default, without --no-bias-gelu-fusion.",
    "fused_bias_mha": "Megatron-LM has no such argument; attention is fused if the platform supports it.",
    "overlap_comm": "Megatron-LM has no such argument: use --overlap-grad-reduce and --overlap-param-gather.",
    "virtual_pipeline_model_parallel_size": "Megatron-LM computes it and ignores this value. Use "
    "num_virtual_stages_per_pipeline_rank (--num-virtual-stages-per-pipeline-rank).",
    "log_level": "Megatron-LM has no such argument (it has --logging-level). Isthmus shows a traceback with --debug.",
}
"""Flags in some guides that Megatron-LM never had."""
EXTRA: dict[str, str] = {
    "int": "moe_top_k=1 original_max_position_embeddings",
    "float": "moe_capacity_factor=1 moe_loss_weight=0.1 beta_fast beta_slow",
    "bool": "moe_expert_model_parallelism",
    "list": "moe_normalize_expert_weights",
}
"""Translated arguments of MegaBlocks' Megatron-LM and of Primus, as in :data:`KINDS`."""
