"""Arguments of Megatron-LM that Isthmus does not support, by reason.

``name=value`` gives the default, which has no effect; without a value it is false, null or empty.
"""

from __future__ import annotations

UNSUPPORTED: dict[str, str] = {
    "Isthmus divides the layers evenly over the pipeline stages.": """
        mtp_standalone account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout
    """,
    "Only optimizer state can be offloaded to the host (optim.offload), all of it.": """
        cpu_offloading_num_layers=0 fine_grained_activation_offloading offload_modules
        min_offloaded_tensor_size=1048576 optimizer_offload_fraction=1.0 use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads=true pin_cpu_params=true rl_offload_optimizer_during_inference
        rl_offload_kv_cache_during_training rl_offload_inference_model_weights_when_idle
    """,
    "It is for an optimizer that Isthmus does not have. The optimizer is AdamW.": """
        sgd_momentum=0.9 muon_momentum=0.9 muon_split_qkv=true muon_use_nesterov muon_scale_mode=spectral
        muon_fp32_matmul_prec=medium muon_num_ns_steps=5 muon_tp_mode=blockwise muon_extra_scale_factor=1.0
    """,
    "Checkpoints are torch_dist, in one folder. isthmus convert writes other formats.": """
        save_wgrads_interval save_dgrads_interval non_persistent_save_interval non_persistent_ckpt_type
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo=fully_parallel
        ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format replication replication_jump
        replication_factor=2
    """,
    "A failed run ends with an exit code. The same command resumes it from the last checkpoint.": """
        adlr_autoresume adlr_autoresume_interval=1000 inprocess_restart inprocess_max_iterations
        inprocess_monitor_thread_interval=1.0 inprocess_monitor_process_interval=1.0
        inprocess_progress_watchdog_interval=1.0 inprocess_heartbeat_interval=30 inprocess_soft_timeout=60
        inprocess_hard_timeout=90 inprocess_heartbeat_timeout=60 inprocess_barrier_timeout=120
        inprocess_completion_timeout=120 inprocess_last_call_wait=1 inprocess_termination_grace_time=1
        inprocess_granularity=node inprocess_active_world_size=1 inprocess_empty_cuda_cache enable_ft_package
        calc_ft_timeouts ft_num_warmup_iters=5 error_injection_rate=0 error_injection_type=transient_error
        rerun_mode=validate_results
    """,
    "The loggers are metrics.jsonl and TensorBoard.": """
        wandb_project wandb_exp_name wandb_save_dir wandb_entity log_energy log_straggler straggler_ctrlr_port=65535
        straggler_minmax_count=1 disable_straggler_on_startup run_workload_inspector_server enable_one_logger=true
        one_logger_project=megatron-lm one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version=0.0.0
    """,
    "Isthmus does not support it.": """
        fp4_recipe=nvfp4 fp4_param fp4_quantizer_factory fp8_quantizer_factory first_last_layers_bf16
        num_layers_at_start_in_bf16=1 num_layers_at_end_in_bf16=1 te_precision_config_file
        distribute_saved_activations kitchen_config_file kitchen_recipe_number max_padding_length extra_vocab_size
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_value_head_dim=128 linear_num_key_heads=16
        linear_num_value_heads=32 mrope_section mamba_state_dim=128 mamba_head_dim=64 mamba_num_groups=8
        mamba_num_heads use_mamba_mem_eff_path=true relative_attention_num_buckets=32
        relative_attention_max_distance=128 cache_mla_latents linear_attention_freq fim_rate=0.5 fim_spm_rate=0.5
        fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token=<fim_prefix> fim_middle_token=<fim_middle>
        fim_suffix_token=<fim_suffix> fim_pad_token=<fim_pad> fim_eod_token=<|endoftext|>
        encoder_tensor_model_parallel_size=0 encoder_pipeline_model_parallel_size=0 pipeline_model_parallel_split_rank
        retriever_seq_length=256 retro_project_dir retro_add_retriever retro_cyclic_train_iters retro_encoder_layers=2
        retro_encoder_hidden_dropout=0.1 retro_encoder_attention_dropout=0.1 retro_num_neighbors=2
        retro_num_retrieved_chunks=2 retro_attention_gate=1 retro_workdir retro_return_doc_ids
        retro_no_verify_neighbor_count retro_verify_neighbor_count=true img_dim report_topk_accuracies faiss_use_gpu
        rl_prompts_per_eval=32 grpo_prompts_per_step=32 grpo_group_size=2 grpo_iterations=2 grpo_clamp_eps_lower=0.01
        grpo_clamp_eps_upper=0.01 grpo_kl_beta=0.001 grpo_entropy_term_weight=0.0 grpo_filter_groups_with_same_reward
        langrl_inference_server_type=inplace_megatron langrl_inference_server_conversation_template
        langrl_external_server langrl_env_config rl_default_temperature=1.0 rl_default_top_p=0 rl_default_top_k=-1
        rl_remove_kv_cache_during_training rl_reset_cuda_graphs rl_partial_rollouts
        rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef rl_use_sequence_packing
        rl_sequence_packing_max_sequences_per_bin=50 rl_sequence_packing_algo=fifo rl_training_cuda_graphs
        rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        rl_inference_model_unified_memory_level=0 refit_method=gloo rl_verify_model_weights_swap
        rl_parallel_generation_tasks=512 rl_skip_bos_token flash_decode inference_fuse_tp_communication
        mlp_chunks_for_prefill=1 inference_batch_times_seqlen_threshold=-1 max_tokens_to_oom=12000
        use_legacy_static_engine inference_max_batch_size inference_max_seq_length=2560 inference_dynamic_batching
        inference_dynamic_batching_buffer_size_gb=40.0 inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_block_size=256 inference_dynamic_batching_max_requests
        inference_dynamic_batching_max_tokens inference_dynamic_batching_num_cuda_graphs=16
        inference_dynamic_batching_track_paused_request_events decode_only_cuda_graphs
        inference_dynamic_batching_unified_memory_level=0 disable_chunked_prefill
        inference_dynamic_batching_cuda_graph_max_tokens=16384
        inference_dynamic_batching_cuda_graph_mixed_prefill_count=16 inference_logging_step_interval=0
        inference_wandb_logging inference_coordinator_port=12346 max_seqlen_per_dp_cp_rank hybrid_context_parallel
        moe_extended_tp deterministic_mode fp32_residual_connection qk_clip qk_clip_alpha=0.5 qk_clip_threshold=100
        embedding_init_method_std moe_enable_routing_replay moe_input_jitter_eps moe_pad_expert_input_to_capacity
        moe_token_drop_policy=probs batch_invariant_mode apply_wd_to_qk_layernorm no_weight_decay_cond_type
        check_weight_hash_across_dp_replicas_interval train_sync_interval exit_duration_in_mins iterations_to_skip
        result_rejected_tracker_filename dump_param_to_param_group_map init_method_xavier_uniform decoupled_lr
        decoupled_min_lr fake_process_group skip_train phase_transition_iterations sample_rate=1.0 vocab_extra_ids=0
        tiktoken_pattern tiktoken_num_special_tokens=1000 tiktoken_special_tokens moe_upcycling_granularity=1
        moe_pad_experts_for_cuda_graph_inference enable_experimental mask_prob=0.15 short_seq_prob=0.1 ict_head_size
        biencoder_projection_dim=0 biencoder_shared_query_context_model ict_load bert_load titles_data_path
        query_in_block_prob=0.1 use_one_sent_docs evidence_data_path retriever_report_topk_accuracies
        retriever_score_scaling block_data_path embedding_path indexer_batch_size=128 indexer_log_interval=1000
        num_classes=1000 img_h=224 img_w=224 num_channels=3 patch_dim=16 classes_fraction=1.0
        data_per_class_fraction=1.0 head_lr_mult=1.0 vision_pretraining_type=classify vision_backbone_type=vit
        swin_backbone_type=tiny mask_type=random mask_factor=1.0 iter_per_epoch=1250 dino_local_img_size=96
        dino_local_crops_number=10 dino_head_hidden_size=2048 dino_bottleneck_size=256 dino_freeze_last_layer=1
        dino_norm_last_layer dino_warmup_teacher_temp=0.04 dino_teacher_temp=0.07 dino_warmup_teacher_temp_epochs=30
        output_bert_embeddings bert_embedder_type=megatron
    """,
}
"""Ignored, with a remark."""

REFUSED: dict[str, str] = {
    "the global batch size of a run is constant: give --global-batch-size alone": """
        rampup_batch_size decrease_batch_size_if_needed
    """,
    "Isthmus does not support it, and the run would be another one: leave it out": """
        fp4 fim_data perform_rl_step vision_pretraining moe_use_upcycling
    """,
    "give its content as arguments": "data_args_path per_split_data_args_path yaml_cfg",
}
"""Errors: without these arguments the run would differ."""
