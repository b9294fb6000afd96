"""The linear layers of the Hugging Face model inside each Megatron-Core weight, and the choice of those with adapters.

A LoRA adapter belongs to a linear layer of transformers: query, key and value have adapters of their own although their
weights are fused here, and a projection that transformers fuses has one.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.rule import Shape

if TYPE_CHECKING:
    from isthmus.families.rules.shard import TensorSlice

ALL_LINEAR = "all-linear"
_WEIGHT = re.compile(
    r"(?:decoder\.layers\.\d+\..*|embedding\.layer_inputs)\.((?:linear_\w+|in_proj|out_proj)\.weight|gate_weight)"
)
_WITHIN_MAMBA = re.compile(r"decoder\.layers\.\d+\.mixer\.(?:x|dt)_proj\.weight")
_REGEX = re.compile(r"^\.\*|[\\(|^$+{]")
"""A target is a regular expression if it starts with ``.*`` or has one of these characters."""
_WILDCARDS = "*?["
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class HfLinear:
    """A linear layer of transformers, weight [out, inputs]; its adapter is A [rank, inputs] and B [out, rank]."""

    module: str
    """Path in the model, such as ``model.layers.0.self_attn.q_proj``. transformers keeps the routed experts of a layer
    in one parameter [experts, out, inputs], whose path is, for example, ``model.layers.0.mlp.experts.gate_up_proj``."""
    out: int
    inputs: int
    tensors: tuple[str, ...]
    """Tensors in the files: several if transformers fuses them when it loads the model."""
    parts: tuple[tuple[int, int], ...]
    """Parts of the rule (:class:`~isthmus.families.rules.rule.Rule`) that belong to the layer, and the row of the layer
    at which the part's tensor starts."""
    expert: int | None = None
    """Number of the routed expert in the layer, if its weight is part of a parameter of all experts."""
    parameter: str | None = None
    """Its name among PEFT's ``target_parameters``, for which PEFT has neither dropout nor DoRA; None: PEFT targets the
    module by ``target_modules``."""
    transposed: bool = False
    """transformers has the weight as [inputs, out]."""
    swapped: bool = False
    """PEFT takes the parameter's [experts, inputs, out] for [experts, out, inputs], see
    :attr:`~isthmus.families.family.Family.swapped_experts`."""

    def rows_and_columns(self, piece: TensorSlice) -> tuple[slice, slice]:
        """Rows of B and columns of A of a slice of one of the layer's tensors; KeyError if it belongs to another."""
        first, index = dict(self.parts)[piece.part], piece.hf[1:] if piece.stacked else piece.hf
        rows, columns = index[::-1] if piece.transposed else index
        return slice(rows.start + first, rows.stop + first, rows.step), columns


def adapted_linears(family: Family, arch: Architecture, targets: Sequence[str]) -> dict[str, tuple[HfLinear, ...]]:
    """The linear layers with an adapter by canonical weight name, in the order of the rule's parts.

    A target is ``all-linear`` (every linear layer, also of routed experts; not the output layer, the routers, the gates
    of shared experts, layers that PEFT refuses, and projections within Mamba-1), the path of a linear layer or its end
    (``q_proj``, ``self_attn.q_proj``; several with commas between them), a pattern of the path
    (``model.layers.[0-3].*``), or a regular expression of the whole path. Layers of routed experts are meant only by a
    target that contains ``experts``.
    Layers for multi-token prediction have no adapters: transformers does not load them.

    Raises:
        UsageError: there are no targets, or a target is no linear layer, one that PEFT refuses, or a projection within
            Mamba-1.
    """
    if not targets:
        raise UsageError("lora.targets is empty. Use all-linear, or names of linear layers such as q_proj, v_proj.")
    linears_by_weight = all_linears(family, arch)
    modules = {linear.module: linear for linears in linears_by_weight.values() for linear in linears}
    # The gate of shared experts decides like a router.
    gates = {linears[0].module for name, linears in linears_by_weight.items() if name.endswith(".gate_weight")}
    refused = {module for module in modules if module.endswith(family.unadapted)}
    chosen: set[str] = set()
    for target in (part.strip() for listed in targets for part in _split(listed)):
        _check_within_mamba(target, family, arch)
        matching = [module for module, linear in modules.items() if _matches(target, linear)]
        if not matching:
            raise UsageError(_unknown(target, modules, family))
        if target == ALL_LINEAR:
            matching = [module for module in matching if module not in gates | refused]
        elif refused_modules := refused.intersection(matching):
            raise UsageError(
                f"lora.targets: {target!r} includes {min(refused_modules)}, and PEFT refuses an adapter of this layer "
                f"in {family.name} models, which read its weight alone. Name the targets without it."
            )
        chosen.update(matching)
    adapted = {
        name: tuple(linear for linear in linears if linear.module in chosen)
        for name, linears in linears_by_weight.items()
    }
    return {name: linears for name, linears in adapted.items() if linears}


