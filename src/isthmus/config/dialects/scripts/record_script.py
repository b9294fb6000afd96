"""Runs a shell script with stand-ins for python, torchrun and srun, and returns the training command it would start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.config.dialects.scripts import restricted_script, stand_in
from isthmus.errors import IOFailure, MissingInput, UsageError

SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
TIME_LIMIT_S = 60.0
_BACKGROUND_S = 5.0
"""How long background commands may run after the script ends."""
_LOOK_S = 0.1
_OUTPUT_LINES = 20
_HOOK = """\
if [ -n "$ISTHMUS_USER_BASH_ENV" ]; then . "$ISTHMUS_USER_BASH_ENV"; fi
set -o functrace
trap 'printf "%s:%s: %s" "${BASH_SOURCE-}" "$LINENO" "$BASH_COMMAND" >| "$ISTHMUS_STAND_INS/last"
case $PATH in "$ISTHMUS_STAND_INS":*) ;; *) PATH=$ISTHMUS_STAND_INS:$PATH; hash -r ;; esac
case ${PYTHONPATH-} in
"$ISTHMUS_STAND_INS"/site*) ;;
*) export PYTHONPATH=$ISTHMUS_STAND_INS/site${PYTHONPATH:+:$PYTHONPATH} ;;
esac' DEBUG
"""
"""Records the last command; puts the stand-ins first again after the script activates an environment or sets PATH."""
_SAFE_HOOK = "enable -n kill ulimit umask\n"
"""The builtins with effects outside the script that a restricted bash still has."""
_DISCARDED = re.compile(r"^(.*): line (\d+): /dev/null: restricted.*$", re.MULTILINE)
"""Messages about a command that was not run because its output is thrown away."""
_CONDITION = re.compile(r"\|\||^\s*(?:if|elif)\b")
"""Matches a line that handles the failure of a command."""
_REFUSED = re.compile(
    r"^(?:.*: line \d+: .*(?:restricted|command not found|readonly variable)|(?:python3?|date): command not found).*$",
    re.MULTILINE,
)
"""Messages about a command that the restricted bash, or a stand-in in it, did not run."""
_COMMENT = re.compile(r"""('[^']*'|"(?:[^"\\]|\\.)*"|\\.)|(?<!\S)#[^\n]*""", re.DOTALL)
"""A comment of a shell, or text in quotes (the group), which may contain #."""
_SHELL_VARIABLES = ("_", "SHLVL", "PWD", "OLDPWD", "PATH", "PYTHONPATH", "BASH_ENV", "LINES", "COLUMNS")
_PROGRAM_PREFIXES = ("BASH_FUNC", "PYENV_", "_PYENV_")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptKind:
    """The training that a script of a program starts."""

    is_training: Callable[[Sequence[str]], bool]
    """Whether the words of a command start it."""
    command: str
    """How its command looks, for an error."""
    mark: str
    """What only a training has."""
    advice: str
    """What to do with a script that cannot be run with restrictions; ``{script}`` is its path."""


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that the script sets; secrets are hidden."""
    not_run: tuple[str, ...]
    """Other commands of the script that may train, and were not run."""


def without_comments(text: str) -> str:
    """Text in shell syntax without comments, and with lines that a backslash continues joined."""
    return _COMMENT.sub(lambda match: match[1] or "", text).replace("\\\n", " ")


def record_script(
    script: Path,
    arguments: Sequence[str],
    kind: ScriptKind,
    *,
    restricted: bool = False,
    time_limit_s: float | None = None,
) -> RecordedCommand:
    """Run a script with bash in the current folder and return the training command that it would start.

    Stand-ins for Python, torchrun, srun and other launchers come first on PATH. They record a training run and start
    nothing. Python runs as usual with ``-c``, with ``-m`` (except launchers) and for scripts whose name has no
    ``train`` or ``finetune``. All other commands run, unless ``restricted``: then bash is a restricted shell that finds
    the stand-ins only, so the script can set variables, branch and loop, within the limits of ``restricted_script``.
    Standard input is closed.

    Raises:
        UsageError: not exactly one training run was started, or the restricted shell refused a command.
        UnsafeInput: a restricted script exceeded a limit, or reads a file or a variable that it does not get.
    """
    if not script.is_file():
        raise MissingInput(f"{script}: there is no such file. Check the path.")
    advice = kind.advice.format(script=script)
    if (bash := shutil.which("bash", path="/usr/bin:/bin") or shutil.which("bash")) is None:
        raise MissingInput(f"a script needs bash, and there is none on PATH. {advice}")
    with tempfile.TemporaryDirectory(prefix="isthmus-") as temporary:
        folder = Path(temporary).resolve()
        variables = restricted_script.script_environment(script, os.environ, advice) if restricted else os.environ
        environment = _stand_ins(folder, variables, restricted=restricted)
        command = [bash, *(["--restricted"] if restricted else []), str(script), *arguments]
        before = restricted_script.restriction(script, folder, advice) if restricted else None
        limit_s = time_limit_s or (restricted_script.TIME_LIMIT_S if restricted else TIME_LIMIT_S)
        processes = restricted_script.PROCESSES if restricted else None
        try:
            ended, output = _run(command, environment, limit_s, processes, before)
        except OSError as error:
            raise IOFailure(f"{script} cannot be run: {error.strerror}.") from error
        recorded = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
        last = folder / "last"
        if last.is_file():
            ended += f" after {_shortened(' '.join(last.read_text(encoding='utf-8', errors='replace').split()))}"
    if restricted:
        restricted_script.check_limits(script, ended, output, advice)
    discarded: tuple[str, ...] = ()
    if restricted:
        output, discarded = _without_discarded(script, output)
    if restricted and (refused := _REFUSED.search(output)):
        raise UsageError(
            f"{script} does more than set variables and start one training, and only this is done:\n  {refused[0]}\n"
            f"{advice}"
        )
    recorded_command = _training_command(script, kind, recorded, environment, ended, output)
    return replace(recorded_command, not_run=(*recorded_command.not_run, *discarded))


def _without_discarded(script: Path, output: str) -> tuple[str, tuple[str, ...]]:
    """The output of a restricted script, and lines with commands that were not run, whose failure the script handles.

    A restricted bash does not run ``command 2>/dev/null``. What such a command would print is not known either.
    """
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    numbers: dict[int, None] = {}
    for match in _DISCARDED.finditer(output):
        number = int(match[2])
        if match[1] == str(script) and number <= len(lines) and _CONDITION.search(lines[number - 1]):
            output = output.replace(match[0], "", 1)
            numbers[number] = None
    return output, tuple(f"line {number}: {lines[number - 1].strip()}" for number in numbers)


def _stand_ins(folder: Path, variables: Mapping[str, str], *, restricted: bool) -> dict[str, str]:
    """Write the stand-ins into ``folder``; returns ``variables`` with those by which they, or only they, are found."""
    source = Path(stand_in.__file__)
    (folder / "site").mkdir()
    program = Path(shutil.copyfile(source, folder / "site" / "sitecustomize.py"))
    names = {*stand_in.PYTHONS, *stand_in.LAUNCHERS, *stand_in.REMOTE}
    for name in (names | {*stand_in.HARMLESS}) - {*stand_in.SHELL_LAUNCHERS} if restricted else names:
        words = shlex.join([sys.executable, "-I", str(program), name])
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o700)
    (folder / "hook.sh").write_text(_SAFE_HOOK if restricted else _HOOK, encoding="utf-8")
    path, python_path = os.environ.get("PATH", os.defpath), variables.get("PYTHONPATH")
    forced = {"LC_ALL": "C", "TMPDIR": str(folder)} if restricted else {}  # the language of messages; here-documents
    return {
        **variables,
        **forced,
        "PATH": os.pathsep.join([str(folder), str(folder / "none") if restricted else path]),
        "PYTHONPATH": os.pathsep.join([str(program.parent), *([python_path] if python_path else [])]),
        "BASH_ENV": str(folder / "hook.sh"),
        "ISTHMUS_USER_BASH_ENV": variables.get("BASH_ENV", ""),
        stand_in.STAND_INS: str(folder),
    }


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    time_limit_s: float,
    processes: int | None,
    before: Callable[[], None] | None,
) -> tuple[str, str]:
    """The exit status, as the end of a sentence, and the output. All processes of the command are killed at the end."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=before,
        )
        try:
            ended = _wait(process, time_limit_s, processes)
        finally:
            with suppress(ProcessLookupError):  # the group includes background processes
                until = time.monotonic() + (_BACKGROUND_S if process.returncode is not None else 0.0)
                while time.monotonic() < until and not _has_more(process.pid, processes):
                    os.killpg(process.pid, 0)
                    time.sleep(0.02)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return ended, log.read().decode("utf-8", "replace")


