"""``isthmus plan``."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from isthmus.cli.options import Debug, Json
from isthmus.cli.terminal import say

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL [CONFIG.yaml] [KEY=VALUE]...",
        help="Hugging Face folder, its config.json, Hub id or preset:NAME; a run config; settings, which are fixed in "
        "all plans.",
        show_default=False,
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(metavar="NxNAME", help="GPUs of a node, such as 8xMI300X or 8xH100; a number with --memory."),
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GiB; default: that of the GPU's name.")
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1, max=65536, metavar="N", help="Number of nodes; default: 1, or more for multiples of 8 GPUs in --gpus."
    ),
]
Rack = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Nodes that share a rack or pod of the network; default: all of them."),
]
Oversubscription = Annotated[
    float,
    typer.Option(
        min=1.0, metavar="R", help="Bandwidth of a rack's network cards over that of its links to other racks."
    ),
]
Storage = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="GB/S",
        help="Throughput of the shared file system over all nodes; default: 2 GB/s a node, at most 2,000.",
    ),
]
Mtbf = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="HOURS",
        help="Mean time between failures of the whole run; default: one in 50,700 GPU hours, as Llama 3 405B had.",
    ),
]
Recipe = Annotated[
    str | None, typer.Option(metavar="RECIPE", help="sft, dpo, ...: of a run without a config file; default: pretrain.")
]
Top = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Number of plans to print.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Also print the formulae of the first plan, with its numbers.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    words: Words = None
    gpus: Gpus = None
    memory: Memory = None
    nodes: Nodes = None
    rack: Rack = None
    oversubscription: Oversubscription = 1.0
    storage: Storage = None
    mtbf: Mtbf = None
    recipe: Recipe = None
    top: Top = 5
    explain: Explain = False
    debug: Debug = False
    json: Json = False


def plan(options: PlanOptions) -> int:
    """Print the layouts that fit a model into the memory of GPUs, from the fastest, without weights and GPUs.

    Memory and the time of a step are estimates. The exit code is 1 if nothing fits.
    """
    from isthmus.cli.cli_args import config_and_overrides, is_config, is_setting
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
        text = json_module.dumps(as_json(plans), indent=2)
    else:
        text = as_text(plans, explained=options.explain, given=rest)
    say(text, exact=options.json)
    return 0 if plans.best else 1
