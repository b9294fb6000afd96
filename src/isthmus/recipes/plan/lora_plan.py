"""The adapters of a run, and the tensors that it trains whole."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from isthmus.config.schema import LoraConfig, RunConfig
from isthmus.convert.merged_weights import linears_with_adapter
from isthmus.engine.linear.quantized_weight import bitsandbytes
from isthmus.engine.lora.adapter import Adapter, AdapterSet, Role
from isthmus.errors import UsageError
from isthmus.families.adapted_linears import adapted_linears, module_path
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.matched_tensors import trained_tensors
from isthmus.hf.peft_folder import PeftFolder
from isthmus.recipes.model.model_source import local_folder
from isthmus.recipes.model.pissa import PISSA
from isthmus.recipes.registry import recipe_of


def plan_adapters(
    config: RunConfig, family: Family, arch: Architecture, existing: PeftFolder | None
) -> AdapterSet | None:
    """The adapters of section ``lora``, or None; ``existing`` is the adapter at ``lora.path``.

    Raises:
        UsageError: a setting does not fit the model or the layout.
        DataError: the adapter at ``lora.path`` belongs to another model.
    """
    lora = config.lora
    if not lora.enabled:
        return None
    if config.parallel.fsdp:
        raise UsageError(
            "lora with parallel.fsdp is not supported: fsdp would gather the frozen weights for every micro "
            "batch. Use parallel.tp or parallel.pp, which shard them."
        )
    if lora.quantize is not None:
        bitsandbytes()
    if config.train.freeze:
        raise UsageError("train.freeze with lora: all tensors but lora.modules_to_save are frozen. Leave it out.")
    if existing is None:
        adapters = _new_adapters(lora, family, arch)
    else:
        adapters = _adapters_of(existing, lora, family, arch)
    gates = [
        adapters_of_weight[0].linear.module
        for name, adapters_of_weight in adapters.by_weight.items()
        if name.endswith(".gate_weight")
    ]
    if gates:
        raise UsageError(
            f"lora.targets: {gates[0]} cannot have an adapter in training. Use all-linear, or name the targets without "
            "it; lora.modules_to_save=shared_expert_gate trains it whole."
        )
    _check_experts(adapters, arch)
    _check_parameters(adapters)
    if lora.dropout and adapters.dora:
        raise UsageError(
            f"lora.dropout={adapters.dropout:g} with an adapter of DoRA would multiply all base weights a second time, "
            "with the dropped inputs. Leave lora.dropout out."
        )
    return adapters


def _new_adapters(lora: LoraConfig, family: Family, arch: Architecture) -> AdapterSet:
    assert lora.rank is not None
    rank, scale = lora.rank, lora.scale(lora.rank)
    by_weight = {
        name: tuple(Adapter(linear, rank, scale) for linear in linears)
        for name, linears in adapted_linears(family, arch, lora.targets).items()
    }
    adapters = AdapterSet(by_weight=by_weight, dropout=lora.dropout, dora=lora.dora, lr_ratio=lora.lr_ratio)
    if lora.init.startswith(PISSA):
        _check_pissa(lora, adapters)
    return adapters


def _check_experts(adapters: AdapterSet, arch: Architecture) -> None:
    """The routed experts of a layer are computed together: all have adapters of the same rank, or none."""
    by_layer: dict[str, list[tuple[Adapter, ...]]] = {}
    for name, weight_adapters in adapters.by_weight.items():
        layer, is_expert, weight = re.sub(r"local_experts\.\d+", "local_experts", name).partition("local_experts")
        if is_expert:
            by_layer.setdefault(layer + weight, []).append(weight_adapters)
    for experts in by_layer.values():
        module = experts[0][0].linear.module
        for setting, used in {"lora.dora": adapters.dora, "lora.dropout": adapters.dropout}.items():
            if used:
                raise UsageError(
                    f"{setting} with adapters of routed experts ({module}) is not supported, in PEFT neither. Leave it "
                    "out, or name lora.targets without experts, such as q_proj,k_proj,v_proj,o_proj."
                )
        ranks = {sum(adapter.rank for adapter in weight_adapters) for weight_adapters in experts}
        if arch.moe is not None and (len(experts) != arch.moe.num_experts or len(ranks) > 1):
            raise UsageError(
                f"{module}: {len(experts)} of {arch.moe.num_experts} routed experts of the layer have adapters"
                f"{'' if len(ranks) == 1 else ', of different ranks'}. Give adapters of one rank to all of them."
            )


def _check_pissa(lora: LoraConfig, adapters: AdapterSet) -> None:
    """Raise UsageError if the adapters cannot start as parts of the weights."""
    if lora.quantize is not None:
        raise UsageError(
            f"lora.init={lora.init} with lora.quantize={lora.quantize}: what is left of the weights would be rounded, "
            "and the adapter exported for other weights. Leave one of them out."
        )
    if lora.dora:
        raise UsageError(
            "lora.init=pissa with lora.dora=true: the adapter could not be exported. Leave one of them out."
        )
    for adapter in (adapter for weight_adapters in adapters.by_weight.values() for adapter in weight_adapters):
        linear, widest = adapter.linear, min(adapter.linear.out, adapter.linear.inputs)
        if linear.expert is not None:
            raise UsageError(
                f"lora.init={lora.init} is not for routed experts ({linear.module}). Name other lora.targets."
            )
        if adapter.rank > widest:
            raise UsageError(
                f"lora.init={lora.init}: {linear.module} has {widest} singular values, fewer than lora.rank="
                f"{adapter.rank}. Name lora.targets without it, or lower the rank."
            )


def _check_parameters(adapters: AdapterSet) -> None:
    """Refuse adapters that PEFT could not load."""
    linears = [adapter.linear for weight_adapters in adapters.by_weight.values() for adapter in weight_adapters]
    parameter = next((linear.module for linear in linears if linear.parameter), None)
    for setting, used in {
        "lora.dora=true": adapters.dora,
        f"lora.dropout={adapters.dropout:g}": adapters.dropout,
    }.items():
        if used and parameter is not None:
            raise UsageError(
                f"{setting} is not possible in PEFT for {parameter}, whose weight it adapts as a parameter. Leave it "
                "out, or name lora.targets without this layer."
            )


def existing_adapter(config: RunConfig) -> PeftFolder | None:
    """The adapter at ``lora.path``, a folder or an id on the Hub."""
    return None if config.lora.path is None else PeftFolder(local_folder(config.lora.path, weights=True))


def _adapters_of(existing: PeftFolder, lora: LoraConfig, family: Family, arch: Architecture) -> AdapterSet:
    tensors = existing.modules
    by_weight = {
        name: tuple(Adapter(linear, tensors[linear.module].rank, tensors[linear.module].scale) for linear in linears)
        for name, linears in linears_with_adapter(existing, family, arch, "the model").items()
    }
    return AdapterSet(by_weight=by_weight, dropout=lora.dropout, dora=existing.config.use_dora, lr_ratio=lora.lr_ratio)


class ExistingAdapters:
    """The values of the adapter at ``lora.path``."""

    def __init__(self, folder: PeftFolder) -> None:
        self._folder = folder

    def __call__(self, adapter: Adapter, role: Role) -> Tensor | None:
        factors = self._folder.factors(adapter.linear, adapter.linear.expert)
        return {"lora_A": factors.a, "lora_B": factors.b, "lora_magnitude_vector": factors.magnitude}[role]


def modules_to_save(config: RunConfig, existing: PeftFolder | None) -> tuple[str, ...]:
    """The modules that are trained whole; with the score head of a reward model, as in PEFT."""
    modules = config.lora.modules_to_save if existing is None else existing.config.modules_to_save
    if not recipe_of(config).trains_scores:
        return modules
    # PEFT writes both names of score heads.
    return tuple(dict.fromkeys([*(name for name in modules if name != "classifier"), "score"]))


def saved_tensors(family: Family, arch: Architecture, modules: Iterable[str], adapters: AdapterSet) -> frozenset[str]:
    """Canonical names of the tensors of ``lora.modules_to_save``: as in PEFT, of modules whose path ends so.

    Raises:
        UsageError: a module does not exist or has an adapter, or its tensors are one with those of other modules.
    """
    tensors = trained_tensors(family, arch)
    names: set[str] = set()
    for module in modules:
        matching = [
            (name, [module_path(family, hf.rpartition(".")[0]).endswith(module) for hf in placed.hf])
            for name, placed in tensors.items()
        ]
        if partly := next((name for name, parts in matching if any(parts) and not all(parts)), None):
            raise UsageError(
                f"lora.modules_to_save: {module} is trained as one tensor with {' and '.join(tensors[partly].hf)}. "
                "Name all of their modules, or use lora.targets."
            )
        chosen = {name for name, parts in matching if all(parts)}
        if not chosen:
            raise UsageError(
                f"lora.modules_to_save: {module} is no module of {family.name}. Use names such as embed_tokens, "
                "lm_head or norm, or paths."
            )
        if adapted := sorted(chosen & adapters.by_weight.keys()):
            raise UsageError(
                f"lora.modules_to_save: {module} is also in lora.targets, which gives {tensors[adapted[0]].hf[0]} an "
                "adapter. Name the targets without it, or leave it out."
            )
        if arch.head.tie_embeddings and chosen & {"embedding.word_embeddings.weight", "output_layer.weight"}:
            raise UsageError(
                f"lora.modules_to_save: {module} is one tensor with the other end of this model (tie_word_embeddings), "
                "and PEFT would train two copies. Leave it out, or train all weights without lora."
            )
        names |= chosen
    return frozenset(names)
