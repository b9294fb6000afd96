"""The families and cases of `make test` together have every kind of setting and of tensor rule that all have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from isthmus.families.architecture import SETTINGS, Architecture
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from parity import test_expert_adapters, test_logits, test_round_trip, test_training
from ranks.tiny import tiny_config
from sweep import SETTING_FAMILIES


def tiny_architecture(name: str, **settings: Any) -> tuple[Family, Architecture]:
    config = tiny_config(name, **settings).to_dict()
    family = family_for(config)
    return family, family.to_architecture(config)


def kinds_of_settings(arch: Architecture) -> set[Hashable]:
    """Settings other than their default: numbers and layers by name, choices by value; and the kinds of layers."""
    kinds: set[Hashable] = set()
    for name, value in arch.settings.items():
        if name == "family" or value == SETTINGS[name]:
            continue
        if is_dataclass(value):
            kind = getattr(value, "kind", type(value).__name__)
            changed = [entry.name for entry in fields(value) if getattr(value, entry.name) != entry.default]
            kinds |= {(name, kind, field) for field in changed}
        else:
            kinds.add((name, value) if value is None or isinstance(value, (bool, str)) else name)
    blocks = {(tuple(sorted(layer.kinds)), layer.form, type(layer.feed_forward).__name__) for layer in arch.all_layers}
    return kinds | blocks


def kinds_of_rules(family: Family, arch: Architecture) -> set[Hashable]:
    """Tensor rules without names and sizes."""
    return {
        (
            *(rule.shard, rule.strands != "1", rule.hf_strands != "1", bool(rule.hf_order), rule.interleaved),
            *(rule.transposed, rule.stacked, rule.per_head is not None, rule.scalar, rule.dtype, rule.trained),
            *(rule.recut, rule.alias, min(len(rule.parts), 3)),
        )
        for rule in (placed.rule for placed in family.placements(arch).values())
    }


def trained(name: str) -> set[Hashable]:
    settings = {"num_hidden_layers": 2, **test_training.SETTINGS.get(name, {})}
    family, arch = tiny_architecture(name, **settings)
    return kinds_of_settings(arch) | kinds_of_rules(family, arch)


def exported(name: str) -> set[Hashable]:
    family, arch = tiny_architecture(name)
    return {*kinds_of_rules(family, arch), ("nested", family.nested is not None), ("names", bool(family.other_names))}


def adapted(name: str) -> set[Hashable]:
    family, arch = tiny_architecture(name)
    assert arch.moe is not None
    return {kind for kind in kinds_of_settings(arch) if "moe." in str(kind)} | kinds_of_rules(family, arch)


def computed(case: str) -> set[Hashable]:
    name, settings, _ = test_logits.CASES[case]
    return kinds_of_settings(tiny_architecture(name, **settings)[1])


@pytest.mark.parametrize(
    ("kinds_of", "swept", "kept"),
    [
        pytest.param(computed, test_logits.CASES, test_logits.IN_MAKE_TEST, id="logits"),
        pytest.param(trained, test_training.FAMILIES, SETTING_FAMILIES, id="gradients"),
        pytest.param(
            exported,
            [*dict(test_round_trip.OTHERS), *test_round_trip.WITH_EXPERTS],
            test_round_trip.IN_MAKE_TEST,
            id="export",
        ),
        pytest.param(
            adapted, test_expert_adapters.ADAPTED, test_expert_adapters.IN_MAKE_TEST, id="adapters of experts"
        ),
    ],
)
def test_every_kind_is_in_make_test(
    kinds_of: Callable[[str], set[Hashable]], swept: Iterable[str], kept: Iterable[str]
) -> None:
    kinds = {name: kinds_of(name) for name in swept}
    covered = set().union(*(kinds[name] for name in kept if name in kinds))
    missing = {name: sorted(map(str, missed)) for name in kinds if (missed := kinds[name] - covered)}
    assert not missing