def _wait(process: subprocess.Popen[bytes], time_limit_s: float, processes: int | None) -> str:
    until = time.monotonic() + time_limit_s
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            return f"ended with exit code {process.wait(min(_LOOK_S, time_limit_s))}"
        if _has_more(process.pid, processes):
            return f"was stopped at {processes} processes"
    return f"was stopped after {time_limit_s:g} s"


def _has_more(group: int, processes: int | None) -> bool:
    """Whether a process group has more than ``processes``; None: any number."""
    if processes is None:
        return False
    import psutil

    count = 0
    for number in psutil.pids():
        with suppress(OSError):
            count += os.getpgid(number) == group
    return count > processes


def _training_command(
    script: Path,
    kind: ScriptKind,
    recorded: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    ended: str,
    output: str,
) -> RecordedCommand:
    """The only recorded training."""
    trainings = [command for command in recorded if kind.is_training(command["words"])]
    others = tuple(_short(command["words"]) for command in recorded if command not in trainings)
    if len(trainings) == 1:
        exported = _exported(trainings[0]["environment"], environment)
        return RecordedCommand(tuple(trainings[0]["words"]), exported, others)
    commands = [_short(command["words"]) for command in trainings] or others
    shown = "\n  ".join(["", *commands])
    if lines := output.strip().splitlines()[-_OUTPUT_LINES:]:
        shown += "\n  ".join(["\nits output:", *lines])
    if trainings:
        what = f"{script} starts {len(trainings)} training runs. {kind.advice.format(script=script)}"
    elif recorded:
        what = f"{script} starts no training run with {kind.mark}, only:"
    else:
        what = f"{script} started no training run ({kind.command}). It {ended}"
    raise UsageError(what + shown)


def _short(words: Sequence[str]) -> str:
    return _shortened(shlex.join(words))


def _shortened(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


def _exported(recorded: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Variables that the script sets for the training run; secrets are hidden."""
    changed = {
        name: value
        for name, value in recorded.items()
        if before.get(name) != value and name not in _SHELL_VARIABLES and not name.startswith(_PROGRAM_PREFIXES)
    }
    return {name: "..." if restricted_script.is_secret(name, value) else value for name, value in changed.items()}
