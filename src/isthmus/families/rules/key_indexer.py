"""Rules and config keys of the indexer of sparse attention (DeepSeek-V3.2)."""

from __future__ import annotations

from isthmus.families.config_keys import Key
from isthmus.families.rules.decoder import in_layer
from isthmus.families.rules.rule import Rule


def _tensor(canonical: str, hf: str, *symbols: str, init: str = "normal") -> Rule:
    canonical, hf = f"self_attention.core_attention.indexer.{canonical}", f"self_attn.indexer.{hf}"
    return in_layer(canonical, hf, *symbols, init=init, trained=False, layers="indexed")


INDEXER = (
    _tensor("linear_wq_b.weight", "wq_b.weight", "Ni*Di", "Rq"),
    _tensor("linear_wk.weight", "wk.weight", "Di", "H"),
    _tensor("k_norm.weight", "k_norm.weight", "Di", init="ones"),
    _tensor("k_norm.bias", "k_norm.bias", "Di", init="zeros"),
    _tensor("linear_weights_proj.weight", "weights_proj.weight", "Ni", "H"),
)


def keys(*, heads: int) -> dict[str, Key]:
    """``heads`` is the default number of heads."""
    return {
        "indexer.top_k": Key("index_topk", default=2048),
        "indexer.num_heads": Key("index_n_heads", default=heads),
        "indexer.head_dim": Key("index_head_dim", default=128),
    }
