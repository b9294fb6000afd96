"""DeepSeek-V2 and V2-Lite: multi-head latent attention, dense first layers, shared experts, softmax routing."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.family import Derived, Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors, mla
from isthmus.families.rules.decoder import number

_GROUPS = "group_limited_greedy"


def _groups(hf: Mapping[str, Any], key: str) -> int:
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", _GROUPS):
        raise UsageError(f"config.json: topk_method={method} is not supported; greedy or {_GROUPS} is.")
    return 1 if method == "greedy" else int(Key(key).read(hf))


FAMILY = Family(
    name="deepseek_v2",
    hf_architecture="DeepseekV2ForCausalLM",
    keys=with_defaults(mla.KEYS, max_position_embeddings=2048)
    | {
        "moe.num_experts": Key("n_routed_experts", default=64, aliases=("num_experts",)),
        "moe.top_k": Key("num_experts_per_tok"),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1407),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=2),
        "moe.scaling_factor": number("routed_scaling_factor", 1.0),
        "moe.dense_layers": expert_tensors.first_dense(default=0),
    },
    fixed=mla.FIXED
    | {
        "mlp_bias": Fixed((False,), "MLP biases are not supported"),
        "scoring_func": Fixed(("softmax",), "the only score function of this family"),
        "norm_topk_prob": Fixed((False,), "transformers ignores it for this family, other implementations do not"),
    },
    traits={"rotary_interleaved": True, "moe.group_score": "max"},
    derived=mla.DERIVED
    | {
        "moe.num_groups": Derived(
            read=lambda hf: _groups(hf, "n_group"),
            write=lambda n, arch: {"topk_method": "greedy"} if n == 1 else {"topk_method": _GROUPS, "n_group": n},
        ),
        "moe.group_top_k": Derived(read=lambda hf: _groups(hf, "topk_group"), write=lambda n, arch: {"topk_group": n}),
    },
    rules=(*decoder.EMBEDDING, *decoder.INPUT_NORM, *mla.ATTENTION, *expert_tensors.MLP, *decoder.HEAD),
)
