"""``isthmus prepare``."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from json import dumps
from typing import TYPE_CHECKING, Any, Literal, get_args

from isthmus.cli.options import CHAT_TEMPLATE, TRUST, ResultOptions, argument, flag, option
from isthmus.cli.terminal import note, say, show
from isthmus.data.readers.data_names import describe_sources
from isthmus.errors import IsthmusError, UsageError, error_of

if TYPE_CHECKING:
    from isthmus.data.chat.conversation_settings import ChatSettings
    from isthmus.data.tokenize.stats import TokenizeStats
    from isthmus.recipes.data.prepare import PrepareResult
    from isthmus.recipes.data.prepare_slurm import ArrayJobs

_SETTING = re.compile(r"(?<![\w/.])(?:data|chat)\.([a-z_]+)(?:=(\w+))?")
_RENAMED = {"template": "chat_template"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions(ResultOptions):
    """How records are tokenized."""

    tokenizer_type: str | None = option("TYPE", "Megatron-LM's tokenizer type, such as Llama2Tokenizer.")
    kind: str | None = option("KIND", "text, chat, preference or unpaired; default: kind of the first record.")
    seq_length: int | None = option(
        "N", "Maximum tokens of a chat or an answer; default: no limit.", min=1, max=1 << 24
    )
    overlong: str = option("WHAT", "Longer samples: truncate, split (chats), drop, or error (stop).", "truncate")
    loss_on: str = option("WHAT", "Which turns of a chat have loss: assistant, last or all.", "assistant")
    chat_template: str | None = CHAT_TEMPLATE()
    system: str | None = option("TEXT", "System prompt of chats that have none.")
    override_system: bool = flag("Replace the system prompts of the chats with that of --system.")
    reasoning: str = option("WHAT", "Reasoning of answers: keep, last (only after the last user turn) or drop.", "keep")
    split_turns: bool = option(
        None, "A sample per answer if the template rewrites earlier turns; else one per chat.", True
    )
    columns: list[str] | None = option(
        "KEY=NAME",
        "Names of fields in the files, as data.columns: text=body or '{text: body}'; may be repeated.",
    )
    trust_remote_code: bool = flag("Let the tokenizer run code of its folder.")
    trust: bool = TRUST()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions(RecordOptions):
    data: list[str] = argument("DATA...", f"Data: {describe_sources()}.", show_default=False)
    out: str = argument("OUT", "Prefix of the output files, or its URL: OUT.bin, OUT.idx, OUT.json.")
    tokenizer: str = option("TOKENIZER", "Tokenizer or model folder; tokenizer.model; or an id on the Hub.", MISSING)
    on_error: str = option("WHAT", "What happens at a bad record: stop or skip.", "stop")
    filters: list[str] | None = option(
        "NAME",
        "Leave out texts: gopher-quality, gopher-repetition, fineweb-quality; may be repeated.",
        None,
        "--filter",
    )
    dedup: str | None = option("HOW", "Leave out texts that others repeat: exact or minhash (nearly).")
    workers: int | None = option("N", "Processes; default: one per core.", min=1, max=1024)
    engine: str = option(
        "ENGINE", "Who tokenizes: local (this machine), ray (a cluster), slurm-array (an array of jobs).", "local"
    )
    tasks: int | None = option("N", "Array tasks of --engine slurm-array.", min=1, max=100_000)
    part: str | None = option(
        "I/N",
        "Make every N-th part of the work from number I on, and no output; see --engine. left-out: list the texts that "
        "--filter and --dedup leave out of all parts.",
    )
    dry_run: bool = flag("Print the scripts of --engine slurm-array; submit nothing.")


def prepare(options: PrepareOptions) -> int:
    """Tokenize data once, into Megatron's indexed files, for any number of runs."""
    chosen = record_settings(options) | checked_words(dedup=options.dedup, on_error=options.on_error)
    part = _checked_engine(options)
    chosen["engine"], chosen["filters"] = options.engine, options.filters or []
    jobs = _array_jobs(options) if options.engine == "slurm-array" else None
    if jobs is not None and options.dry_run:
        say(jobs.as_text())
        return 0
    from isthmus.recipes.data.prepare import InputPart
    from isthmus.recipes.data.prepare import prepare as run

    with _ProgressLine() as line, _options_in_messages():
        result = run(
            options.data,
            options.out,
            options.tokenizer,
            tokenizer_type=options.tokenizer_type,
            workers=options.workers,
            trust_remote_code=options.trust_remote_code,
            on_progress=line.show,
            part=InputPart(*part) if isinstance(part, tuple) else part,
            **chosen,
        )
    if jobs is not None:
        *before, parts, merge = jobs.submit()
        text = f"{options.out}: submitted array job {parts} of {options.tasks} tasks, and job {merge}, which merges"
        if before:
            text += f"; before them, array job {before[0]} reads the texts, and job {before[1]} lists what is left out"
        ids = {"array_job": parts, "merge_job": merge, **({"cleaning_jobs": before} if before else {})}
        say(dumps(ids) if options.json else text)
        return 0
    _print(result, as_json=options.json)
    return 0