def _check_within_mamba(target: str, family: Family, arch: Architecture) -> None:
    """Raise UsageError for a target that PEFT would also apply to projections of time steps, B and C."""
    for name, placed in family.placements(arch).items() if target != ALL_LINEAR else ():
        if not _WITHIN_MAMBA.fullmatch(name):
            continue
        module = module_path(family, placed.hf[0])
        if _matches(target, HfLinear(module, 0, 0, (), ())):
            raise UsageError(
                f"lora.targets: {target!r} includes {module}, and projections within Mamba-1 have no adapters: "
                "transformers reads the weight of dt_proj alone, and with kernels also that of x_proj. Name the "
                "targets without them."
            )


def all_linears(family: Family, arch: Architecture) -> dict[str, tuple[HfLinear, ...]]:
    """Every linear layer that can have an adapter, by canonical weight name."""
    shapes: dict[int, list[Shape]] = {}  # thousands of tensors of experts have the same rule
    linears: dict[str, tuple[HfLinear, ...]] = {}
    for name, placed in family.placements(arch).items():
        rule = placed.rule
        if rule.trained and _WEIGHT.fullmatch(name):
            if id(rule) not in shapes:
                shapes[id(rule)] = rule.part_shapes(arch)
            linears[name] = _linears(placed, shapes[id(rule)], family, arch)
    return linears


def name_of(module: str) -> str:
    """The short name of a linear layer: the end of its path, for routed experts with ``experts.``."""
    owner, _, leaf = module.rpartition(".")
    return f"experts.{leaf}" if owner.endswith(".experts") else leaf


def module_path(family: Family, tensor: str) -> str:
    """The path of a tensor's module in transformers."""
    path = tensor.removesuffix(".weight")
    for old, new in family.module_names.items():
        path = path.replace(old, new)
    return path


def _linears(placed: Placement, shapes: Sequence[Shape], family: Family, arch: Architecture) -> tuple[HfLinear, ...]:
    by_module: dict[str, dict[int, int]] = {}
    rows_of: dict[str, int] = {}
    first_row: dict[str, int] = {}
    tensors: dict[str, list[str]] = {}
    rule = placed.rule
    for part, (tensor, (rows, _)) in enumerate(zip(placed.hf, shapes, strict=True)):
        module = module_path(family, tensor)
        # Families with their own modeling code have a module for each expert.
        if rule.is_expert and not rule.stacked and not family.has_code:
            leaf = "gate_up_proj" if len(shapes) > 1 else "down_proj" if "linear_fc2" in rule.canonical else "up_proj"
            module = f"{module.rpartition(f'.{placed.expert}.')[0]}.{leaf}"
        if tensor not in first_row:
            first_row[tensor] = rows_of.get(module, 0)
            tensors.setdefault(module, []).append(tensor)
        rows_of[module] = rows_of.get(module, 0) + rows
        by_module.setdefault(module, {})[part] = first_row[tensor]
    in_parameter = rule.is_expert and not family.has_code
    return tuple(
        HfLinear(
            module=module,
            out=rows_of[module],
            inputs=shapes[0][1],
            tensors=tuple(tensors[module]),
            parts=tuple(parts.items()),
            expert=placed.expert if in_parameter else None,
            parameter=module if in_parameter else _weight_parameter(module, family, arch),
            transposed=rule.transposed,
            swapped=in_parameter and family.swapped_experts,
        )
        for module, parts in by_module.items()
    )


def _weight_parameter(module: str, family: Family, arch: Architecture) -> str | None:
    """PEFT takes these names among ``target_modules`` for routed experts if the model has any."""
    if arch.moe is None or family.has_code or module.rpartition(".")[2] not in _EXPERT_NAMES:
        return None
    return f"{module}.weight"


def _split(target: str) -> list[str]:
    return (
        [target] if _REGEX.search(target) or any(character in target for character in _WILDCARDS) else target.split(",")
    )


def _matches(target: str, linear: HfLinear) -> bool:
    if target == ALL_LINEAR:
        return True
    if linear.expert is not None and "experts" not in target:
        return False
    if _REGEX.search(target):
        return _regex(target).fullmatch(linear.module) is not None
    if any(character in target for character in _WILDCARDS):
        return fnmatch.fnmatchcase(linear.module, target)
    return linear.module == target or linear.module.endswith(f".{target}")


@lru_cache
def _regex(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target)
    except re.error as error:
        raise UsageError(f"lora.targets: {target!r} is not a regular expression: {error}.") from None


def _unknown(target: str, modules: dict[str, HfLinear], family: Family) -> str:
    names = ", ".join(dict.fromkeys(map(name_of, modules)))
    return (
        f"lora.targets: {target!r} is no linear layer of {family.name}. Use {ALL_LINEAR}, one of {names}, or a pattern "
        "of their paths. Other modules are trained whole with lora.modules_to_save."
    )
