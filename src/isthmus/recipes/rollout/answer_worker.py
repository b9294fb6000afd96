"""A program that checks answers: reads and writes a line of JSON for each.

Run as a script, with the name of a check and the seconds that it may take, and only the standard library and
math-verify. A line has the texts of the check, its reply is true, false or null. The system ends the program at a line
that takes too much time, also within code that no Python signal handler interrupts: a regular expression that
backtracks without end, or a number of a billion digits.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Callable

_START_S = 120
"""Time limit of imports."""
_MEMORY_BYTES = 4 << 30
"""Address space."""


def math_verify() -> Callable[[str, str], bool | None]:
    """Whether an answer equals the right one by mathematics; null if there is no mathematics in the right one."""
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns about its time limits, which are the parent's

    def verified(right: str, answer: str) -> bool | None:
        expected = parse(right, parsing_timeout=None)
        if not expected:
            return None
        return bool(verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return verified


def format_matches() -> Callable[[str, str], bool]:
    """Whether an expression matches a complete answer."""
    return lambda expression, answer: re.fullmatch(expression, answer, re.DOTALL) is not None


_CHECKS = {"math_verify": math_verify, "format": format_matches}


def main() -> None:
    """Reply to each line of the standard input."""
    name, limit_s = sys.argv[1], int(sys.argv[2])
    sys.path.pop(0)  # the folder of this file, whose modules are not for import
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_START_S)
    check = _CHECKS[name]()
    signal.alarm(0)
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(limit_s)
        try:
            reply = check(*json.loads(line))
        except (Exception, MemoryError):
            reply = False
        signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
