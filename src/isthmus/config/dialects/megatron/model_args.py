"""Model arguments, as in a Megatron-LM checkpoint, and the tokenizer."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments
from isthmus.config.dialects.translation import Translation

ARGUMENTS = """
    num_layers hidden_size num_attention_heads layernorm_epsilon position_embedding_type rotary_base
    rotary_percent rotary_interleaved no_rope_freq use_rope_scaling rope_scaling_factor
    rotary_seq_len_interpolation_factor normalization layernorm_zero_centered_gamma add_qkv_bias add_bias_linear
    qk_layernorm window_size window_attn_skip_freq softmax_type multi_latent_attention q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor mscale mscale_all_dim swiglu
    quick_geglu activation_func_clamp_value glu_linear_offset bias_gelu_fusion squared_relu num_experts
    moe_layer_freq moe_router_topk moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_enable_expert_bias moe_apply_probs_on_input moe_latent_size
    moe_router_load_balancing_type mtp_num_layers untie_embeddings_and_output_weights init_method_std
    group_query_attention num_query_groups apply_residual_connection_post_layernorm attention_output_gate
    qk_l2_norm use_legacy_models spec experimental_attention_variant heterogeneous_layers_config_path
    heterogeneous_layers_config_encoded_json hybrid_override_pattern is_hybrid_model hybrid_attention_ratio
    hybrid_mlp_ratio original_max_position_embeddings beta_fast beta_slow
""".split()
"""Arguments that define the model; unsupported values are rejected when the model is read."""
GPT2_ROWS = 50257
_ROWS = (
    (r"gpt-?2", GPT2_ROWS),
    (r"llama-?3(\.[0-3])?\b", 128256),
    (r"llama-?2\b|mistral-7b.*v0\.1|mixtral-8x(7b|22b-v0\.1)", 32000),
    (r"yi-(6b|9b|34b)", 64000),
    (r"qwen2\.5-(0\.5|1\.5|3)b|qwen3-", 151936),
    (r"qwen2\.5-", 152064),
    (r"deepseek-v2", 102400),
    (r"deepseek-(v3|r1(?!-distill))", 129280),
)
"""Embedding rows of well-known models, by a pattern of the tokenizer's name."""
_TYPES = ("HuggingFaceTokenizer", "Llama2Tokenizer", "DeepSeekV2Tokenizer", "GPT2BPETokenizer", "NullTokenizer")
_BY_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
"""Types that depend on the tokenizer's file."""
_UNSUPPORTED = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
)


def model_arguments(args: Arguments, translation: Translation) -> dict[str, Any]:
    """Model arguments as in a checkpoint; without ``padded_vocab_size`` if no argument gives the vocabulary size."""
    if missing := [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not args.given(name)]:
        for name in missing:
            args.errors.append(f"--{name.replace('_', '-')}  is missing: every model needs it")
        args.raise_errors()
    found = {name: args.get(name) for name in ARGUMENTS}
    if args.get("use_rotary_position_embeddings"):
        found["position_embedding_type"] = "rope"
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    # Megatron-LM's default of gated models: 2/3 of 4 x hidden size, in multiples of 64.
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if found["swiglu"] else 4 * hidden
    found["ffn_hidden_size"] = args.get("ffn_hidden_size") or ffn
    found["moe_ffn_hidden_size"] = args.get("moe_ffn_hidden_size") or found["ffn_hidden_size"]
    found["kv_channels"] = args.get("kv_channels") or hidden // heads
    found["max_position_embeddings"] = args.get("max_position_embeddings") or args.get("seq_length") or 2048
    if args.given("padded_vocab_size"):
        found["padded_vocab_size"] = args.get("padded_vocab_size")
    elif args.given("vocab_size"):
        # NullTokenizer adds an end-of-document token.
        found["padded_vocab_size"] = args.get("vocab_size") + (args.get("tokenizer_type") == "NullTokenizer")
    for name in ("hidden_dropout", "attention_dropout"):
        if args.get(name):
            option = (
                args.source(name) if args.given(name) else f"--{name.replace('_', '-')} {args.get(name)} (the default)"
            )
            translation.remark(option, "unsupported", "Isthmus has no dropout.")
    if args.get("moe_router_force_load_balancing"):
        why = "Tokens go to the experts that the router chooses, so step times are those of real routing."
        translation.remark(args.source("moe_router_force_load_balancing"), "unsupported", why)
    return found


def rows_by_name(translation: Translation) -> int | None:
    """Embedding rows of the model that the tokenizer belongs to; None for an unknown name."""
    if translation.settings.get("tokenizer.type") == "GPT2BPETokenizer":
        return GPT2_ROWS
    name = str(translation.settings.get("tokenizer.path", "")).lower().replace("_", "-").replace("meta-", "")
    return next((rows for pattern, rows in _ROWS if re.search(pattern, name)), None)


def put_tokenizer(args: Arguments, translation: Translation) -> None:
    kind, path = args.get("tokenizer_type"), args.get("tokenizer_model")
    if kind in _UNSUPPORTED or (kind is not None and not str(kind).endswith("Tokenizer")):
        args.errors.append(f"{args.source('tokenizer_type')}  is not supported; use one of {', '.join(_TYPES)}")
        return
    if path is not None:
        translation.put("tokenizer.path", path, args.source("tokenizer_model"))
    elif args.given("vocab_file"):
        folder = posixpath.dirname(args.get("vocab_file")) or "."
        translation.put("tokenizer.path", folder, args.source("vocab_file", "merge_file"))
        if kind is None:
            kind = "GPT2BPETokenizer"  # the only type with these two files
        why = "Both files must be in one folder, as vocab.json and merges.txt."
        translation.remark(args.source("vocab_file", "merge_file"), "different", why)
    if kind in _TYPES:
        translation.put("tokenizer.type", kind, args.source("tokenizer_type"))
    elif kind is not None:
        # Primus has a dozen names for Hugging Face tokenizers.
        if kind not in _BY_FILE:
            translation.put("tokenizer.type", "HuggingFaceTokenizer", args.source("tokenizer_type"))
        why = "The files at tokenizer.path decide the type of the tokenizer."
        translation.remark(args.source("tokenizer_type"), "different", why)
    if kind == "NullTokenizer" and args.given("vocab_size"):
        translation.put("tokenizer.vocab_size", args.get("vocab_size"), args.source("vocab_size"))
    if args.get("trust_remote_code"):
        translation.put("model.trust_remote_code", True, args.source("trust_remote_code"))
