"""Settings of configs that have no effect on the tensors, or that all families read."""

from __future__ import annotations

import re

METADATA = re.compile(
    r"architectures|model_type|torch_dtype|dtype|transformers_version|auto_map|_.*|use_cache|.*_token_id|id2label|"
    r"label2id|return_dict|output_(?:attentions|hidden_states|router_logits|scores)|problem_type|tokenizer_class|"
    r"chunk_size_feed_forward|task_specific_params|is_encoder_decoder|max_length|summary_.*"
)
"""Settings without effect on tensors and logits."""
_DROPOUT = re.compile(r".*drop.*")


def is_dropout(name: str) -> bool:
    """Whether a setting is a dropout rate."""
    return _DROPOUT.fullmatch(name) is not None


WINDOW = ("sliding_window", "layer_types")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
