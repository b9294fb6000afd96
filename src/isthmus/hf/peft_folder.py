"""LoRA adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

A linear layer has ``lora_A`` [rank, inputs] and ``lora_B`` [out, rank]; its weight changes by ``scale * B @ A``. The
routed experts of a layer share a parameter [experts, out, inputs], which PEFT targets by ``target_parameters``: A is
[experts * rank, inputs], grouped by expert, and B is [out, rank * experts], in which the expert is the fastest index.
Where PEFT takes the parameter's inputs for its outputs (``HfLinear.swapped``), A is [experts * rank, out] and B is
[inputs, rank * experts]: ``B @ A`` is the transpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.errors import DataError, MissingInput, UsageError, disk_errors
from isthmus.families.adapted_linears import HfLinear
from isthmus.families.family import SCORE
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.folder_links import check_links
from isthmus.hf.model_folder import ADAPTER_FILE, ADAPTER_WEIGHTS, read_json, write_json
from isthmus.hf.tensors.safetensors_format import TensorInfo, TensorReader, read_header
from isthmus.hf.tensors.tensor_fingerprint import fingerprint_of

PREFIX = "base_model.model."
_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of routed experts, in the order of their definition in transformers: PEFT wraps the first one first."""
_CACHED = 4
"""Modules whose factors are kept: a conversion reads those of the experts of a layer in turn."""
_NEUTRAL: dict[str, Any] = {"bias": "none", "lora_bias": False, "use_qalora": False, "use_bdlora": None}
_NEUTRAL |= dict.fromkeys(
    ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config")
)
_NEUTRAL["trainable_token_indices"] = None
"""Settings of PEFT whose other values give the tensors another meaning."""
_CHOICE, _REPEATED_GROUP = re.compile(r"[*+{]\??|(?<!\()\?|\("), re.compile(r"\)[*+{]")
"""Parts of a regular expression that match in several ways."""
_MOST_CHOICES, _LONGEST_PATTERN, _LONGEST_NAME = 4, 1000, 256
"""The time to match a name grows with a power of its length, and exponentially in repeated groups."""
_CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Initializations that also change the base weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The settings in ``adapter_config.json``."""

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    use_dora: bool = False
    use_rslora: bool = False
    target_modules: tuple[str, ...] | str = ()
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Rank and alpha of modules whose path, or its end, matches a regular expression."""
    fan_in_fan_out: bool = False
    """The weights of the model are [in, out], as in GPT-2."""
    ensure_weight_tying: bool = False
    task_type: str = "CAUSAL_LM"
    """``SEQ_CLS`` for a reward model."""
    base_model_name_or_path: str | None = None
    revision: str | None = None

    def rank(self, key: str) -> int:
        """The rank of a module, or of a parameter."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, key), self.r)

    def scale(self, key: str) -> float:
        """The factor of ``B @ A``."""
        alpha, rank = self.alpha_pattern.get(_pattern(self.alpha_pattern, key), self.lora_alpha), self.rank(key)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def as_json(self) -> dict[str, Any]:
        """The file's content; settings that are left out have PEFT's defaults."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        lists: dict[str, Any] = {name: [*value] or None for name, value in values.items() if isinstance(value, tuple)}
        if not self.target_modules:
            lists["target_modules"] = []  # with null, PEFT looks for the usual modules of the model's type
        kind = {"peft_type": "LORA", "bias": "none", "inference_mode": True}
        return values | lists | kind


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """The tensors of one module in the file, and their scale."""

    a: str
    b: str
    magnitude: str | None
    """DoRA: the norm of each row of the weight."""
    rank: int
    scale: float
    embedding: bool = False
    """``lora_embedding_A`` [rank, rows] and ``lora_embedding_B`` [width, rank] of an embedding."""


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """One linear layer's factors in float32: ``a`` [rank, inputs], ``b`` [out, rank], ``magnitude`` [out] (DoRA)."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None


class PeftFolder:
    """An adapter; tensors are read when they are needed."""

    def __init__(self, path: Path) -> None:
        """Read the settings and the names of the tensors.

        Raises:
            MissingInput: the folder has no adapter.
            UsageError: the adapter is not LoRA, has rank 0, or uses a variant of LoRA that is not supported.
            DataError: a file is damaged, or the tensors are not those of the settings.
        """
        self.path = path
        if not (path / ADAPTER_FILE).is_file():
            raise MissingInput(f"{path} has no {ADAPTER_FILE}. Give the folder of a LoRA adapter of PEFT.")
        check_links(path)
        verifier = ChecksumVerifier()
        verifier.check(path / ADAPTER_FILE)
        self.config: AdapterConfig = _read_config(path / ADAPTER_FILE)
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise MissingInput(f"{path} has no {ADAPTER_WEIGHTS}. Save the adapter with PEFT's save_pretrained.")
        header = read_header(path / ADAPTER_WEIGHTS, verifier)
        self._infos = {name.removeprefix(PREFIX): info for name, info in header.items()}
        self._reader = TensorReader(verifier)
        self._cached = lru_cache(_CACHED)(self._load)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def modules(self) -> dict[str, LoraTensors]:
        """The tensors of each module with an adapter, by its path; of routed experts by that of the parameter."""
        modules: dict[str, LoraTensors] = {}
        for name in self._infos:
            module, lora, kind = name.partition(".lora_")
            if not lora or kind not in ("A.weight", "embedding_A"):
                continue
            key = self._key(module)
            a, b = (f"{module}.lora_{kind.replace('A', which)}" for which in "AB")
            magnitude = f"{module}.lora_magnitude_vector" if self.config.use_dora else None
            if missing := [part for part in (b, magnitude) if part is not None and part not in self._infos]:
                raise DataError(f"{self} has {name} and no {missing[0]}. Save the adapter again.")
            path, embedding = key.removesuffix(".weight"), kind == "embedding_A"
            modules[path] = LoraTensors(a, b, magnitude, self.config.rank(key), self.config.scale(key), embedding)
        known = {part for tensors in modules.values() for part in (tensors.a, tensors.b, tensors.magnitude)}
        if unknown := [name for name in self._infos if ".lora_" in name and name not in known]:
            raise DataError(f"{self} has {unknown[0]}, which does not belong to LoRA. Merge it with PEFT.")
        return modules

    @cached_property
    def saved(self) -> dict[str, TensorInfo]:
        """The tensors of ``modules_to_save``, which replace those of the base, by name."""
        return {name.replace(".base_layer.", "."): info for name, info in self._infos.items() if ".lora_" not in name}

    def fingerprint(self) -> str:
        """Fingerprint of the settings and the tensors, see :func:`fingerprint_of`."""
        return f"{fingerprint_of(self._infos)} {self.config.r} {self.config.lora_alpha}"

    @property
    def has_score_head(self) -> bool:
        """Whether it is an adapter of a reward model."""
        return SCORE.parts[0].name in self.saved

    def shape(self, name: str) -> tuple[int, ...]:
        return (self.saved[name] if name in self.saved else self._infos[name]).shape

    def read_saved(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self._reader.read(self.saved[name], index, name=name)

    def factors(self, linear: HfLinear, expert: int | None = None) -> LoraFactors:
        """The factors of a linear layer; thread-safe. ``expert`` is the number of a routed expert."""
        tensors, (a, b, magnitude) = self.modules[linear.module], self._cached(linear.module)
        if expert is not None:
            a, b = a.unflatten(0, (-1, tensors.rank))[expert], b.unflatten(1, (tensors.rank, -1))[..., expert]
        a, b = (b.mT, a.mT) if linear.swapped else (a, b)
        return LoraFactors(a, b, tensors.scale, magnitude)

    def _load(self, module: str) -> tuple[Tensor, Tensor, Tensor | None]:
        tensors = self.modules[module]

        def read(name: str) -> Tensor:
            return self._reader.read(self._infos[name], name=name).float()

        return read(tensors.a), read(tensors.b), None if tensors.magnitude is None else read(tensors.magnitude)

    def _key(self, wrapped: str) -> str:
        """The name by which PEFT targets a module of the file: its path, or that of a parameter in it."""
        path, targets = wrapped.replace(".base_layer", ""), self.config.target_parameters
        experts = _EXPERTS if path.endswith(".experts") else ()
        inside = [name for name in experts if _names(targets, f"{path}.{name}")]
        depth = wrapped.count(".base_layer")
        if depth < len(inside):
            return f"{path}.{inside[len(inside) - 1 - depth]}"
        return f"{path}.weight" if _names(targets, f"{path}.weight") else path


def write_adapter(
    folder: Path,
    config: AdapterConfig,
    factors: Mapping[HfLinear, LoraFactors],
    linears: Iterable[HfLinear],
    saved: Mapping[str, Tensor] | None = None,
    others: Collection[str] = (),
) -> None:
    """Write both files into ``folder``, which exists.

    ``config`` needs no targets: they select the layers of ``factors`` among ``linears``, the linear layers of the
    model. ``saved`` are the trained tensors of ``modules_to_save``, by their name in transformers. ``others`` are
    further modules that no target may select, such as those of a multimodal model's towers.
    """
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in (saved or {}).items()}
    by_module: dict[str, dict[int, LoraFactors]] = {}
    for linear, values in factors.items():
        inside = replace(values, a=values.b.mT, b=values.a.mT) if linear.swapped else values
        by_module.setdefault(linear.module, {})[linear.expert or 0] = inside
    in_parameters = {linear.module for linear in factors if linear.expert is not None}
    for module, experts in by_module.items():
        ordered = [experts[number] for number in sorted(experts)]
        name = f"{PREFIX}{_wrapped(module, in_parameters) if module in in_parameters else module}"
        tensors[f"{name}.lora_A.weight"] = torch.cat([expert_factors.a for expert_factors in ordered])
        tensors[f"{name}.lora_B.weight"] = torch.stack([expert_factors.b for expert_factors in ordered], -1).flatten(1)
        if (magnitude := ordered[0].magnitude) is not None:
            tensors[f"{name}.lora_magnitude_vector"] = magnitude
    with disk_errors(folder, sum(tensor.nbytes for tensor in tensors.values())):
        write_json(folder / ADAPTER_FILE, _with_targets(config, factors, linears, others).as_json())
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / ADAPTER_WEIGHTS, {"format": "pt"})


def _with_targets(
    config: AdapterConfig, adapted: Collection[HfLinear], linears: Iterable[HfLinear], others: Collection[str]
) -> AdapterConfig:
    rest = [linear for linear in linears if linear not in adapted]
    modules = _shortest(
        (linear.module for linear in adapted if linear.parameter is None),
        {*others, *(linear.module for linear in rest)},
    )
    parameters = _shortest(
        filter(None, (linear.parameter for linear in adapted)), {linear.parameter or "" for linear in rest}
    )
    return replace(
        config,
        target_modules=modules,
        target_parameters=parameters,
        lora_dropout=0.0 if parameters else config.lora_dropout,  # PEFT has none for parameters
        fan_in_fan_out=any(linear.transposed and linear.expert is None for linear in adapted),
    )


def _shortest(paths: Iterable[str], others: Collection[str]) -> tuple[str, ...]:
    """The last name of each path (with ``.weight``, the last two), or the path if that is also the end of others."""
    names: dict[str, None] = {}
    for path in dict.fromkeys(paths):
        end = path[path.removesuffix(".weight").rfind(".") + 1 :]
        names[path if any(_names((end,), other) for other in others) else end] = None
    return tuple(names)


def _wrapped(module: str, in_parameters: Collection[str]) -> str:
    """The module's path in the file: a parameter that PEFT wraps first is inside the wrappers of the later ones."""
    owner, _, leaf = module.rpartition(".")
    later = [name for name in _EXPERTS[_EXPERTS.index(leaf) + 1 :] if f"{owner}.{name}" in in_parameters]
    return owner + ".base_layer" * len(later)


