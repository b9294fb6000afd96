"""GPT-NeoX and Pythia: attention and MLP side by side, heads rotated in part, one tensor for attention's inputs."""

from isthmus.families.family import Derived, Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import copy

_LAYER, _HF = "decoder.layers.{layer}.", "gpt_neox.layers.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF + "attention."

FAMILY = Family(
    name="gpt_neox",
    hf_architecture="GPTNeoXForCausalLM",
    keys={name: key for name, key in decoder.KEYS.items() if name != "kv_channels"}
    | {
        "num_query_groups": Key("num_attention_heads"),
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": Key("layer_norm_eps", kind=float, default=1e-5),
        "activation": decoder.activation("hidden_act", default="gelu"),
        "qkv_bias": flag("attention_bias", default=True),
        "proj_bias": flag("attention_bias", default=True),
        "form": Key("use_parallel_residual", default=True, choices={True: "parallel_two_norms", False: "pre"}),
    },
    derived={
        "kv_channels": Derived(lambda hf: hf["hidden_size"] // hf["num_attention_heads"], lambda _width, _arch: {})
    },
    traits={"normalization": "LayerNorm", "gated": False, "mlp_bias": True},
    fixed=decoder.PLAIN_FIXED | {"hidden_dropout": decoder.NO_DROPOUT},
    rope_defaults={"partial_rotary_factor": 0.25},
    rope_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    rules=(
        copy("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight", "V", "H", shard="vocab"),
        *decoder.norm(_LAYER + "input_layernorm", _HF + "input_layernorm"),
        # Each head has its query, key and value together, as Megatron-Core has them.
        copy(_ATTENTION + "linear_qkv.weight", _HF_ATTENTION + "query_key_value.weight", "W", "H", shard="heads"),
        copy(
            _ATTENTION + "linear_qkv.bias",
            _HF_ATTENTION + "query_key_value.bias",
            "W",
            shard="heads",
            init="zeros",
            when="qkv_bias",
        ),
        copy(_ATTENTION + "linear_proj.weight", _HF_ATTENTION + "dense.weight", "H", "N*D", shard="cols"),
        copy(_ATTENTION + "linear_proj.bias", _HF_ATTENTION + "dense.bias", "H", init="zeros", when="proj_bias"),
        *decoder.norm(_LAYER + "pre_mlp_layernorm", _HF + "post_attention_layernorm"),
        copy(_LAYER + "mlp.linear_fc1.weight", _HF + "mlp.dense_h_to_4h.weight", "F", "H", shard="rows"),
        copy(_LAYER + "mlp.linear_fc1.bias", _HF + "mlp.dense_h_to_4h.bias", "F", shard="rows", init="zeros"),
        copy(_LAYER + "mlp.linear_fc2.weight", _HF + "mlp.dense_4h_to_h.weight", "H", "F", shard="cols"),
        copy(_LAYER + "mlp.linear_fc2.bias", _HF + "mlp.dense_4h_to_h.bias", "H", init="zeros"),
        *decoder.norm("decoder.final_layernorm", "gpt_neox.final_layer_norm"),
        copy("output_layer.weight", "embed_out.weight", "V", "H", shard="vocab", unless="tie_embeddings"),
        decoder.tied_output("gpt_neox.embed_in.weight"),
    ),
    ignorable=(*decoder.IGNORABLE, "attention.bias", "attention.masked_bias"),
)
