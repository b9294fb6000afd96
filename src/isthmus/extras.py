"""The optional packages, and which extra of ``pip install 'isthmus[EXTRA]'`` installs each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from isthmus.errors import UsageError

EXTRAS: Mapping[str, str] = {
    "PIL": "vision",
    "amdsmi": "amd",
    "backports.zstd": "data",
    "bitsandbytes": "lora",
    "datasets": "data",
    "datatrove": "dedup",
    "lm_eval": "eval",
    "loguru": "dedup",
    "math_verify": "rl",
    "matplotlib": "png",
    "mlflow": "mlflow",
    "pandas": "trackio",
    "pyarrow": "data",
    "pynvml": "nvidia",
    "ray": "ray",
    "sentencepiece": "sentencepiece",
    "spacy": "dedup",
    "tensorboard": "tensorboard",
    "timm": "vision",
    "torchvision": "vision",
    "tqdm": "eval",
    "trackio": "trackio",
    "vllm": "vllm",
    "wandb": "wandb",
}
"""Extra of each package, by the name that Python imports."""
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Parts of the extra ``trackers``, each an extra of its own."""


def install_command(*packages: str) -> str:
    """The command that installs the packages, such as ``pip install 'isthmus[data,ray]'``."""
    extras = ",".join(dict.fromkeys(EXTRAS[package] for package in packages))
    return f"pip install 'isthmus[{extras}]'"


def missing_package(feature: str, *packages: str, reason: object = "not installed", otherwise: str = "") -> UsageError:
    """The error of a feature whose packages cannot be imported; ``otherwise``: what else to do, such as ``omit it``."""
    everything = "; isthmus[trackers] installs all trackers" if set(packages) & set(TRACKERS) else ""
    hint = f", or {otherwise}" if otherwise else ""
    names = " and ".join(packages)
    return UsageError(f"{feature} needs {names} ({reason}). Run {install_command(*packages)}{hint}{everything}.")


def missing_packages(message: str) -> list[str]:
    """The optional packages that an error names and that are not installed."""
    words = set(re.findall(r"\w+", message))
    return [package for package in EXTRAS if package in words and find_spec(package) is None]


def check_installed(feature: str, *packages: str, otherwise: str = "") -> None:
    """Raise UsageError if packages are not installed. Does not import them."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise missing_package(feature, *missing, otherwise=otherwise)


@contextmanager
def optional_package(feature: str, package: str, *, otherwise: str = "") -> Iterator[None]:
    """The imports of an optional package are in this context, which turns an ImportError into a UsageError."""
    try:
        yield
    except ImportError as error:
        raise missing_package(feature, package, reason=error, otherwise=otherwise) from error