def _checked_engine(options: PrepareOptions) -> tuple[int, int] | Literal["left-out"] | None:
    """The part of ``--part``, if any; UsageError for options that exclude each other."""
    from isthmus.recipes.data.prepare_engines import EngineName

    _checked("--engine", options.engine, get_args(EngineName))
    if options.engine == "slurm-array" and options.tasks is None:
        raise UsageError("--engine slurm-array submits an array of jobs. Name their number, such as --tasks 16.")
    for name, is_set in (("--tasks", options.tasks is not None), ("--dry-run", options.dry_run)):
        if is_set and options.engine != "slurm-array":
            raise UsageError(f"{name} is for --engine slurm-array. Omit it, or name that engine.")
    if options.engine == "ray" and options.workers is not None:
        raise UsageError("--workers is for processes of one machine; --engine ray uses the cluster. Omit it.")
    if options.part is None:
        return None
    if options.engine != "local":
        raise UsageError(f"--part is a part of the work on this machine. Omit --engine {options.engine}.")
    if options.part == "left-out":
        return "left-out"
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.part)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"--part {options.part}: expected I/N with I from 0 to N - 1, such as 0/16, or left-out.")
    return int(match[1]), int(match[2])


def _array_jobs(options: PrepareOptions) -> ArrayJobs:
    from isthmus.recipes.data.prepare_slurm import array_jobs

    arguments: list[str] = []
    for item in fields(options):
        value = getattr(options, item.name)
        if item.name in ("engine", "filters", "tasks", "part", "dry_run", "workers", "json", "data", "out"):
            continue
        name = f"--{item.name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments += [] if value == item.default else [name if value else f"--no-{name.removeprefix('--')}"]
        elif value != item.default:
            for word in value if isinstance(value, list) else [value]:
                arguments += [name, str(word)]
    for name in options.filters or []:
        arguments += ["--filter", name]
    assert options.tasks is not None
    words, cleans = [*options.data, str(options.out), *arguments], bool(options.filters or options.dedup)
    return array_jobs(words, str(options.out), tasks=options.tasks, workers=options.workers, cleans=cleans)


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


def record_settings(options: RecordOptions) -> dict[str, Any]:
    """Settings of the tokenization, by name; UsageError if one is not known."""
    return checked_words(kind=options.kind, overlong=options.overlong, loss_on=options.loss_on) | {
        "seq_length": options.seq_length,
        "columns": parse_columns(options.columns or []),
        "chat_template": options.chat_template,
        "chat": _chat_settings(options),
    }


def checked_words(**words: str | None) -> dict[str, Any]:
    from isthmus.data.chat.chat_records import Kind
    from isthmus.data.chat.chat_text import LossOn
    from isthmus.data.readers.chunks import OnError
    from isthmus.data.tokenize.stats import Overlong
    from isthmus.recipes.data.clean_documents import Dedup

    known: dict[str, Any] = {"kind": Kind, "dedup": Dedup, "overlong": Overlong, "loss_on": LossOn, "on_error": OnError}
    for name, value in words.items():
        if value is not None:
            _checked(f"--{name.replace('_', '-')}", value, get_args(known[name]))
    return dict(words)


def _chat_settings(options: RecordOptions) -> ChatSettings:
    from isthmus.data.chat.conversation_settings import ChatSettings, Reasoning

    if options.override_system and options.system is None:
        raise UsageError("--override-system replaces system prompts with that of --system. Give --system, too.")
    reasoning = _checked("--reasoning", options.reasoning, get_args(Reasoning))
    return ChatSettings(options.system, options.override_system, reasoning, options.split_turns)


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
