"""``isthmus prepare``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from isthmus.cli.options import Debug, Json
from isthmus.cli.terminal import show
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.data.tokenize.stats import TokenizeStats


def prepare(
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA...", help="Files, folders, patterns, or hf:ORG/NAME:SPLIT.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Prefix of the files to make: OUT.bin, OUT.idx, OUT.json.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="TOKENIZER", help="Folder, such as a model's; tokenizer.model; or an id on the Hub.")
    ],
    tokenizer_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Megatron-LM's name for its kind, such as Llama2Tokenizer.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="text, chat or preference; default: what the first record is.")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most tokens of a chat or an answer; default: any number.")
    ] = None,
    overlong: Annotated[
        str, typer.Option(metavar="WHAT", help="truncate or drop: what becomes of a longer one.")
    ] = "truncate",
    loss_on: Annotated[
        str, typer.Option(metavar="WHAT", help="assistant, last or all: which turns of a chat are learned.")
    ] = "assistant",
    on_error: Annotated[str, typer.Option(metavar="WHAT", help="stop or skip: what happens at a bad record.")] = "stop",
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=NAME", help="What a field is called in the files, as text=body; may be repeated."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes; default: one a core.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the tokenizer run code of its folder.")
    ] = False,
    debug: Debug = False,
    json: Json = False,
) -> int:
    """Tokenize data once, into Megatron's indexed files, for any number of runs."""
    from isthmus.data.chat.chat_records import Kind
    from isthmus.data.chat.chat_text import LossOn
    from isthmus.data.readers.chunks import OnError
    from isthmus.data.tokenize.stats import Overlong

    pairs = [word.partition("=") for word in columns or []]
    if wrong := [f"{key}{equals}{name}" for key, equals, name in pairs if not (key and name)]:
        raise UsageError(f"--columns {wrong[0]}: wanted KEY=NAME, as in text=body.")
    if len(keys := [key for key, _, _ in pairs]) > len(set(keys)):
        raise UsageError(f"--columns {' '.join(columns or [])}: a key is there twice. Name each once.")
    chosen: dict[str, Any] = {
        "kind": None if kind is None else _one_of("--kind", kind, get_args(Kind)),
        "overlong": _one_of("--overlong", overlong, get_args(Overlong)),
        "loss_on": _one_of("--loss-on", loss_on, get_args(LossOn)),
        "on_error": _one_of("--on-error", on_error, get_args(OnError)),
    }
    from isthmus.recipes.data.prepare import prepare as run

    with _Line() as line:
        done = run(
            data, out, tokenizer, tokenizer_type=tokenizer_type, seq_length=seq_length, workers=workers,
            trust_remote_code=trust_remote_code, columns={key: name for key, _, name in pairs},
            progress=line.show, **chosen,
        )  # fmt: skip
    if json:
        show(done, as_json=True)
        return 0
    for told in [f"{done.out}: {done.kind}, {done.report.line()}, {done.time_s:.1f} s", *done.notes]:
        print(told, flush=True)
    for reason in done.report.skipped.reasons:
        print(f"skipped: {reason}", file=sys.stderr, flush=True)
    return 0


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"{option} {value} is not known. Use {', '.join(known)}.")
    return value


class _Line:
    """What is done so far, on a terminal's stderr; nothing elsewhere.

    It begins with the first news: until then processes are started, which is faster from a process without threads.
    """

    def __init__(self) -> None:
        self._status: Any = None
        self._start_s = time.monotonic()

    def show(self, report: TokenizeStats) -> None:
        """Write the counts over those before."""
        if not sys.stderr.isatty():
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("preparing")
            self._status.start()
        rate = report.tokens / max(time.monotonic() - self._start_s, 1e-3)
        self._status.update(f"preparing  {report.records:,} records  {report.tokens:,} tokens  {rate:,.0f} tokens/s")

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
