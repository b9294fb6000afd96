"""``isthmus eval``."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from isthmus.cli.options import TRUST, ResultOptions, argument, flag, option
from isthmus.cli.terminal import say
from isthmus.cli.train_verbs import NPROC, start_ranks
from isthmus.errors import UsageError
from isthmus.files.atomic_write import write_atomic


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions(ResultOptions):
    model: str = argument("MODEL", "Hugging Face folder, run folder, checkpoint, or id on the Hub.")
    settings: list[str] | None = argument("KEY=VALUE", "Settings such as parallel.tp=2 or train.precision=bf16.", None)
    tasks: str = option("NAMES", "Tasks of lm_eval, groups or YAML files, with commas.", "")
    num_fewshot: int | None = option("N", "Examples before each question.", min=0)
    limit: float | None = option("N", "Questions of each task; below 1 a share.", min=0.0)
    include_path: list[Path] | None = option("DIR", "Folder with tasks of your own.")
    apply_chat_template: bool = flag("Ask as turns of a chat.")
    max_length: int | None = option("N", "Longest text in tokens; default: all positions.", min=2)
    batch_tokens: int = option("N", "Tokens of a packed sequence.", 8192, min=1)
    out: Path | None = option("FILE", "Also write the results as JSON.")
    nproc: int = NPROC()
    trust: bool = TRUST()


def evaluate(options: EvaluateOptions) -> int:
    """Run tasks of lm-evaluation-harness on the parallel model, in any layout; a checkpoint is not exported."""
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks is missing. Name tasks of lm_eval, such as --tasks hellaswag,arc_easy.")
    if options.limit == 0:
        raise UsageError("--limit 0 leaves no questions. Give a number above 0, or omit it.")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UsageError(f"--out {options.out}: its folder does not exist. Create it first.")
    if (code := start_ranks(options.nproc, debug=options.debug)) is not None:
        return code
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
    text = json.dumps(results, indent=2, default=str, ensure_ascii=False)
    say(text if options.json else tables, exact=options.json)
    if options.out is not None:
        write_atomic(options.out, text + "\n")
    return 0