def _names(targets: Iterable[str], path: str) -> bool:
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _pattern(patterns: Iterable[str], key: str) -> str:
    if patterns and len(key) > _LONGEST_NAME:
        raise DataError(f"the module {key[:80]!r}... has a name of {len(key)} characters. Is it a real adapter?")
    return next((pattern for pattern in patterns if _compiled(pattern).match(key)), "")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Raises DataError for an expression that may take longer than seconds for the name of a module."""
    choices = len(_CHOICE.findall(pattern))
    if choices > _MOST_CHOICES or _REPEATED_GROUP.search(pattern) or len(pattern) > _LONGEST_PATTERN:
        raise DataError(
            f"the regular expression {pattern[:80]!r} of rank_pattern or alpha_pattern may run for hours: it repeats a "
            f"group, or has more than {_MOST_CHOICES} of * + ? {{ ( or {_LONGEST_PATTERN} characters. Split it into "
            "several expressions."
        )
    return re.compile(rf"(.*\.)?({pattern})$")


def _check_alphas(config: AdapterConfig) -> None:
    settings = {"lora_alpha": config.lora_alpha}
    settings |= {f"alpha_pattern of {pattern:.60}": alpha for pattern, alpha in config.alpha_pattern.items()}
    for name, alpha in settings.items():
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise DataError(f"{name} is {alpha!r:.60}, expected a finite number. Save the adapter again.")


def _read_config(path: Path) -> AdapterConfig:
    content = read_json(path)
    if (kind := content.get("peft_type")) != "LORA":
        raise UsageError(f"{path}: peft_type is {kind}, and only LORA is supported. Merge the adapter with PEFT.")
    for name, neutral in _NEUTRAL.items():
        if content.get(name, neutral) not in (neutral, None):
            raise UsageError(f"{path}: {name}={content[name]} is not supported. Merge the adapter with PEFT.")
    init = content.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        raise UsageError(
            f"{path}: init_lora_weights={init} changed the base weights; the adapter does not fit the original ones. "
            "Save it with path_initial_model_for_weight_conversion of PEFT's save_pretrained."
        )
    values: dict[str, Any] = {}
    for entry in fields(AdapterConfig):
        value = content.get(entry.name)
        if value is not None:
            values[entry.name] = tuple(value) if isinstance(value, list) else value
    try:
        config = AdapterConfig(**values)
        ranks = [config.r, *config.rank_pattern.values()]
        wrong = not all(type(rank) is int for rank in ranks)
        _check_alphas(config)
        for pattern in (*config.rank_pattern, *config.alpha_pattern):
            _compiled(pattern)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except (TypeError, AttributeError, OverflowError, re.error):
        wrong = True
    if wrong:
        raise DataError(f"{path} lacks r and lora_alpha, or has settings of another type. Save the adapter again.")
    if min(ranks) < 1:
        raise UsageError(f"{path}: rank {min(ranks)} is no adapter. Use the base model without it.")
    return config
