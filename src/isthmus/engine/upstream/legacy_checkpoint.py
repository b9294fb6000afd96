"""Legacy checkpoints in Megatron-LM's own loader: each tensor is loaded, whichever layers have named it.

A legacy checkpoint has the names of its layers: TransformerEngine fuses a norm with the projection behind it and groups
experts, local layers do neither. Since core 0.13, Megatron-LM loads again without ``strict`` if names differ, and the
model keeps initial values where it finds no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from isthmus.engine.tensor_names import live_names
from isthmus.engine.upstream.import_hooks import patch_on_import
from isthmus.errors import DataError

Say = Callable[[str], None]


class LegacyState(dict[str, Any]):
    """The tensors of a model in a legacy checkpoint by live name; the optimizer is loaded after them."""

    def __init__(self, tensors: dict[str, Any], checkpoint: str, *, with_optimizer: bool) -> None:
        super().__init__(tensors)
        self.checkpoint = checkpoint
        self.with_optimizer = with_optimizer
        self.error: DataError | None = None
        """Raised by the first load. Megatron-LM catches it, and loads again without ``strict``."""


def install(say: Say) -> None:
    """Patch the loader and the models, when they are imported."""
    patch_on_import("megatron.training.checkpointing", _mark_legacy_states)
    patch_on_import("megatron.core.transformer.module", functools.partial(_load_all_tensors, say))


def _mark_legacy_states(checkpointing: Any) -> None:
    load = getattr(checkpointing, "_load_base_checkpoint", None)
    if load is None:
        return

    @functools.wraps(load)
    def load_base_checkpoint(load_dir: Any, args: Any, *rest: Any, **named: Any) -> Any:
        state, file, release, *kind = load(load_dir, args, *rest, **named)
        if state is not None and getattr(next(iter(kind), None), "name", "") == "LEGACY":
            with_optimizer = not (release or args.finetune or args.no_load_optim)
            for key in [key for key in state if key.removeprefix("model").isdecimal() or key == "model"]:
                if isinstance(state[key], dict):
                    state[key] = LegacyState(state[key], str(file), with_optimizer=with_optimizer)
        return (state, file, release, *kind)

    checkpointing._load_base_checkpoint = load_base_checkpoint


def _load_all_tensors(say: Say, module: Any) -> None:
    cls = module.MegatronModule
    load = cls.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, *rest: Any, **named: Any) -> Any:
        if isinstance(state_dict, LegacyState):
            if state_dict.error is not None:
                raise state_dict.error
            state_dict = _adapted(self, state_dict, strict, say)
        return load(self, state_dict, strict, *rest, **named)

    cls.load_state_dict = load_state_dict


def _adapted(model: nn.Module, state: LegacyState, strict: bool, say: Say) -> dict[str, Any]:
    """The tensors by the names of ``model``; with ``strict``, DataError unless they are all of its tensors."""
    expected = [*model.state_dict()]
    names = renamed(expected, state)
    if names and state.with_optimizer:
        state.error = DataError(
            f"{state.checkpoint}: {min(names)} and {len(names) - 1} other tensors have the names of other layers, in "
            "whose order the optimizer state is saved. Add --no-load-optim, or train with the layers that saved it."
        )
        raise state.error
    tensors = {names.get(name, name): value for name, value in state.items()}
    missing, unexpected = _tensors(expected) - tensors.keys(), _tensors(tensors) - set(expected)
    if strict and (missing or unexpected):
        state.error = DataError(
            f"{state.checkpoint} does not fit the model: {_listed('without', missing)}{_listed('unknown', unexpected)}"
            "Megatron-LM would keep initial values or drop tensors. Check the arguments of the model, or convert it "
            "again: isthmus convert ... --to torch --spelling local."
        )
        raise state.error
    if names and strict:  # not again in the second load
        say(f"checkpoint: {len(names)} tensors of {state.checkpoint} renamed for local layers, such as {min(names)}")
    return tensors


def renamed(expected: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The names that other layers give to tensors of ``expected``, with the name in ``expected``."""
    known, present = set(expected), set(names)
    missing, others = _tensors(known) - present, _tensors(present) - known
    aliases = {alias: name for name in missing for alias in live_names(name)}
    names_of = {other: [aliases.get(other, other), *live_names(other)] for other in others}
    return {other: name for other, known_names in names_of.items() for name in known_names if name in missing}


def _tensors(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.endswith("_extra_state")}


def _listed(word: str, names: set[str]) -> str:
    """Up to four names."""
    if not names:
        return ""
    return f"{word} {', '.join(sorted(names)[:4])}{f' and {len(names) - 4} others' if len(names) > 4 else ''}. "
