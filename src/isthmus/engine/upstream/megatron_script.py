"""Runs an unmodified script of Megatron-LM, or of its user, as ``python SCRIPT.py`` does, with the patches installed.

Processes that the script spawns import this module as their main module and so get the patches too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from isthmus.engine.upstream.script_patches import alone_instead_of_nccl, install
from isthmus.errors import IsthmusError, MissingInput, UsageError, error_of
from isthmus.platforms.network_interfaces import GLOO, loopback

_MODULE = "isthmus.engine.upstream.megatron_script"
_VARIABLE = "ISTHMUS_SCRIPT"
"""Script and platform, for spawned processes."""
_HINTS = {
    "max_position_embeddings argument is None": "Add --max-position-embeddings, for example the --seq-length: "
    "Megatron-LM has no default for it.",
    "Unable to instantiate HuggingFace AutoTokenizer": "For GPT-2's --vocab-file and --merge-file, newer versions need "
    "--tokenizer-type GPT2BPETokenizer and --legacy-tokenizer.",
}
"""What to do about arguments of older commands, by words of Megatron-LM's error."""


def run_script(script: Path, args: Sequence[str], platform: str, say: Callable[[str], None]) -> None:
    """Run the script in this process; ``say`` gets a line for each thing that is done for it.

    Raises:
        MissingInput: there is no such file.
        UsageError: it imports a package that is not installed, or its arguments need one.
        IsthmusError: with exit code 1, any other exception; the traceback has been printed.
    """
    if not script.is_file():
        raise MissingInput(f"{script} does not exist. Give the path of a Python script.")
    script = script.absolute()
    root = checkout(script)
    sys.path[:0] = [str(script.parent), *([str(root)] if root not in (None, script.parent) else [])]
    say(f"{script.name}, {_version(root)}, platform {platform}")
    defaults = {name: value for name, value in _defaults(platform, args).items() if name not in os.environ}
    os.environ.update(defaults)
    if defaults:
        say(f"environment: {' '.join(f'{name}={value}' for name, value in defaults.items())}")
    os.environ[_VARIABLE] = json.dumps([str(script), platform])
    install(platform, root or script.parent, say)
    logging.getLogger("megatron").setLevel(logging.NOTSET)  # isthmus.engine hides its messages
    main: Any = ModuleType("__main__")
    main.__file__, main.__spec__ = str(script), find_spec(_MODULE)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second: for objects of spawned processes
    sys.argv = [str(script), *args]
    try:
        _execute(script, main.__dict__)
    except (SystemExit, KeyboardInterrupt, IsthmusError):
        raise
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if find_spec(package) is None:
            raise UsageError(
                f"{script.name} imports {package}, which is not installed: pip install {package}"
            ) from error
        raise _failure(script, error) from error
    except BaseException as error:
        raise _failure(script, error) from error


def checkout(script: Path) -> Path | None:
    """The folder of the checkout of Megatron-LM that contains the script."""
    return next((folder for folder in script.absolute().parents if (folder / "megatron" / "core").is_dir()), None)


def _version(root: Path | None) -> str:
    """Without an import, which would come before the patches."""
    if root is None:
        return "with the installed megatron-core"
    file = root / "megatron" / "core" / "package_info.py"
    version = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", file.read_text(), re.M)) if file.is_file() else {}
    return f"megatron.core {'.'.join(version.values())} of {root}"


def _defaults(platform: str, args: Sequence[str]) -> dict[str, str]:
    """Environment variables that Megatron-LM expects from a launcher."""
    defaults = {}
    if not {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(args):
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if platform == "cpu":
        defaults["TORCHDYNAMO_DISABLE"] = "1"  # the compiler needs the name of a GPU
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        if interface := loopback():
            defaults[GLOO] = interface.name
        defaults |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return defaults


def _execute(script: Path, namespace: dict[str, Any]) -> None:
    exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), namespace)


def _failure(script: Path, error: BaseException) -> IsthmusError:
    """Print the traceback of the script, without the frames above it."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    hint = next((f". {hint}" for words, hint in _HINTS.items() if words in text), "")
    return error_of(1, f"{script.name} failed with {text} ({last.filename}:{last.lineno}){hint}")


def run_in_child() -> dict[str, Any]:
    """The names of the script in a process that it has spawned."""
    script, platform = json.loads(os.environ[_VARIABLE])
    install(platform, checkout(Path(script)) or Path(script).parent, lambda line: None)
    if platform == "cpu":
        alone_instead_of_nccl()
    namespace: dict[str, Any] = {"__name__": "__mp_main__", "__file__": script}
    _execute(Path(script), namespace)
    return {name: value for name, value in namespace.items() if name not in ("__spec__", "__builtins__")}


if __name__ == "__mp_main__":
    globals().update(run_in_child())
