"""``isthmus eval``."""

from __future__ import annotations

import json as json_module
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.options import Debug, Json, Trust
from isthmus.cli.terminal import say
from isthmus.cli.train_verbs import Nproc, run_ranks
from isthmus.errors import UsageError
from isthmus.files.atomic_write import write_atomic

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hugging Face folder, run folder, checkpoint, or id on the Hub.")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings such as parallel.tp=2 or train.precision=bf16."),
]
Tasks = Annotated[
    str, typer.Option("--tasks", metavar="NAMES", help="Tasks of lm_eval, groups or YAML files, with commas.")
]
NumFewshot = Annotated[
    int | None, typer.Option("--num-fewshot", min=0, metavar="N", help="Examples before each question.")
]
Limit = Annotated[
    float | None, typer.Option("--limit", min=0.0, metavar="N", help="Questions of each task; below 1 a share.")
]
IncludePath = Annotated[
    list[Path] | None, typer.Option("--include-path", metavar="DIR", help="Folder with tasks of your own.")
]
ApplyChatTemplate = Annotated[bool, typer.Option("--apply-chat-template", help="Ask as turns of a chat.")]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", min=2, metavar="N", help="Longest text in tokens; default: all positions."),
]
BatchTokens = Annotated[int, typer.Option("--batch-tokens", min=1, metavar="N", help="Tokens of a packed sequence.")]
ResultFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the results as JSON.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions:
    model: Model
    settings: Settings = None
    tasks: Tasks = ""
    num_fewshot: NumFewshot = None
    limit: Limit = None
    include_path: IncludePath = None
    apply_chat_template: ApplyChatTemplate = False
    max_length: MaxLength = None
    batch_tokens: BatchTokens = 8192
    out: ResultFile = None
    nproc: Nproc = 1
    trust: Trust = False
    debug: Debug = False
    json: Json = False


def evaluate(options: EvaluateOptions) -> int:
    """Run tasks of lm-evaluation-harness on the parallel model, in any layout; a checkpoint is not exported."""
    from isthmus.cli import process
    from isthmus.platforms.rank_env import is_one_of_several_ranks, rank

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks is missing. Name tasks of lm_eval, such as --tasks hellaswag,arc_easy.")
    if options.limit == 0:
        raise UsageError("--limit 0 leaves no questions. Give a number above 0, or omit it.")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UsageError(f"--out {options.out}: its folder does not exist. Create it first.")
    joined = is_one_of_several_ranks()
    if not joined and options.nproc > 1:
        return run_ranks(options.nproc, debug=options.debug)
    if joined and not process.started_by_isthmus and options.nproc > 1:
        raise UsageError(
            f"--nproc {options.nproc} starts ranks, but this process is one already (rank {rank()}). Omit --nproc."
        )
    if not options.debug:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from isthmus.tools.evaluate.run_tasks import evaluate_tasks
    from isthmus.tools.evaluate.task_settings import TaskSettings

    evaluation = evaluate_tasks(
        TaskSettings(
            model=options.model,
            tasks=names,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            include_path=options.include_path or (),
            apply_chat_template=options.apply_chat_template,
            max_length=options.max_length,
            batch_tokens=options.batch_tokens,
        ),
        options.settings or [],
    )
    if evaluation is None:
        return 0
    results, tables = evaluation
    text = json_module.dumps(results, indent=2, default=str, ensure_ascii=False)
    say(text if options.json else tables, exact=options.json)
    if options.out is not None:
        write_atomic(options.out, text + "\n")
    return 0
