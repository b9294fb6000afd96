"""What a script of somebody else gets when bash runs it as a restricted shell: variables, files, time and memory."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from isthmus.errors import UnsafeInput
from isthmus.files.landlock import restrict, restricted_files

TIME_LIMIT_S = 10.0
PROCESSES = 64
"""At the same time."""
_LIMITS = {
    resource.RLIMIT_AS: 1 << 30,
    resource.RLIMIT_CPU: int(TIME_LIMIT_S),
    resource.RLIMIT_FSIZE: 16 << 20,
    resource.RLIMIT_CORE: 0,
}
"""Bytes of memory, seconds, bytes of a file, and no core file, for each process of a script."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache")
"""Programs and libraries of bash, sh and Python."""
_VARIABLES = frozenset(
    "HOME USER LOGNAME HOSTNAME LANG TZ LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX ROCM_PATH ROCM_HOME CUDA_HOME "
    "CUDA_PATH MEGATRON_PATH TENSORBOARD_LOGS_PATH TENSORBOARD_DIR VOCAB_FILE MERGE_FILE WORLD_SIZE RANK LOCAL_RANK "
    "LOCAL_WORLD_SIZE NUM_NODES NUM_GPUS GPUS GPUS_PER_NODE NPROC_PER_NODE SLURM_ UCX_ OMPI_".split()
)
"""Variables of launchers that a script gets from the environment; a name that ends in _ is a prefix."""
_EXCEEDED = re.compile(r"^.*(?:cannot allocate|MemoryError|file size limit).*$", re.MULTILINE | re.IGNORECASE)
_DENIED = re.compile(r"^.*: (?:.*: )?Permission denied$", re.MULTILINE)
_FILE_INPUT = re.compile(r"(?:\$\(|`|\bdone\b|\b(?:read|mapfile|readarray)\b[^;|&<\n]*)\s*<(?![<&(])")
_SECRET_NAME = re.compile(
    r"(TOKENS?|KEYS?|SECRETS?|PASSWORD|PASSWD|PASS|PWD|JWT|CREDENTIALS?|AUTH|AUTHORIZATION)(_|$)", re.IGNORECASE
)
_SECRET_URL = re.compile(r"://[^/@\s]+:[^/@\s]+@")


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable has a password, a token or the like."""
    return _SECRET_NAME.search(name) is not None or _SECRET_URL.search(value) is not None


def script_environment(script: Path, environment: Mapping[str, str], advice: str) -> dict[str, str]:
    """The usual variables of training scripts, without secrets; ``advice`` is the end of an error.

    Raises:
        UnsafeInput: the script reads another variable that is set.
    """
    passed = {name: value for name, value in environment.items() if _is_passed(name) and not is_secret(name, value)}
    text = re.sub(r"(?m)^\s*#.*$", "", script.read_text(encoding="utf-8", errors="replace"))
    read = {first or second for first, second in re.findall(r"\$(?:(\w+)|\{[#!]?(\w+))", text)}
    for name in sorted(read & environment.keys() - passed.keys() - {"PATH", "PYTHONPATH", "PWD"}):
        is_assigned = rf"(?m)(?:^|[\s;]){name}=(?!.*\b{name}\b)|\bfor\s+{name}\b|\bread\b.*\b{name}\b"
        if not re.search(is_assigned, text):
            raise UnsafeInput(
                f"{script} reads {name} from the environment, and only the usual variables of training scripts are "
                f"passed. Write its value into the script, or unset {name}. {advice}"
            )
    return passed


def restriction(script: Path, folder: Path, advice: str) -> Callable[[], None]:
    """A function that a new process calls: it sets the limits, and leaves it the files of the script's folder.

    ``folder`` has the stand-ins, and can be written. Hidden files are not read. A system without Landlock cannot hide
    files, so there the text of the script must not read one.

    Raises:
        UnsafeInput: it does, on such a system.
    """
    real = script.resolve()
    with os.scandir(real.parent) as entries:
        beside = [Path(entry) for entry in entries if not (entry.name.startswith(".") or entry.is_symlink())]
    python = (Path(sys.base_prefix), Path(sys.prefix, "pyvenv.cfg"), Path(sys.executable))
    readable = (real, *beside, *map(Path, _SYSTEM), *python)
    ruleset = restricted_files(readable, (folder, Path("/dev/null")))
    text = script.read_text(encoding="utf-8", errors="replace")
    if ruleset is None and (match := _FILE_INPUT.search(text)):
        raise UnsafeInput(
            f"{script}:{text.count(chr(10), 0, match.end()) + 1} reads a file, and this system has no Landlock that "
            f"limits which. {advice}"
        )

    def apply() -> None:
        for kind, limit in _LIMITS.items():
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            with suppress(*([] if sys.platform == "linux" else [ValueError])):  # macOS does not limit memory
                resource.setrlimit(kind, (limit, limit))
        if ruleset is not None:
            restrict(ruleset)

    return apply


def check_limits(script: Path, ended: str, output: str, advice: str) -> None:
    """Raise UnsafeInput if a restricted script exceeded a limit; ``ended`` and ``output`` tell how it ended."""
    if "was stopped" in ended or "exit code -" in ended:
        raise UnsafeInput(f"{script} {ended}: a script has {TIME_LIMIT_S:g} s and {PROCESSES} processes. {advice}")
    if exceeded := _EXCEEDED.search(output):
        raise UnsafeInput(
            f"{script} needs more than {_LIMITS[resource.RLIMIT_AS] >> 30} GiB of memory, the limit of a script: "
            f"{exceeded[0]}. {advice}"
        )
    if denied := _DENIED.search(output):
        raise UnsafeInput(
            f"{script} reads a file outside its folder, or a hidden one, which is not done: {denied[0]}. {advice}"
        )


@cache
def _usual_variables() -> frozenset[str]:
    """Variables of launchers and of ROCm's scripts."""
    from isthmus.config.dialects.rocm_scripts.script_run import TABLES  # imports all settings

    scripts = (TABLES[name]["variables"] for name in ("llama", "deepseek_v2", "sft"))
    return _VARIABLES.union(*(names.split() for names in (*scripts, TABLES["common"], TABLES["exported"])))


def _is_passed(name: str) -> bool:
    return any(name == known or (known.endswith("_") and name.startswith(known)) for known in _usual_variables())
