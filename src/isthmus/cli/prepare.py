"""``isthmus prepare``."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from isthmus.cli.options import ChatTemplate, Debug, Json, Trust, Workers
from isthmus.cli.terminal import note, say, show
from isthmus.data.readers.data_names import describe_sources
from isthmus.errors import IsthmusError, UsageError, error_of

if TYPE_CHECKING:
    from isthmus.data.chat.conversation_settings import ChatSettings
    from isthmus.data.tokenize.stats import TokenizeStats
    from isthmus.recipes.data.prepare import PrepareResult

TokenizerType = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Megatron-LM's tokenizer type, such as Llama2Tokenizer.")
]
RecordKind = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="text, chat, preference or unpaired; default: kind of the first record."),
]
SeqLength = Annotated[
    int | None,
    typer.Option(min=1, max=1 << 24, metavar="N", help="Maximum tokens of a chat or an answer; default: no limit."),
]
OverlongSamples = Annotated[
    str, typer.Option(metavar="WHAT", help="Longer samples: truncate, split (chats), drop, or error (stop).")
]
LossTurns = Annotated[
    str, typer.Option(metavar="WHAT", help="Which turns of a chat have loss: assistant, last or all.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt of chats that have none.")]
OverrideSystem = Annotated[
    bool, typer.Option("--override-system", help="Replace the system prompts of the chats with that of --system.")
]
ReasoningParts = Annotated[
    str,
    typer.Option(metavar="WHAT", help="Reasoning of answers: keep, last (only after the last user turn) or drop."),
]
SplitTurns = Annotated[
    bool, typer.Option(help="A sample per answer if the template rewrites earlier turns; else one per chat.")
]
ColumnNames = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        metavar="KEY=NAME",
        help="Names of fields in the files, as data.columns: text=body or '{text: body}'; may be repeated.",
    ),
]
_SETTING = re.compile(r"(?<![\w/.])(?:data|chat)\.([a-z_]+)(?:=(\w+))?")
_RENAMED = {"template": "chat_template"}
TokenizerCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let the tokenizer run code of its folder.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    data: Annotated[
        list[str], typer.Argument(metavar="DATA...", help=f"Data: {describe_sources()}.", show_default=False)
    ]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Prefix of the output files: OUT.bin, OUT.idx, OUT.json.")]
    tokenizer: Annotated[
        str, typer.Option(metavar="TOKENIZER", help="Tokenizer or model folder; tokenizer.model; or an id on the Hub.")
    ]
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
    on_error: Annotated[str, typer.Option(metavar="WHAT", help="What happens at a bad record: stop or skip.")] = "stop"
    columns: ColumnNames = None
    workers: Workers = None
    trust_remote_code: TokenizerCode = False
    trust: Trust = False
    debug: Debug = False
    json: Json = False


def prepare(options: PrepareOptions) -> int:
    """Tokenize data once, into Megatron's indexed files, for any number of runs."""
    chosen = checked_words(
        kind=options.kind, overlong=options.overlong, loss_on=options.loss_on, on_error=options.on_error
    )
    chosen["columns"] = parse_columns(options.columns or [])
    chosen["chat"] = parse_chat_settings(
        options.system, options.override_system, options.reasoning, options.split_turns
    )
    from isthmus.recipes.data.prepare import prepare as run

    with _ProgressLine() as line, _options_in_messages():
        result = run(
            options.data,
            options.out,
            options.tokenizer,
            tokenizer_type=options.tokenizer_type,
            seq_length=options.seq_length,
            workers=options.workers,
            chat_template=options.chat_template,
            trust_remote_code=options.trust_remote_code,
            on_progress=line.show,
            **chosen,
        )
    _print(result, as_json=options.json)
    return 0


def _print(result: PrepareResult, *, as_json: bool) -> None:
    if as_json:
        show(result, as_json=True)
        return
    from isthmus.data.tokenize.record_kinds import RECORD_KINDS

    stats = result.stats
    summary = stats.summary(RECORD_KINDS[result.kind])
    for line in [f"{result.out}: {result.kind}, {summary}, {result.time_s:.1f} s", *stats.notes]:
        say(_with_options(line))
    for reason in stats.skipped.reasons:
        note(f"skipped: {_with_options(reason)}")


@contextmanager
def _options_in_messages() -> Iterator[None]:
    """Errors name the options of this command in place of the settings of a run."""
    try:
        yield
    except IsthmusError as error:
        raise error_of(error.exit_code, _with_options(str(error))) from error


def _with_options(text: str) -> str:
    """``data.on_error=skip`` becomes ``--on-error skip``."""

    def option(setting: re.Match[str]) -> str:
        name = _RENAMED.get(setting[1], setting[1])
        if name not in PrepareOptions.__dataclass_fields__:
            return setting[0]
        words = name.replace("_", "-")
        if setting[2] in ("true", "false"):
            return f"--{words}" if setting[2] == "true" else f"--no-{words}"
        return f"--{words} {setting[2]}" if setting[2] else f"--{words}"

    return _SETTING.sub(option, text)


def checked_words(**words: str | None) -> dict[str, Any]:
    from isthmus.data.chat.chat_records import Kind
    from isthmus.data.chat.chat_text import LossOn
    from isthmus.data.readers.chunks import OnError
    from isthmus.data.tokenize.stats import Overlong

    known: dict[str, Any] = {"kind": Kind, "overlong": Overlong, "loss_on": LossOn, "on_error": OnError}
    for name, value in words.items():
        if value is not None:
            _checked(f"--{name.replace('_', '-')}", value, get_args(known[name]))
    return dict(words)


def parse_chat_settings(system: str | None, override_system: bool, reasoning: str, split_turns: bool) -> ChatSettings:
    from isthmus.data.chat.conversation_settings import ChatSettings, Reasoning

    if override_system and system is None:
        raise UsageError("--override-system replaces system prompts with that of --system. Give --system, too.")
    return ChatSettings(system, override_system, _checked("--reasoning", reasoning, get_args(Reasoning)), split_turns)


def _checked(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise UsageError(f"{option} {value} is not known. Use {', '.join(known)}.")
    return value


def parse_columns(words: list[str]) -> dict[str, str]:
    """The fields of ``--columns``, in the forms that ``data.columns`` has: ``text=body`` and ``{text: body}``."""
    from isthmus.config.schema.data import columns_of
    from isthmus.config.yaml_text import Syntax, read_value

    columns: dict[str, str] = {}
    for word in words:
        value: Any = word.removeprefix("data.columns=")
        with suppress(Syntax):
            value = read_value(value)
        value = columns_of(value)
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in (*value, *value.values())):
            raise UsageError(f"--columns {word}: expected KEY=NAME, such as text=body, or '{{text: body}}'.")
        if value.keys() & columns.keys():
            raise UsageError(f"--columns {' '.join(words)}: a key is repeated. Name each once.")
        columns |= value
    return columns


class _ProgressLine:
    """Token and sample counts on a terminal's stderr.

    It starts with the first counts: workers are forked before, which is safe only in a process without threads.
    """

    def __init__(self) -> None:
        self._status: Any = None
        self._start_s = time.monotonic()

    def show(self, stats: TokenizeStats) -> None:
        if not sys.stderr.isatty():
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("preparing")
            self._status.start()
        rate = stats.tokens / max(time.monotonic() - self._start_s, 1e-3)
        self._status.update(f"preparing  {stats.records:,} records  {stats.tokens:,} tokens  {rate:,.0f} tokens/s")

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
