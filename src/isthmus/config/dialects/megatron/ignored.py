"""Arguments of Megatron-LM that need no setting, by reason: Isthmus does the same in another way.

``name=value`` gives the default, which has no effect; without a value it is false, null or empty.
"""

from __future__ import annotations

DIFFERENT: dict[str, str] = {
    "Isthmus chooses kernels and fusions by the capabilities of the platform.": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl=native attention_backend=auto
        disable_bf16_reduced_precision_matmul use_fused_weighted_squared_relu use_kitchen_attention
        kitchen_attention_backend=sdpa moe_grouped_gemm moe_use_legacy_grouped_gemm moe_enable_deepep
        moe_flex_dispatcher_backend=deepep moe_permute_fusion moe_router_fusion moe_deepep_num_sms=20
        moe_hybridep_num_sms=16 enable_cuda_graph cuda_graph_warmup_steps=3 external_cuda_graph cuda_graph_impl=none
        clone_scatter_output_in_embedding=true use_te_activation_func transformer_impl=transformer_engine
        masked_softmax_fusion=true bias_swiglu_fusion=true bias_dropout_fusion=true apply_rope_fusion=true
        use_flash_attn no_persist_layer_norm gradient_accumulation_fusion=true deprecated_use_mcore_models
        disable_jit_fuser te_rng_tracker gradient_reduce_div_fusion=true cuda_graph_scope
    """,
    "Isthmus has its own communication schedule and sets up the network for its platform.": """
        pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes
        async_tensor_model_parallel_allreduce=true tp_comm_overlap tp_comm_bulk_wgrad=true tp_comm_bulk_dgrad=true
        tp_comm_overlap_ag=true tp_comm_overlap_rs=true tp_comm_overlap_rs_dgrad tp_comm_split_ag=true
        tp_comm_split_rs=true tp_comm_bootstrap_backend=nccl overlap_moe_expert_parallel_comm delay_wgrad_compute
        ep_overlap_early_attn_memory_release use_ring_exchange_p2p defer_embedding_wgrad_compute
        wgrad_deferral_limit=0 overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage
        moe_shared_expert_overlap symmetric_ar_type enable_gloo_process_groups=true tp_comm_overlap_cfg
        high_priority_stream_groups overlap_p2p_comm=true distributed_backend=nccl
        distributed_timeout_seconds_after_init align_grad_reduce=true ddp_num_buckets ddp_bucket_size
        ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation ddp_average_in_collective
        overlap_param_gather_with_optimizer_step align_param_gather=true scatter_gather_tensors_in_pipeline=true
        local_rank=0 lazy_mpu_init nccl_ub disable_symmetric_registration fsdp_manual_registration use_sharp
        sharp_enabled_group create_all_gather_group suggested_communication_unit_size cp_comm_type=p2p
        nccl_communicator_config_path use_tp_pp_dp_mapping barrier_with_L1_time=true nccl_all_reduce_for_prefill
    """,
    "Python and PyTorch manage the memory.": """
        manual_gc manual_gc_interval=0 manual_gc_eval=true empty_unused_memory_level=0
    """,
    "Optimizer state is always sharded over the data parallel ranks.": "use_distributed_optimizer",
    "parallel.fsdp shards weights, gradients and optimizer state over all data parallel ranks.": """
        init_model_with_meta_device data_parallel_sharding_strategy=no_shard outer_dp_sharding_strategy=no_shard
        fsdp_double_buffer enable_full_sharding_in_hsdp num_distributed_optimizer_instances=1
        torch_fsdp2_reshard_after_forward=true
    """,
    "Gradients, main weights and the softmax of attention are always float32.": """
        apply_query_key_layer_scaling moe_router_dtype grad_reduce_in_bf16 attention_softmax_in_fp32
        accumulate_allreduce_grads_in_fp32 fp16_lm_cross_entropy use_precision_aware_optimizer main_grads_dtype=fp32
        main_params_dtype=fp32 exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32
    """,
    "FP8 uses current scaling (train.fp8_scaling), without a history of amax values.": """
        fp8_margin=0 fp8_interval=1 fp8_amax_history_len=1 fp8_amax_compute_algo=most_recent fp8_wgrad=true
        moe_router_padding_for_quantization moe_router_padding_for_fp8 reuse_grad_buf_for_mxfp8_param_ag
        keep_fp8_transpose_cache fp8_param_gather
    """,
    "The loss scale is halved at each overflow, down to 1.": "min_loss_scale=1.0 hysteresis=2",
    "The loss is always the mean over the loss tokens of the global batch.": "calculate_per_token_loss",
    "Samples are packed, each with its own positions and attention, and read from memory-mapped files.": """
        dataloader_type per_dataset_sequences_path dataloader_fast_cache_load dataloader_defer_npy_index_mmap
        data_cache_path mmap_bin_files=true num_workers=2 reset_position_ids reset_attention_mask
        create_attention_mask_in_dataloader=true num_dataset_builder_threads=1 object_storage_cache_path
        mid_level_dataset_surplus=0.005 allow_ambiguous_pad_tokens data_sharding=true enable_msc=true
    """,
    "The end-of-document token is a loss token like every other.": "eod_mask_loss",
    "The embedding has one row per token of the vocabulary; padding for tensor parallelism is not saved.": """
        make_vocab_size_divisible_by=128
    """,
    "The files at tokenizer.path decide the tokenizer.": """
        tokenizer_metadata tokenizer_special_tokens legacy_tokenizer tokenizer_sentencepiece_legacy
        tokenizer_hf_use_fast tokenizer_hf_include_special_tokens sft_tokenizer_prompt_format=nemotron-h-aligned
    """,
    "Checkpoints are torch_dist, can be read with every parallel layout, and are written synchronously.": """
        save_retain_interval use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args=true
        exit_on_missing_checkpoint auto_detect_ckpt_format ckpt_fully_parallel_save=true async_save
        use_persistent_ckpt_worker ckpt_fully_parallel_load ckpt_assume_constant_structure
        strict_fsdp_dtensor_load=true dist_ckpt_strictness=assume_ok_unexpected dist_ckpt_save_pre_mcore_014
        dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient no_save_optim no_save_rng
        use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated
    """,
    "Metrics go to metrics.jsonl and, if tensorboard is installed, to TensorBoard files in the run folder.": """
        moe_per_layer_logging config_logger_dir log_params_norm log_throughput log_progress timing_log_level=0
        timing_log_option=minmax tensorboard_log_interval=1 tensorboard_queue_size=1000 log_timers_to_tensorboard
        log_loss_scale_to_tensorboard=true log_validation_ppl_to_tensorboard log_memory_to_tensorboard
        log_memory_interval log_device_memory_used log_num_zeros_in_grad log_max_attention_logit
        log_world_size_to_tensorboard logging_level
    """,
    "The profiler writes a trace and a table of time and memory for each rank.": """
        use_pytorch_profiler profile_ranks=0 record_memory_history memory_snapshot_path=snapshot.pickle
    """,
    "SIGTERM and Ctrl-C always save a checkpoint and exit with code 75.": """
        exit_signal_handler exit_signal=SIGTERM exit_signal_handler_for_dataloader
    """,
    "A loss or gradient that is not finite always ends the run with exit code 79.": """
        check_for_nan_in_loss_and_grad=true check_for_large_grads check_for_spiky_loss
    """,
    "Random weights are initialized on the device from train.seed.": """
        perform_initialization=true use_cpu_initialization inference_rng_tracker data_parallel_random_init
    """,
    "Evaluation uses the whole validation set.": "test_mode full_validation multiple_validation_sets",
    "It is for encoder models. A decoder has one number of layers and one sequence length.": """
        encoder_num_layers decoder_num_layers bert_binary_head=true encoder_seq_length decoder_seq_length
    """,
    "The model family decides the exact activation function.": "openai_gelu onnx_safe",
    "A checkpoint contains its model config; give the other arguments as well.": """
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler load_main_params_from_ckpt ckpt_step
        use_checkpoint_args
    """,
}
