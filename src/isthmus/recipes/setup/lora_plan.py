"""The adapters of a run, and the tensors that it trains whole."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.config.schema import RunConfig
from isthmus.engine.lora.adapter import Adapter, AdapterSet
from isthmus.errors import UsageError
from isthmus.families.adapted_linears import adapted_linears, module_path
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.matched_tensors import trained_tensors


def plan_adapters(config: RunConfig, family: Family, arch: Architecture) -> AdapterSet | None:
    """The adapters of section ``lora``, or None.

    Raises:
        UsageError: a setting does not fit the model or the layout.
    """
    lora = config.lora
    if not lora.enabled:
        return None
    if config.parallel.fsdp:
        raise UsageError(
            "lora with parallel.fsdp=true is not supported: fsdp would gather the frozen weights for every micro "
            "batch. Use parallel.tp or parallel.pp, which shard them."
        )
    if config.train.freeze:
        raise UsageError("train.freeze with lora: all tensors but lora.modules_to_save are frozen. Leave it out.")
    waiting = {"lora.dropout": lora.dropout, "lora.lr_ratio": lora.lr_ratio, "lora.path": lora.path}
    if name := next((name for name, value in waiting.items() if value), None):
        raise UsageError(f"{name} is not supported yet. Leave it out.")
    assert lora.rank is not None
    rank, scale = lora.rank, lora.scale(lora.rank)
    of_weights = {
        name: tuple(Adapter(linear, rank, scale) for linear in linears)
        for name, linears in adapted_linears(family, arch, lora.targets).items()
    }
    return AdapterSet(of_weights=of_weights, dropout=lora.dropout, dora=lora.dora)


def saved_tensors(family: Family, arch: Architecture, modules: Iterable[str]) -> frozenset[str]:
    """Canonical names of the tensors of ``lora.modules_to_save``: names or ends of the paths of modules.

    Raises:
        UsageError: a module does not exist, or its tensors are not trained without those of other modules.
    """
    tensors = trained_tensors(family, arch)
    found: set[str] = set()
    for wanted in modules:
        matching = [
            (name, [_is_in(wanted, module_path(family, hf.rpartition(".")[0])) for hf in placed.hf])
            for name, placed in tensors.items()
        ]
        if partly := next((name for name, parts in matching if any(parts) and not all(parts)), None):
            raise UsageError(
                f"lora.modules_to_save: {wanted} is trained as one tensor with {' and '.join(tensors[partly].hf)}. "
                "Name all of their modules, or use lora.targets."
            )
        chosen = {name for name, parts in matching if all(parts)}
        if not chosen:
            raise UsageError(
                f"lora.modules_to_save: {wanted} is no module of {family.name}. Use names such as embed_tokens, "
                "lm_head or norm, or paths."
            )
        if arch.tie_embeddings and chosen & {"embedding.word_embeddings.weight", "output_layer.weight"}:
            raise UsageError(
                f"lora.modules_to_save: {wanted} is one tensor with the other end of this model (tie_word_embeddings), "
                "and PEFT would train two copies. Leave it out, or train all weights without lora."
            )
        found |= chosen
    return frozenset(found)


def _is_in(wanted: str, module: str) -> bool:
    return module == wanted or module.endswith(f".{wanted}")
