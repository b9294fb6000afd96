"""``isthmus completion``: shell completion of verbs, options, settings, presets and config files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isthmus.cli.options import argument

VARIABLE = "_ISTHMUS_COMPLETE"
"""Environment variable in which the shell asks for completions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOptions:
    shell: Literal["bash", "zsh", "fish"] = argument("SHELL", "bash, zsh or fish.")


def completion(options: CompletionOptions) -> int:
    """Print the script that completes verbs, options and settings in a shell."""
    from typer.completion import get_completion_script

    script = get_completion_script(prog_name="isthmus", complete_var=VARIABLE, shell=options.shell)
    if options.shell == "bash":  # the value of a setting follows without a space
        nospace = "[[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace"
        script = script.replace("    return 0", f"    {nospace}\n    return 0")
    print(script)
    return 0


def prepare_completion() -> None:
    """Make the command answer a shell that asks for completions."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init

        completion_init()


def complete_word(incomplete: str) -> list[str]:
    """Settings, presets and config files that begin with ``incomplete``."""
    return sorted({*_settings(incomplete), *_presets(incomplete), *_files(incomplete)})


def _settings(start: str) -> Iterator[str]:
    from isthmus.config.setting_errors import dotted, settings

    return (f"{name}=" for name in map(dotted, settings()) if name.startswith(start))


def _presets(start: str) -> Iterator[str]:
    from isthmus.config.presets import PREFIX, preset_names

    return (f"{PREFIX}{name}" for name in preset_names() if start and f"{PREFIX}{name}".startswith(start))


def _files(start: str) -> Iterator[str]:
    folder, _, name = start.rpartition("/")
    path = Path(folder or ("/" if start.startswith("/") else "."))
    for file in path.iterdir() if path.is_dir() else ():
        if file.name.startswith(name) and (file.suffix in (".yaml", ".yml") or (name and file.is_dir())):
            yield f"{folder}/{file.name}" if "/" in start else file.name
