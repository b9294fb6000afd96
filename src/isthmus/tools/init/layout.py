"""The layout of a first run: that of ``isthmus plan`` on GPUs, one rank on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.errors import UsageError
from isthmus.families.registry import family_for, language_config
from isthmus.hf.model_folder import ModelFolder
from isthmus.platforms.detect import detect
from isthmus.platforms.free_memory import free_bytes
from isthmus.platforms.parts import find_part
from isthmus.recipes.data.default_batch import ENOUGH_STEPS
from isthmus.recipes.plan.parameter_counts import num_parameters
from isthmus.recipes.registry import RECIPES
from isthmus.tools.init.data_survey import DataSurvey
from isthmus.tools.init.run_file import ProposedSetting
from isthmus.tools.planner.planned_gpus import PlannedGpus
from isthmus.tools.planner.planning import Plans, make_plans
from isthmus.tools.planner.render import settings_of

_LORA_RANK = 16
_USUAL_BATCH = 64
_TRAINED_BYTES = 16
"""Of a parameter on a CPU: float32 weight, gradient and two moments."""
_USABLE = 0.7
"""Share of the free memory that weights, gradients and optimizer may take; the rest is for activations."""
_SMALL_MODEL = 500_000_000
"""Parameters up to which the published learning rates of small models apply."""


@dataclass(frozen=True, slots=True)
class FirstLayout:
    settings: Sequence[ProposedSetting]
    nproc: int
    """Ranks of a machine."""
    plans: Plans | None
    """None on a CPU."""


def gpus_here() -> PlannedGpus | None:
    """The GPUs of this machine; None without any, or if their data sheet is not known."""
    platform = detect()
    if platform.name == "cpu":
        return None
    import torch

    count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
    return PlannedGpus(count, 1, properties.total_memory, find_part(properties.name))


def first_layout(
    model: str, source: ModelFolder, recipe: RecipeName, machine: PlannedGpus | None, words: Sequence[str]
) -> FirstLayout:
    """Settings of layout, batch and memory with which the run fits.

    Args:
        model: as the user named it.
        source: that model, open.
        recipe: of the run.
        machine: the GPUs; None: this machine's CPU.
        words: settings of the run, ``key=value``.

    Raises:
        UsageError: the run does not fit into the GPUs with adapters either.
    """
    if machine is None:
        return _on_cpu(source, words)
    plans = make_plans(model, None, words, machine, recipe=recipe, number=1)
    adapters: list[ProposedSetting] = []
    if not plans.best and not any(word.startswith("lora.") for word in words):
        adapters = [
            ProposedSetting("lora.rank", _LORA_RANK, "adapters: training all weights does not fit into the GPUs")
        ]
        plans = make_plans(model, None, [*words, f"lora.rank={_LORA_RANK}"], machine, recipe=recipe, number=1)
    if not plans.best:
        suggestions = "; ".join(plans.suggestions) or "use a smaller model"
        raise UsageError(f"{model} does not fit into {machine}. It fits {suggestions}.")
    best = plans.best[0]
    reasons: Mapping[str, str] = {
        "parallel.tp": f"the fastest layout of isthmus plan on {machine}",
        "train.global_batch_size": "sequences of a step, over all GPUs",
        "train.micro_batch_size": f"{best.total_bytes / 2**30:.0f} GiB of a GPU",
    }
    planned = [
        ProposedSetting(name, value, reasons.get(name))
        for name, value in settings_of(best.config).items()
        if not name.startswith("data.")
    ]
    return FirstLayout([*adapters, *planned], machine.gpus_per_node, plans)


def batch_size(survey: DataSurvey, recipe: RecipeName, seq_length: int, ranks: int) -> list[str]:
    """``train.global_batch_size`` with which an epoch of a small data set has 20 steps, if the GPUs allow that.

    Empty for a large data set, whose batch the planner chooses.
    """
    is_packed = RECIPES[recipe].bin_packs and survey.kind in ("chat", "text")
    sequences = survey.stats.tokens / seq_length if is_packed else survey.records
    if not survey.is_complete or sequences > ENOUGH_STEPS * _USUAL_BATCH:
        return []
    largest = max(1, int(sequences) // ENOUGH_STEPS)
    return [f"train.global_batch_size={max(ranks, 1 << (largest.bit_length() - 1))}"]


def learning_rate(
    source: ModelFolder, recipe: RecipeName, settings: Sequence[ProposedSetting], words: Sequence[str]
) -> list[ProposedSetting]:
    """Learning rate and warm-up of a small model, of which all weights are trained; empty for other runs."""
    names = [setting.name for setting in settings] + [word.partition("=")[0] for word in words]
    rate = RECIPE_SETTINGS[recipe].small
    if rate is None or any(name.startswith(("lora.", "optim.")) for name in names):
        return []
    config = language_config(source.config)
    family = family_for(config)
    parameters = num_parameters(family, family.to_architecture(config))
    if parameters > _SMALL_MODEL:
        return []
    reason = f"for a model of {parameters / 1e6:,.0f} million parameters, {rate.source}"
    return [
        ProposedSetting("optim.lr", rate.lr, reason),
        ProposedSetting("optim.warmup_fraction", rate.warmup_fraction),
    ]


def _on_cpu(source: ModelFolder, words: Sequence[str]) -> FirstLayout:
    config = language_config(source.config)
    family = family_for(config)
    needed, free = _TRAINED_BYTES * num_parameters(family, family.to_architecture(config)), free_bytes()
    if needed <= _USABLE * free or any(word.startswith("lora.") for word in words):
        return FirstLayout([], 1, None)
    reason = f"adapters: training all weights needs {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
    return FirstLayout([ProposedSetting("lora.rank", _LORA_RANK, reason)], 1, None)
