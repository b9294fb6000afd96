"""Which family has words for a model of which nothing is known but its architecture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import all_families

PREFERRED = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe"),
    *("deepseek_v2", "deepseek_v3", "gpt2", "gpt_neox"),
)
"""Where several families can say the same model the first of these is taken, then the others by their names."""
LAST_RESORT = "isthmus"
"""Says nearly any model, with modelling files of its own, and is taken where no other does."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Fitting:
    """A family that says an architecture exactly, and the others that would."""

    family: Family
    arch: Architecture
    """With the family's name."""
    others: tuple[str, ...]


def fit(arch: Architecture, first: str | None = None) -> Fitting:
    """The family to take for an architecture: one whose ``config.json`` means exactly this.

    Args:
        arch: the model.
        first: a family to take before all others.

    Raises:
        UsageError: there is none; the message says which comes nearest and in what it differs.
    """
    families = all_families()
    order = [name for name in dict.fromkeys((first, *PREFERRED)) if name in families]
    order += [name for name in families if name not in (*order, LAST_RESORT)]
    order += [LAST_RESORT] if LAST_RESORT in families else []
    fitting: list[tuple[Family, Architecture]] = []
    nearest: tuple[str, list[str]] | None = None
    for name in order:
        if (said := _as_said_by(families[name], arch)) is None:
            continue
        if not (faults := _differences(arch, said)):
            fitting.append((families[name], replace(said, init_std=arch.init_std)))
        elif nearest is None or len(faults) < len(nearest[1]):
            nearest = (name, faults)
    if not fitting:
        close = "" if nearest is None else f" The nearest is {nearest[0]}, but for {_listed(nearest[1])}."
        raise UsageError(f"no family has words for the model that Megatron-LM's args describe.{close}")
    (family, said), *others = fitting
    return Fitting(family, said, tuple(other.name for other, _ in others))


def _as_said_by(family: Family, arch: Architecture) -> Architecture | None:
    """The architecture that comes back out of the family's config; None if it cannot be put into one."""
    paths = (*family.keys, *family.traits, *family.derived)
    if any(getattr(arch, path.split(".")[0]) is None for path in paths if "." in path):
        return None  # experts or latent attention, which every model of the family has
    try:
        return family.to_architecture(family.to_hf_config(arch))
    except (DataError, UsageError):
        return None


def _differences(wanted: Architecture, said: Architecture) -> list[str]:
    ours, theirs = _flat(wanted), _flat(said)
    return [
        f"{name}={ours.get(name)} and not {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def _flat(arch: Architecture) -> dict[str, Any]:
    """Every field by its path, in one spelling for what comes out the same; names and initial weights do not count."""
    if (moe := arch.moe) is not None:
        if moe.score == "softmax_of_chosen" and moe.num_groups == 1 and not moe.expert_bias:
            moe = replace(moe, score="softmax", normalize=True)
        if moe.score == "softmax" or not moe.normalize:
            moe = replace(moe, normalize_min=0.0)  # the chosen of a softmax never sum up to so little
        if moe.num_groups == 1:
            moe = replace(moe, group_top_k=1, group_score="max")
        # Where every layer has experts nothing is as wide as an ordinary block.
        arch = replace(arch, moe=moe, ffn_hidden_size=arch.ffn_hidden_size if moe.dense_layers else 0)
    found: dict[str, Any] = {}
    for name, value in asdict(arch).items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": number for inner, number in value.items()}
        elif name not in ("family", "init_std") and value is not None:
            found[name] = value
    return found


def _listed(faults: list[str]) -> str:
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return ", ".join(faults[:_SHOWN]) + more
