"""``isthmus data``: shows single samples of data files as a run reads them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from isthmus.cli.options import argument, group, option, verb
from isthmus.cli.prepare import RecordOptions, record_settings
from isthmus.cli.terminal import show
from isthmus.errors import UsageError, escaped

if TYPE_CHECKING:
    from isthmus.recipes.data.shown_samples import ShownSample

app: typer.Typer = group("Show samples of data files as a run reads them.")
_TOKENIZER_OPTIONS = ("tokenizer", "tokenizer_type", "trust_remote_code")


@app.callback()
def _data() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewOptions(RecordOptions):
    context: typer.Context
    file: str = argument("FILE", "Data file or folder; prefix of prepared files; or run folder.")
    tokenizer: str | None = option("TOKENIZER", "As of isthmus prepare; a run folder has its own.")
    number: int = option("N", "How many records or samples.", 3, "--n", "-n", min=1)
    index: int = option("I", "The first one, from 0; of a run, in the order of its steps.", 0, min=0)


@app.command("view", short_help="Show single samples with their loss masks.")
@verb
def view(options: ViewOptions) -> int:
    """Show single samples as text, with the tokens that have loss in colour.

    Without colours they are in [[ ]]. Raw records are rendered and tokenized as isthmus prepare and runs do; options
    that change this are the same. A preference pair is two samples.
    """
    settings = record_settings(options)
    record_options = [item.name for item in fields(RecordOptions) if item.name not in ("trust", "debug", "json")]
    chosen = [
        name
        for name in dict.fromkeys([*_TOKENIZER_OPTIONS, *record_options])
        if _is_on_command_line(options.context, name)
    ]
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
                [name for name in chosen if name not in _TOKENIZER_OPTIONS],
                f"{options.file} is prepared: its samples are tokens",
            )
        opened = tokenizer_at(options.tokenizer, options.tokenizer_type, trust_remote_code=options.trust_remote_code)
        samples = shown_files(source, opened, first=options.index, count=options.number, **settings)
    if options.json:
        show({"samples": [sample.as_dict() for sample in samples]}, as_json=True)
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
            style = "green" if part.has_loss else "dim"
            lines.append(f"[[{text}]]" if part.has_loss and not has_colours else text, style=style)
        console.print(lines)
