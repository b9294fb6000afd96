"""``isthmus plan``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from isthmus.cli.options import ResultOptions, argument, config_and_overrides, flag, is_config, is_setting, option
from isthmus.cli.terminal import say


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(ResultOptions):
    words: list[str] | None = argument(
        "MODEL [CONFIG.yaml] [KEY=VALUE]...",
        "Hugging Face folder, its config.json, Hub id or preset:NAME; a run config; settings, which are fixed in all "
        "plans.",
        None,
        show_default=False,
    )
    gpus: str | None = option("NxNAME", "GPUs of a node, such as 8xMI300X or 8xH100; a number with --memory.")
    memory: str | None = option("SIZE", "Memory of a GPU, such as 80GiB; default: that of the GPU's name.")
    nodes: int | None = option(
        "N", "Number of nodes; default: 1, or more for multiples of 8 GPUs in --gpus.", min=1, max=65536
    )
    rack: int | None = option("N", "Nodes that share a rack or pod of the network; default: all of them.", min=1)
    oversubscription: float = option(
        "R", "Bandwidth of a rack's network cards over that of its links to other racks.", 1.0, min=1.0
    )
    storage: float | None = option(
        "GB/S",
        "Throughput of the shared file system over all nodes; default: 2 GB/s a node, at most 2,000.",
        min=0.001,
    )
    mtbf: float | None = option(
        "HOURS",
        "Mean time between failures of the whole run; default: one in 50,700 GPU hours, as Llama 3 405B had.",
        min=0.001,
    )
    recipe: str | None = option("RECIPE", "sft, dpo, ...: of a run without a config file; default: pretrain.")
    top: int = option("N", "Number of plans to print.", 5, min=1, max=1000)
    explain: bool = flag("Also print the formulae of the first plan, with its numbers.")


def plan(options: PlanOptions) -> int:
    """Print the layouts that fit a model into the memory of GPUs, from the fastest, without weights and GPUs.

    Memory and the time of a step are estimates. The exit code is 1 if nothing fits.
    """
    from isthmus.config.presets import kind_of
    from isthmus.tools.planner.planned_gpus import parse_machine
    from isthmus.tools.planner.planning import make_plans
    from isthmus.tools.planner.render import as_json, as_text

    machine = replace(
        parse_machine(options.gpus, options.memory, options.nodes),
        rack_nodes=options.rack,
        oversubscription=options.oversubscription,
        storage_gb_s=options.storage,
        failure_hours=options.mtbf,
    )
    words = options.words or []
    names_model = [
        position
        for position, word in enumerate(words)
        if not is_setting(word) and (not is_config(word) or kind_of(word) == "models")
    ][:1]
    model = words[names_model[0]] if names_model else None
    rest = [word for position, word in enumerate(words) if position not in names_model]
    file, overrides = config_and_overrides(rest)
    plans = make_plans(model, file, overrides, machine, recipe=options.recipe, number=options.top)
    if options.json:
        text = json.dumps(as_json(plans), indent=2)
    else:
        text = as_text(plans, explained=options.explain, given=rest)
    say(text, exact=options.json)
    return 0 if plans.best else 1
