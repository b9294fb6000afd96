"""The rules of a candidate family, in the format of ``families/discover/json_family.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus.families.discover.expert_matching import ExpertTensors
from isthmus.families.discover.matrix_matching import MatrixRoles
from isthmus.families.discover.tensor_matching import DecoderStructure

ALTERNATING = "alternating rows"
"""Gate and up projection are interleaved by rows in one tensor."""
QKV, FEED_FORWARD = ("q", "k", "v", "qkv"), ("gate", "up", "gate_up", "fc1", "fc2")
_LAYER = "decoder.layers.{layer}."
_SELF = _LAYER + "self_attention."
_MLP = _LAYER + "mlp."
Data = dict[str, Any]


def has_biases(structure: DecoderStructure, modules: Mapping[Any, str], roles: Sequence[str]) -> bool:
    """Whether any of these modules has a bias. If only some have one, the family fails later on an unused tensor."""
    return any(modules[role] in structure.biases for role in roles if role in modules)


def candidate_rules(structure: DecoderStructure, chosen: Mapping[str, Any]) -> list[Data]:
    """All rules, in the order of a model's tensors. ``chosen``: every choice of ``Candidates`` by name."""
    hf = f"{structure.layers}{{layer}}."
    rules = [_copy("embedding.word_embeddings.weight", structure.embedding, "V", "H", shard="vocab")]
    if structure.positions is not None:
        rules.append(_copy("embedding.position_embeddings.weight", structure.positions, "P", "H"))
    for place, module in chosen["norms"].modules.items():
        rules += _norm(structure, _LAYER + place, hf + module)
    rules += _attention(structure, chosen, hf)
    dense = {} if structure.experts is None else {"layers": "dense"}
    if chosen["feed-forward"].modules:
        rules += _feed_forward(structure, chosen, hf, dense)
    if structure.experts is not None:
        rules += _experts(structure.experts, chosen, hf)
    rules += _norm(structure, "decoder.final_layernorm", structure.final_norm)
    output = structure.embedding if structure.head is None else structure.head
    tied = {"when": "tie_embeddings", "alias": True} if structure.head is None else {}
    return [*rules, _copy("output_layer.weight", output, "V", "H", shard="vocab", **tied)]


def _norm(structure: DecoderStructure, canonical: str, module: str) -> list[Data]:
    rules = [_copy(f"{canonical}.weight", f"{module}.weight", "H", init="ones")]
    if structure.norm_bias:
        rules.append(_copy(f"{canonical}.bias", f"{module}.bias", "H", init="zeros"))
    return rules


def _attention(structure: DecoderStructure, chosen: Mapping[str, Any], hf: str) -> list[Data]:
    matrices: MatrixRoles = chosen["attention"]
    modules: Mapping[Any, str] = matrices.modules
    transposed = {"transposed": True} if matrices.transposed else {}
    rules: list[Data] = []
    for end, tail, fields in (("weight", ["H"], transposed), ("bias", [], {"init": "zeros"})):
        if end == "bias" and not has_biases(structure, modules, QKV):
            continue
        names = [f"{hf}{modules.get(role, modules.get('qkv'))}.{end}" for role in ("q", "k", "v")]
        parts = [[name, size, *tail] for name, size in zip(names, ("N*D", "G*D", "G*D"), strict=True)]
        strands: dict[str, Any] = {"strands": "G"}
        if chosen["queries, keys and values"] == "by group":
            parts, strands = [[names[0], "W", *tail]], {}
        canonical = f"{_SELF}linear_qkv.{end}"
        rules.append({"canonical": canonical, "parts": parts, "shard": "heads", **strands, **fields})
    rules.append(
        _copy(f"{_SELF}linear_proj.weight", f"{hf}{modules['o']}.weight", "H", "N*D", shard="cols", **transposed)
    )
    if modules["o"] in structure.biases:
        rules.append(_copy(f"{_SELF}linear_proj.bias", f"{hf}{modules['o']}.bias", "H", init="zeros"))
    if structure.qk_norm is not None:
        of = zip(("q", "k"), structure.qk_norm, structure.qk_norm_symbols, strict=True)
        for which, module, size in of:
            rules.append(_copy(f"{_SELF}{which}_layernorm.weight", f"{hf}{module}.weight", size, init="ones"))
    if structure.sinks is not None:
        canonical = f"{_SELF}core_attention.softmax_offset"
        rules.append(_copy(canonical, f"{hf}{structure.sinks}", "N", shard="rows"))
    return rules


def _feed_forward(structure: DecoderStructure, chosen: Mapping[str, Any], hf: str, where: Data) -> list[Data]:
    matrices: MatrixRoles = chosen["feed-forward"]
    rules = _two_matrices(_MLP, hf, matrices, ".weight", "F", chosen["gate and up"], **where)
    if has_biases(structure, matrices.modules, FEED_FORWARD):
        untransposed = replace(matrices, transposed=False)
        rules += _two_matrices(_MLP, hf, untransposed, ".bias", "F", chosen["gate and up"], **where)
    return rules


def _experts(experts: ExpertTensors, chosen: Mapping[str, Any], hf: str) -> list[Data]:
    where: Data = {"layers": "moe"}
    rules = [_copy(f"{_MLP}router.weight", hf + experts.router, "E", "H", **where)]
    if experts.router_bias is not None:
        rules.append(_copy(f"{_MLP}router.bias", hf + experts.router_bias, "E", init="zeros", **where))
    if experts.expert_bias is not None:
        name, stacked = experts.expert_bias
        fields = {"init": "zeros", "dtype": "float32", **where, **({"stacked": True} if stacked else {})}
        rules.append(_copy(f"{_MLP}router.expert_bias", hf + name, "E", **fields))
    each = f"{_MLP}experts.local_experts.{{expert}}."
    location = {"stacked": True, **where} if experts.stacked else where
    rules += _two_matrices(each, hf, chosen["experts"], "", "X", chosen["experts' gate and up"], **location)
    if chosen["shared experts"] is not None:
        shared = f"{_MLP}shared_experts."
        rules += _two_matrices(shared, hf, chosen["shared experts"], ".weight", "S", None, **where)
    if experts.shared_gate is not None:
        rules.append(_copy(f"{_MLP}shared_experts.gate_weight", hf + experts.shared_gate, "1", "H", **where))
    return rules


def _two_matrices(
    canonical: str, hf: str, matrices: MatrixRoles, end: str, width: str, order: str | None, **fields: Any
) -> list[Data]:
    """With ``end=".bias"``: the rules of the biases."""
    modules: Mapping[Any, str] = matrices.modules
    bias = end == ".bias"
    fields |= ({"transposed": True} if matrices.transposed else {}) | ({"init": "zeros"} if bias else {})
    names = [modules[role] for role in ("gate", "up", "fc1", "gate_up", "gate_up") if role in modules]
    kind, inner, outer = ("bias", [], []) if bias else ("weight", ["H"], [width])
    first: Data = {"canonical": f"{canonical}linear_fc1.{kind}", "shard": "rows" if "fc1" in modules else "gate_up"}
    first |= {"parts": [[f"{hf}{name}{end}", width, *inner] for name in names], **fields}
    first |= {"interleaved": True} if order == ALTERNATING else {}
    cut = {} if bias else {"shard": "cols"}
    return [first, _copy(f"{canonical}linear_fc2.{kind}", f"{hf}{modules['fc2']}{end}", "H", *outer, **cut, **fields)]


def _copy(canonical: str, hf: str, *symbols: str, **fields: Any) -> Data:
    return {"canonical": canonical, "parts": [[hf, *symbols]], **fields}
