"""``isthmus data``: shows single samples of data files as a run reads them."""

from __future__ import annotations

import io
import json as json_text
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.options import ChatTemplate, Debug, Json, Trust, verb
from isthmus.cli.prepare import (
    ColumnNames,
    LossTurns,
    OverlongSamples,
    OverrideSystem,
    ReasoningParts,
    RecordKind,
    SeqLength,
    SplitTurns,
    System,
    TokenizerCode,
    TokenizerType,
    checked_words,
    parse_chat_settings,
    parse_columns,
)
from isthmus.errors import UsageError, escaped

if TYPE_CHECKING:
    from isthmus.recipes.data.shown_samples import ShownSample

app: typer.Typer = typer.Typer(
    help="Show samples of data files as a run reads them.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TOKENIZER_OPTIONS = ("tokenizer", "tokenizer_type", "trust_remote_code")
_RECORD_OPTIONS = (
    *("kind", "seq_length", "overlong", "loss_on", "chat_template", "system", "override_system", "reasoning"),
    *("split_turns", "columns"),
)
"""Parameters that prepared data has its own values for; a run folder also for those of the tokenizer."""


@app.callback()
def _data() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewOptions:
    context: typer.Context
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Data file or folder; prefix of prepared files; or run folder.")
    ]
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TOKENIZER", help="As of isthmus prepare; a run folder has its own."),
    ] = None
    number: Annotated[int, typer.Option("--n", "-n", min=1, metavar="N", help="How many records or samples.")] = 3
    index: Annotated[
        int, typer.Option(min=0, metavar="I", help="The first one, from 0; of a run, in the order of its steps.")
    ] = 0
    tokenizer_type: TokenizerType = None
    kind: RecordKind = None
    seq_length: SeqLength = None
    overlong: OverlongSamples = "truncate"
    loss_on: LossTurns = "assistant"
    chat_template: ChatTemplate = None
    system: System = None
    override_system: OverrideSystem = False
    reasoning: ReasoningParts = "keep"
    split_turns: SplitTurns = True
    columns: ColumnNames = None
    trust_remote_code: TokenizerCode = False
    trust: Trust = False
    debug: Debug = False
    json: Json = False


@app.command("view", short_help="Show single samples with their loss masks.")
@verb
def view(options: ViewOptions) -> int:
    """Show single samples as text, with the tokens that have loss in colour.

    Without colours they are in [[ ]]. Raw records are rendered and tokenized as isthmus prepare and runs do; options
    that change this are the same. A preference pair is two samples.
    """
    shown = checked_words(kind=options.kind, overlong=options.overlong, loss_on=options.loss_on)
    shown |= {
        "seq_length": options.seq_length,
        "columns": parse_columns(options.columns or []),
        "chat_template": options.chat_template,
    }
    shown["chat"] = parse_chat_settings(options.system, options.override_system, options.reasoning, options.split_turns)
    chosen = [name for name in (*_TOKENIZER_OPTIONS, *_RECORD_OPTIONS) if _is_on_command_line(options.context, name)]
    if (Path(options.file) / "config.yaml").is_file():
        _refuse(chosen, f"{options.file} is a run folder, which has its own settings and tokenizer")
        samples = _run_samples(Path(options.file), options.index, options.number)
    elif options.tokenizer is None:
        raise UsageError(f"{options.file} is not a run folder, and its text needs a tokenizer. Add --tokenizer DIR.")
    else:
        from isthmus.recipes.data.data_sources import find_source
        from isthmus.recipes.data.shown_samples import shown_files
        from isthmus.recipes.model.model_source import tokenizer_at

        source = find_source("train", options.file, "train", [options.file])
        if source.prepared:
            _refuse(
                [name for name in chosen if name in _RECORD_OPTIONS],
                f"{options.file} is prepared: its samples are tokens",
            )
        opened = tokenizer_at(options.tokenizer, options.tokenizer_type, trust_remote_code=options.trust_remote_code)
        samples = shown_files(source, opened, first=options.index, count=options.number, **shown)
    if options.json:
        print(json_text.dumps({"samples": [sample.as_dict() for sample in samples]}), flush=True)
    else:
        _print(samples)
    return 0


def _run_samples(folder: Path, first: int, count: int) -> Iterable[ShownSample]:
    from isthmus.recipes.data.recorded_data import open_recorded
    from isthmus.recipes.run_dir import RunDir

    return open_recorded(RunDir(folder)).samples(first, count)


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse(names: Iterable[str], why: str) -> None:
    if options := ", ".join(f"--{name.replace('_', '-')}" for name in names):
        raise UsageError(f"{options}: {why}. Omit it.")


def _print(samples: Iterable[ShownSample]) -> None:
    from rich.console import Console
    from rich.text import Text

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what an encoding lacks
    console = Console(highlight=False, soft_wrap=True)
    has_colours = console.is_terminal and not console.no_color and not os.environ.get("NO_COLOR")
    for number, sample in enumerate(samples):
        lines = Text("\n" if number else "").append(escaped(str(sample)), style="bold").append("\n")
        for part in sample.parts:
            text = escaped(part.text)
            lines.append(f"[[{text}]]" if part.has_loss and not has_colours else text, style=_style(part.has_loss))
        console.print(lines)


def _style(has_loss: bool) -> str:
    return "green" if has_loss else "dim"
