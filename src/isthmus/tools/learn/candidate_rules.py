"""The rules of a candidate family, in the format of ``families/discover/json_family.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus.tools.learn.matrix_matching import ExpertTensors, MatrixRoles
from isthmus.tools.learn.tensor_matching import DecoderStructure

ALTERNATING = "alternating rows"
"""Gate and up projection are interleaved by rows in one tensor."""
QKV, FEED_FORWARD = ("q", "k", "v", "qkv"), ("gate", "up", "gate_up", "fc1", "fc2")
Data = dict[str, Any]


def has_biases(structure: DecoderStructure, modules: Mapping[Any, str], roles: Sequence[str]) -> bool:
    """Whether any of these modules has a bias. If only some have one, the family fails later on an unused tensor."""
    return any(modules[role] in structure.biases for role in roles if role in modules)


def candidate_rules(structure: DecoderStructure, chosen: Mapping[str, Any]) -> list[Data]:
    """All rules, in the order of a model's tensors. ``chosen``: every choice of ``Candidates`` by name."""
    rules: list[Data] = []
    for place, module in chosen["norms"].modules.items():
        rules += _norm(place, module, structure.norm_bias)
    rules += _attention(structure, chosen)
    matrices: MatrixRoles = chosen["feed-forward"]
    if matrices.modules:
        fields = {} if structure.experts is None else {"layers": "dense"}
        rules += _feed_forward("mlp.", matrices, ".weight", "F", chosen["gate and up"], **fields)
        if has_biases(structure, matrices.modules, FEED_FORWARD):
            untransposed = replace(matrices, transposed=False)
            rules += _feed_forward("mlp.", untransposed, ".bias", "F", chosen["gate and up"], **fields)
    if structure.experts is not None:
        rules += _experts(structure.experts, chosen)
    for rule in rules:
        rule["canonical"] = "decoder.layers.{layer}." + rule["canonical"]
        rule["parts"] = [[f"{structure.layers}{{layer}}.{name}", *symbols] for name, *symbols in rule["parts"]]
    tied = {"when": "tie_embeddings", "alias": True} if structure.head is None else {}
    return [
        *_copy("embedding.word_embeddings.weight", structure.embedding, "V", "H", shard="vocab"),
        *_copy("embedding.position_embeddings.weight", structure.positions, "P", "H"),
        *rules,
        *_norm("decoder.final_layernorm", structure.final_norm, structure.norm_bias),
        *_copy("output_layer.weight", structure.head or structure.embedding, "V", "H", shard="vocab", **tied),
    ]


def _norm(canonical: str, module: str, bias: bool) -> list[Data]:
    weight = _copy(f"{canonical}.weight", f"{module}.weight", "H", init="ones")
    return weight + (_copy(f"{canonical}.bias", f"{module}.bias", "H", init="zeros") if bias else [])


def _attention(structure: DecoderStructure, chosen: Mapping[str, Any]) -> list[Data]:
    matrices: MatrixRoles = chosen["attention"]
    modules: Mapping[Any, str] = matrices.modules
    transposed = {"transposed": True} if matrices.transposed else {}
    rules: list[Data] = []
    for end, tail, fields in (("weight", ["H"], transposed), ("bias", [], {"init": "zeros"})):
        if end == "bias" and not has_biases(structure, modules, QKV):
            continue
        names = [f"{modules.get(role, modules.get('qkv'))}.{end}" for role in ("q", "k", "v")]
        parts = [[name, size, *tail] for name, size in zip(names, ("N*D", "G*D", "G*Vh"), strict=True)]
        strands: dict[str, Any] = {"strands": "G"}
        if chosen["queries, keys and values"] == "by group":
            parts, strands = [[names[0], "W", *tail]], {}
        canonical = f"self_attention.linear_qkv.{end}"
        rules.append({"canonical": canonical, "parts": parts, "shard": "heads", **strands, **fields})
    output = modules["o"]
    rules += _copy("self_attention.linear_proj.weight", f"{output}.weight", "H", "N*D", shard="cols", **transposed)
    if output in structure.biases:
        rules += _copy("self_attention.linear_proj.bias", f"{output}.bias", "H", init="zeros")
    for which, (module, size) in zip("qk", structure.qk_norms, strict=False):
        rules += _copy(f"self_attention.{which}_layernorm.weight", f"{module}.weight", size, init="ones")
    return rules + _copy("self_attention.core_attention.softmax_offset", structure.sinks, "N", shard="rows")


def _experts(experts: ExpertTensors, chosen: Mapping[str, Any]) -> list[Data]:
    moe: Data = {"layers": "moe"}
    bias, stacked_bias = experts.expert_bias or (None, False)
    fields = {"init": "zeros", "dtype": "float32", **moe, **({"stacked": True} if stacked_bias else {})}
    rules = [
        *_copy("mlp.router.weight", experts.router, "E", "H", **moe),
        *_copy("mlp.router.bias", experts.router_bias, "E", init="zeros", **moe),
        *_copy("mlp.router.expert_bias", bias, "E", **fields),
    ]
    expert = "mlp.experts.local_experts.{expert}."
    location = {"stacked": True, **moe} if experts.stacked else moe
    rules += _feed_forward(expert, chosen["experts"], "", "X", chosen["experts' gate and up"], **location)
    if chosen["shared experts"] is not None:
        rules += _feed_forward("mlp.shared_experts.", chosen["shared experts"], ".weight", "S", None, **moe)
    return rules + _copy("mlp.shared_experts.gate_weight", experts.shared_gate, "1", "H", **moe)


def _feed_forward(
    canonical: str, matrices: MatrixRoles, end: str, width: str, order: str | None, **fields: Any
) -> list[Data]:
    """The rules of the weights, or of the biases with ``end=".bias"``."""
    modules: Mapping[Any, str] = matrices.modules
    bias = end == ".bias"
    fields |= ({"transposed": True} if matrices.transposed else {}) | ({"init": "zeros"} if bias else {})
    names = [modules[role] for role in ("gate", "up", "fc1", "gate_up", "gate_up") if role in modules]
    kind, inner, outer = ("bias", [], []) if bias else ("weight", ["H"], [width])
    first: Data = {"canonical": f"{canonical}linear_fc1.{kind}", "shard": "rows" if "fc1" in modules else "gate_up"}
    first |= {"parts": [[f"{name}{end}", width, *inner] for name in names], **fields}
    first |= {"interleaved": True} if order == ALTERNATING else {}
    cut = {} if bias else {"shard": "cols"}
    return [first, *_copy(f"{canonical}linear_fc2.{kind}", f"{modules['fc2']}{end}", "H", *outer, **cut, **fields)]


def _copy(canonical: str, hf: str | None, *symbols: str, **fields: Any) -> list[Data]:
    """No rule if the model has no tensor ``hf``."""
    return [] if hf is None else [{"canonical": canonical, "parts": [[hf, *symbols]], **fields}]
