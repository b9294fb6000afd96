"""A process that has imported all that a run needs and forks a child a command: imports cost seconds, forks none.

Each child is a process of its own with the real entry point, real exit code and real streams; it only did not start
from nothing. Reads one JSON request a line from stdin and answers with one line once the child has ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any


def main() -> None:
    names = (
        "recipes.sft",
        "recipes.dpo",
        "recipes.pretrain",
        "engine.megatron_model",
        "engine.optim.optimizer",
        "engine.step",
        "engine.checkpoint.save_load",
    )
    for name in ("cli.main", "cli.process", *names):
        importlib.import_module(f"isthmus.{name}")
    gc.freeze()  # what was imported stays out of the collections of every command
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            run(request)
        print(json.dumps({"pid": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}), flush=True)


def run(request: dict[str, Any]) -> None:
    """Be the command; does not return."""
    code = 255
    try:
        os.chdir(request["cwd"])
        # As pytest sets it in the parent; the file descriptors are what the interpreter starts with.
        for number, name in enumerate(("/dev/null", request["stdout"], request["stderr"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        if request.get("largest_file_bytes"):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself does; write() then says EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file_bytes"],) * 2)
        from isthmus.cli.main import main as isthmus

        code = isthmus(request["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
