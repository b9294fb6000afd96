"""Numbers of parameters of each pipeline rank, in any layout of a model."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.engine.lora.adapter import AdapterSet
from isthmus.engine.parallel.pipeline_layout import layers_per_stage
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.matched_tensors import hidden_matrices
from isthmus.families.rules.mtp import is_mtp_copy
from isthmus.families.rules.rule import Rule
from isthmus.families.rules.shard import Layout, local_shape
from isthmus.recipes.plan.model_plan import ModelPlan

_LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")
_LINEAR_WEIGHT = re.compile(r"(linear_\w+|eh_proj|in_proj|out_proj)\.weight$")
_FP8_WEIGHT = re.compile(r"(?<!layer_input\.)(linear_(?!\w*down_)\w+|in_proj|out_proj)\.weight$")
_Adapters = tuple[tuple[int, int], ...]
"""Rank and output width of each adapter of a weight."""
_FIRST, _LAST, _LAST_EMBEDDING = -1, -2, -3
"""In place of the number of a layer: the embedding, what follows the layers, and the embedding for MTP layers."""
_EMBEDDING, _MTP_EMBEDDING = "embedding.word_embeddings.weight", "mtp.layers.0.embed_tokens.weight"
"""The latter is a copy, which the last stage shares with the first one; not all files have it."""


class FsdpUnits(NamedTuple):
    """Parameters that FSDP gathers together."""

    layer: int
    """Parameters of the largest layer."""
    output: int
    """Parameters of the output layer and the last norm, for the loss; 0 if the embedding has the same weights."""
    shared: int
    """Parameters that stay gathered for a micro batch, because the embedding and other modules use them."""


class ParameterCounter:
    """Counts the parameters of a rank by kind; the tensors of the model are enumerated only once.

    Kinds are ``linear`` (whose matmuls can be FP8), ``ordinary``, ``float32`` and ``expert``. With ``adapters`` it
    counts theirs instead of those of the weights.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement],
        arch: Architecture,
        left_out: Collection[str] = (),
        adapters: AdapterSet | None = None,
    ) -> None:
        self._arch, self._dora = arch, adapters is not None and adapters.dora
        self._rules: dict[int, Rule] = {}
        experts: defaultdict[tuple[int, str, tuple[int, _Adapters]], list[int]] = defaultdict(list)
        if arch.pattern.mtp_layers and _EMBEDDING in placements:  # an empty table counts nothing
            placements = {_MTP_EMBEDDING: placements[_EMBEDDING], **placements}
        for name, placement in placements.items():
            if name in left_out or not placement.rule.trained:
                continue
            # The last stage has one copy of a tied embedding, for the output layer and MTP layers.
            if is_mtp_copy(name) and (arch.head.tie_embeddings or name != _MTP_EMBEDDING):
                continue
            weight_adapters = () if adapters is None else adapters.by_weight.get(name, ())
            if adapters is not None and not weight_adapters:
                continue
            rule = placement.rule
            self._rules[id(rule)] = rule
            kind = _kind(name, rule) if adapters is None or rule.is_expert else "ordinary"
            shapes = tuple((adapter.rank, adapter.linear.out) for adapter in weight_adapters)
            experts[_place(name), kind, (id(rule), shapes)].append(placement.expert)
        self._groups = [(*key, sorted(numbers)) for key, numbers in experts.items()]
        self._by_layout: dict[tuple[int, int, int, bool], dict[int, Counter[str]]] = {}
        self._by_rank: dict[tuple[int, ...], list[Counter[str]]] = {}

    def of_ranks(self, parallel: ParallelConfig) -> list[Counter[str]]:
        """Numbers of parameters of each pipeline rank: of its first tensor parallel rank, which has most."""
        key = (parallel.tp, parallel.expert_tp, parallel.ep, parallel.pp, parallel.vpp)
        if key not in self._by_rank:
            self._by_rank[key] = self._sum(parallel)
        return self._by_rank[key]

    def _sum(self, parallel: ParallelConfig) -> list[Counter[str]]:
        counts = [Counter[str]() for _ in range(parallel.pp)]
        stages = enumerate(layers_per_stage(self._arch.num_layers, parallel.pp, parallel.vpp))
        rank_of = [stage % parallel.pp for stage, layers in stages for _ in range(layers)]
        for place, counted in self._by_layer(parallel).items():
            counts[rank_of[place] if place >= 0 else 0 if place == _FIRST else -1].update(counted)
        return counts

    def fsdp_units(self, parallel: ParallelConfig) -> FsdpUnits:
        """The units of the only stage."""
        by_layer = {place: counted.total() for place, counted in self._by_layer(parallel).items()}
        before, after = (by_layer.pop(place, 0) for place in (_FIRST, _LAST))
        layer, head = max(by_layer.values(), default=0), self._arch.head
        if head.tie_embeddings:
            return FsdpUnits(layer, 0, before + after)
        return FsdpUnits(layer, after, before if self._arch.embedding.layer_input_size else 0)

    def _by_layer(self, parallel: ParallelConfig) -> dict[int, Counter[str]]:
        key = (parallel.tp, parallel.expert_tp, parallel.ep, parallel.pp > 1)
        if key not in self._by_layout:
            numel: dict[tuple[int, _Adapters], int] = {}
            local_experts = 0 if self._arch.moe is None else self._arch.moe.num_experts // parallel.ep
            counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
            for place, kind, tensor, experts in self._groups:
                rule = self._rules[tensor[0]]
                if (rule.alias or place == _LAST_EMBEDDING) and parallel.pp == 1:  # on the same stage
                    continue
                if tensor not in numel:
                    numel[tensor] = self._numel(rule, tensor[1], parallel)
                number = bisect_left(experts, local_experts) if rule.is_expert else len(experts)
                counts[place][kind] += numel[tensor] * number
            self._by_layout[key] = counts
        return self._by_layout[key]

    def _numel(self, rule: Rule, adapters: _Adapters, parallel: ParallelConfig) -> int:
        padded = math.ceil(self._arch.vocab_size / parallel.tp) * parallel.tp
        layout = Layout(tp_size=parallel.tp, etp_size=parallel.expert_tp, padded_vocab_size=padded)
        shape = local_shape(rule, self._arch, layout)
        if not adapters:
            return math.prod(shape)
        (rows, columns), share = shape, rule.canonical_shape(self._arch)[0]
        rows_by_rank = [(rank, out * rows // share) for rank, out in adapters]
        return sum(rank * (columns + local_rows) + local_rows * self._dora for rank, local_rows in rows_by_rank)


class PlanCounts:
    """The counts that the memory estimate of a plan needs, for all layouts."""

    def __init__(self, plan: ModelPlan, config: RunConfig) -> None:
        placements, arch = plan.family.placements(plan.architecture), plan.architecture
        nothing = ParameterCounter({}, arch)
        self.all: ParameterCounter = ParameterCounter(placements, arch)
        self.trained: ParameterCounter = ParameterCounter(placements, arch, plan.frozen) if plan.frozen else self.all
        self.adapters: ParameterCounter = nothing
        self.by_muon: ParameterCounter = nothing
        self.quantized: ParameterCounter = nothing
        if plan.adapters is not None:
            self.adapters = ParameterCounter(placements, arch, adapters=plan.adapters)
        if config.optim.optimizer == "muon":
            others = placements.keys() - hidden_matrices(plan.family, arch).keys()
            self.by_muon = ParameterCounter(placements, arch, plan.frozen | others)
        if config.lora.quantize is not None:
            linears = {name for name in plan.frozen if _LINEAR_WEIGHT.search(name)}
            self.quantized = ParameterCounter(placements, arch, placements.keys() - linears)
        self.teacher: PlanCounts | None = None if plan.teacher is None else PlanCounts(plan.teacher, config)


def num_parameters(family: Family, arch: Architecture, frozen: Collection[str] = ()) -> int:
    """Number of parameters of the model without ``frozen`` tensors; a tied tensor counts once."""
    return ParameterCounter(family.placements(arch), arch, frozen).of_ranks(ParallelConfig())[0].total()


def _place(name: str) -> int:
    if (layer := _LAYER_NUMBER.match(name)) is not None:
        return int(layer[1])
    if name.startswith("embedding."):
        return _FIRST
    return _LAST_EMBEDDING if name == _MTP_EMBEDDING else _LAST


def _kind(name: str, rule: Rule) -> str:
    if rule.is_expert:
        return "expert"
    if rule.dtype == "float32":
        return "float32"
    return "linear" if _FP8_WEIGHT.search(name) else "ordinary"
