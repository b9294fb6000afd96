"""Replaces python, torchrun, srun and others while a script of another program runs: records, starts nothing.

The file is copied next to the stand-ins and runs with any Python 3, so it imports only the standard library. It is
also their ``sitecustomize``: an interpreter that a script calls by its full path does not train either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence

STAND_INS = "ISTHMUS_STAND_INS"
"""Environment variable: the folder of the stand-ins, which is first on PATH."""
PYTHONS = ("python", "python3")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "sbatch", "salloc", "mpirun", "mpiexec", "ray", "uv")
"""Programs that start other programs."""
SHELL_LAUNCHERS = ("srun", "sbatch")
"""Their stand-ins run a shell script in this process."""
REMOTE = ("ssh", "pdsh", "docker", "podman", "singularity", "apptainer", "kubectl", "wget", "curl", "hf")
"""Programs that start others elsewhere or download; they are not run."""
HARMLESS = ("date", "mkdir", "tee")
"""Programs that a restricted script may call: ``date +FORMAT``, and two of which only the output matters."""
TRAINING_FLAGS = ("--num-layers", "--micro-batch-size", "--lr")
"""Every Megatron-LM training command has one of these arguments; data preparation has none."""
_SCRIPT = re.compile(r"(pretrain|train|finetune)\w*\.py")
_VERL = re.compile(r"(verl|recipe)(\.\w+)+|(.*/)?main_ppo\w*\.py")
_MODULES = ("torch.distributed", "accelerate.commands", "deepspeed.launcher")


def has_training_flag(words: Sequence[str]) -> bool:
    return any(word.split("=")[0] in TRAINING_FLAGS for word in words)


def verl_program(words: Sequence[str]) -> int | None:
    """The place of the module or file in a command of verl; None in another command."""
    return next((place for place, word in enumerate(words) if _VERL.fullmatch(word)), None)


def may_train(words: Sequence[str]) -> bool:
    """Whether a command may train or start ranks; then it is recorded and not run."""
    if has_training_flag(words) or verl_program(words) is not None:
        return True
    program = False  # a launcher's own -c and -m have other meanings
    for place, word in enumerate(words):
        if program and word == "-c":
            return False
        if program and word == "-m":
            return words[place + 1 : place + 2] != [] and words[place + 1].startswith(_MODULES)
        name = os.path.basename(word)
        program = program or name.startswith("python") or name in ("bash", "sh")
        if name in ("torchrun", "accelerate", "deepspeed") or _SCRIPT.fullmatch(name):
            return True
        if name.endswith(".py"):
            return False
    return False


def record(words: Sequence[str]) -> None:
    path = os.path.join(os.environ[STAND_INS], f"{time.time_ns()}-{os.getpid()}.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump({"words": list(words), "environment": dict(os.environ)}, file)
    os.replace(f"{path}.part", path)  # the script may be killed at any time


def _is_batch_script(path: str) -> bool:
    """sbatch requires a first line with an interpreter; the files that its options name have none."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _imitate(name: str, arguments: Sequence[str]) -> int:
    """The output of a program that has no other effect on what a script does next; files are not written."""
    if name == "date" and len(arguments) == 1 and arguments[0].startswith("+"):
        print(time.strftime(arguments[0][1:]))
    elif name == "date":
        sys.stderr.write("date: command not found with these arguments\n")
        return 127
    elif name == "tee":
        sys.stdout.write(sys.stdin.read())
    return 0


def main(name: str, arguments: Sequence[str]) -> int:
    """Returns the exit code, unless another program replaces this process."""
    words = [name, *arguments]
    shell = next((place for place, word in enumerate(words) if os.path.basename(word) in ("bash", "sh")), None)
    if may_train(words):
        record(words)
    elif name in HARMLESS:
        return _imitate(name, arguments)
    elif name in PYTHONS:
        path = os.environ["PATH"].replace(os.environ[STAND_INS] + os.pathsep, "")
        program = shutil.which(name, path=path)
        if program is not None:  # PATH keeps the stand-ins, for the programs that Python starts
            os.execv(program, [program, *arguments])
        sys.stderr.write(f"{name}: command not found\n")
        return 127
    elif name in SHELL_LAUNCHERS and shell is not None:
        os.execvp(words[shell], words[shell:])
    elif name == "sbatch" and (scripts := [place for place, word in enumerate(arguments) if _is_batch_script(word)]):
        os.execvp("bash", ["bash", *arguments[scripts[0] :]])
    else:
        sys.stderr.write("isthmus: not run: {}\n".format(re.sub(r"(?i)(bearer|token) \S+", r"\1 ...", " ".join(words))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
elif __name__ == "sitecustomize" and may_train(getattr(sys, "orig_argv", [])):
    record(sys.orig_argv)
    os._exit(0)
