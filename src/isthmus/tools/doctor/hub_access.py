"""Token and reachability of the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.machine import Machine

_TRUE = ("1", "ON", "YES", "TRUE")
_LOCAL = "A run with local model and data folders does not need the Hub (HF_HUB_OFFLINE=1 keeps it from asking)."


def check_hub_settings(machine: Machine) -> Iterator[Finding]:
    values = machine.environment
    file = Path(values.get("HF_TOKEN_PATH") or os.path.join(hub_home(machine), "token")).expanduser()
    token = values.get("HF_TOKEN") or values.get("HUGGING_FACE_HUB_TOKEN") or ""
    if token and token != token.strip():
        yield warning("Hub", "HF_TOKEN has spaces or line ends around it", "Set it again without them.", "HF_TOKEN")
    if token:
        yield ok("Hub", "a token is set", "HF_TOKEN")
    elif file.is_file():
        yield ok("Hub", "a token is saved", str(file))
    else:
        yield ok("Hub", "no token: public models and data sets only, not gated ones such as Llama", f"HF_TOKEN, {file}")
    if offline(machine):
        yield ok("Hub", "downloads are disabled: models and data sets must be in the cache", "HF_HUB_OFFLINE")


def hub_home(machine: Machine) -> str:
    """The folder of the token and the cache; ``~`` is not expanded."""
    values = machine.environment
    return values.get("HF_HOME") or os.path.join(values.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")


def offline(machine: Machine) -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(machine.environment.get(name, "").upper() in _TRUE for name in names)


def check_hub(machine: Machine) -> Iterator[Finding]:
    """Asks for the account of the token, within seconds."""
    if offline(machine):
        return
    from isthmus.hf.hub import ENDPOINT, account_of_token

    try:
        account = account_of_token()
    except PermissionError:
        yield error(
            "Hub",
            f"{ENDPOINT} refuses the token",
            "Make a new one on the account's page and set HF_TOKEN, or unset it for public models.",
            "whoami",
        )
    except OSError as failure:
        yield warning(
            "Hub", f"{ENDPOINT} does not answer: {failure}", f"Check the network and HTTPS_PROXY. {_LOCAL}", "whoami"
        )
    else:
        yield ok("Hub", f"{ENDPOINT} answers{f', the token is of {account}' if account else ''}", "whoami")
