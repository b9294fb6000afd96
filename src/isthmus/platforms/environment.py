"""Puts a platform's environment variables in place, and leaves alone what the user has chosen."""

from __future__ import annotations

import os

from isthmus.platforms.base import Platform, RunShape

# A runtime may need its variables before anybody asks for them (see detect); they are still to be reported then.
_set_here: dict[str, str] = {}


def apply_env(platform: Platform, run: RunShape | None = None) -> dict[str, tuple[str, str]]:
    """Set the platform's variables that are not set yet, under any of their names, not even to nothing.

    Args:
        platform: whose they are.
        run: what it is going to do; None sets only those that do not hang on it.

    Returns:
        Every variable that this process has set, with its value and the reason; those that came with the environment
        are not among them.
    """
    applied: dict[str, tuple[str, str]] = {}
    defaults = {**platform.env_defaults(), **(platform.env_of_run(run) if run is not None else {})}
    for variable, (value, why) in defaults.items():
        names = (variable, *platform.env_aliases.get(variable, ()))
        if all(name not in os.environ for name in names):
            os.environ[variable] = _set_here[variable] = value
        if _set_here.get(variable) == value == os.environ.get(variable):
            applied[variable] = (value, why)
    return applied
