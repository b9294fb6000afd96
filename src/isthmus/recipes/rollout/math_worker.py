"""A program that verifies answers with math-verify: reads and writes a line of JSON for each.

Run as a script, with only the standard library and math-verify. A line is ``[right, answer]``, its reply true, false,
or null if ``right`` has no mathematics in it. The system ends the program at a line that takes too much time, also
within a library's code that no Python signal handler interrupts.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

_START_S = 120
"""Time limit of the import of math-verify."""
_MEMORY_BYTES = 4 << 30
"""Address space: an answer may be a number of a billion digits."""


def main() -> None:
    """Reply to each line of the standard input; the argument is the time limit of a line in whole seconds."""
    limit_s = int(sys.argv[1])
    sys.path.pop(0)  # the folder of this file, whose modules are not for import
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_START_S)
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns about its time limits, which are the parent's
    signal.alarm(0)
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(limit_s)
        right, answer = json.loads(line)
        try:
            expected = parse(right, parsing_timeout=None)
            reply = verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None) if expected else None
        except (Exception, MemoryError):
            reply = False
        signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
