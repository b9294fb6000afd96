"""``isthmus chat``."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.options import CHAT_TEMPLATE, TRUST, TRUST_MODEL_CODE, DebugOptions, argument, option
from isthmus.cli.terminal import interruptible, note, say
from isthmus.errors import OutputExists, UsageError, counted

if TYPE_CHECKING:
    from isthmus.data.chat.prompt_records import Prompt
    from isthmus.hf.chat_session import ChatSession

_HELP = """/clear  begin a new conversation
/system TEXT  begin one with this system prompt; without TEXT, without one
/help  this list
/quit or /exit  leave, as Ctrl-D does; Ctrl-C ends an answer"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(DebugOptions):
    model: str = argument("MODEL", "Hugging Face folder, run folder, or id on the Hub.")
    system: str | None = option("TEXT", "System prompt; default: chat.system of the run.")
    chat_template: str | None = CHAT_TEMPLATE()
    max_new_tokens: int = option("N", "Longest answer, in tokens.", 512, min=1)
    temperature: float = option("X", "0: always the most probable token.", 0.0, min=0.0)
    top_p: float = option("X", "Sample from the most probable tokens.", 1.0, min=0.01, max=1.0)
    seed: int | None = option("N", "Seed of the sampling.")
    file: Path | None = option("FILE", "Answer the records of this file: prompt, or messages.")
    out: Path | None = option("FILE", "With --file: write the records with their answer.")
    trust_remote_code: bool = TRUST_MODEL_CODE()
    trust: bool = TRUST()


def chat(options: ChatOptions) -> int:
    """Talk to a model in the terminal: answers appear as they are computed, and Ctrl-C ends one.

    /help lists the commands, such as /clear and /system; /exit or Ctrl-D leaves. Lines of a pipe are turns, too. With
    --file and --out each record of a file is a conversation of its own. transformers computes the answers, on a GPU if
    there is one.
    """
    prompts = _prompts(options.file, options.out)
    from isthmus.config.load import load_recorded
    from isthmus.config.schema.model import ModelConfig
    from isthmus.hf.chat_session import ChatSession, Sampling
    from isthmus.platforms.detect import detect
    from isthmus.recipes.model.model_source import open_source
    from isthmus.recipes.run_dir import RunDir, exported_model

    run, path, system = RunDir(Path(options.model)), options.model, options.system
    if (exported := exported_model(run.root)) != run.root:
        path = str(exported)
        if system is None and run.config.is_file():
            system = load_recorded(run.config).chat.system
    with open_source(ModelConfig(path=path, trust_remote_code=options.trust_remote_code)) as folder:
        session = ChatSession(
            folder,
            Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed),
            template=options.chat_template,
            system=system,
            device=detect().device_type,
            trust_remote_code=options.trust_remote_code,
        )
    note(session.describe())
    if options.out is not None:
        _answer_file(session, prompts, options.out)
        return 0
    if sys.stdin.isatty():
        note("/help lists the commands")
    for line in _lines():
        if line in ("/exit", "/quit"):
            break
        if line.split(maxsplit=1)[:1] == ["/system"] or re.fullmatch("/[a-z]+", line):
            _command(session, line)
        elif line:
            with _interrupt_ends_answer(session):
                session.answer(line, lambda piece: say(piece, end="", exact=True))
            print()
    return 0


def _command(session: ChatSession, line: str) -> None:
    command, _, text = line.partition(" ")
    if command in ("/clear", "/reset"):
        session.reset()
    elif command == "/system":
        try:
            session.use_system(text.strip() or None)
        except UsageError as error:
            note(str(error))
    elif command == "/help":
        note(_HELP)
    else:
        note(f"{command} is not a command; /help lists them")


def _prompts(file: Path | None, out: Path | None) -> list[Prompt]:
    """The prompts of ``--file``; all records and ``--out`` are checked before the model is loaded."""
    if file is None or out is None:
        if file is not out:
            missing, present = ("--file", "--out") if file is None else ("--out", "--file")
            raise UsageError(f"{present} needs {missing}: chat MODEL --file prompts.jsonl --out answers.jsonl.")
        return []
    if out.exists():
        raise OutputExists(f"--out {out} exists already. Remove it, or name another file.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: its folder does not exist. Create it first.")
    from isthmus.data.chat.prompt_records import read_prompts

    return list(read_prompts(file))


def _answer_file(session: ChatSession, prompts: Sequence[Prompt], out: Path) -> None:
    """Write the records with their answers, in their order; complete or not at all."""
    from rich.console import Console
    from rich.progress import track

    from isthmus.data.chat.prompt_records import ANSWER
    from isthmus.files.atomic_write import atomic_file

    shown = track(prompts, "answers", console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with interruptible(), atomic_file(out) as temporary, temporary.open("w", encoding="utf-8") as answers:
        for prompt in shown:
            row = prompt.record | {ANSWER: session.answer_alone(prompt)}
            answers.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    note(f"{out}: {counted(len(prompts), 'answer')}")


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() then has history and editing
        with contextlib.suppress(EOFError):
            while True:
                yield input("> ").strip()
    else:
        yield from map(str.strip, sys.stdin)


@contextlib.contextmanager
def _interrupt_ends_answer(session: ChatSession) -> Iterator[None]:
    def stop(*_: Any) -> None:
        session.stop_requested = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
