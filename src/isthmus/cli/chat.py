"""``isthmus chat``."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.options import ChatTemplate, Debug, Trust
from isthmus.cli.terminal import note, say

if TYPE_CHECKING:
    from isthmus.hf.chat_session import ChatSession


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder, run folder, or id on the Hub.")]
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System prompt; default: chat.system of the run.")
    ] = None
    chat_template: ChatTemplate = None
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Longest answer, in tokens.")
    ] = 512
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="X", help="0: always the most probable token.")
    ] = 0.0
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.01, max=1.0, metavar="X", help="Sample from the most probable tokens.")
    ] = 1.0
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of the sampling.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run modelling code of the model folder.")
    ] = False
    trust: Trust = False
    debug: Debug = False


def chat(options: ChatOptions) -> int:
    """Talk to a model in the terminal: answers appear as they are computed, and Ctrl-C ends one.

    /reset begins a new conversation, /exit or Ctrl-D leaves. Lines of a pipe or file are turns, too. transformers
    computes the answers, on a GPU if there is one.
    """
    from pathlib import Path

    from isthmus.config.load import load_config
    from isthmus.config.schema.model import ModelConfig
    from isthmus.hf.chat_session import ChatSession, Sampling
    from isthmus.platforms.detect import detect
    from isthmus.recipes.model.model_source import open_source
    from isthmus.recipes.run_dir import RunDir

    run = RunDir(Path(options.model))
    path = str(run.export()) if (run.export() / "config.json").is_file() else options.model
    system = options.system
    if system is None and path != options.model and run.config.is_file():
        system = load_config(None, run.config).chat.system
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
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            session.reset()
        elif line:
            with _interrupt_ends_answer(session):
                session.answer(line, lambda piece: say(piece, end="", exact=True))
            print()
    return 0


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
