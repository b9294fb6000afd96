"""Phi-3.5-MoE: LayerNorm, biases, experts chosen one after another; long factors that transformers does not use."""

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.models import mixtral
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="phimoe",
    hf_architecture="PhimoeForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
    | decoder.ATTENTION_BIAS
    | {
        "output_bias": flag("lm_head_bias"),
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_local_experts", default=16),
        "moe.top_k": Key("num_experts_per_tok", default=2, choices={2: 2}),
        "moe.score_tolerance": Key(
            "router_jitter_noise",
            kind=float,
            default=0.01,
            decode=lambda noise, hf: 2 * noise,
            encode=lambda tolerance, arch: tolerance / 2,
        ),
    },
    fixed=decoder.FIXED
    | {"input_jitter_noise": Fixed((0.0,), "training runs without noise; set it to 0", training=True)},
    traits={"normalization": "LayerNorm", "moe.score": "sparsemixer"},
    sliding_window="always",
    rope_defaults={"rope_theta": 1000000.0, "short_mscale": None},
    short_factors_in_transformers=True,
    module_names={".block_sparse_moe.gate": ".mlp.router", ".block_sparse_moe.": ".mlp."},
    rules=decoder.pre_norm_rules(mlp=renamed((*expert_tensors.ROUTER, *expert_tensors.EXPERTS), mixtral.NAMES)),
)
