"""Every argument of Megatron-LM core_v0.16.1 is translated or has a reason why not; defaults agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.dialects.megatron.arguments import read_flags
from isthmus.config.dialects.megatron.known_args import (
    TABLES,
    entries,
    is_neutral,
    kinds,
    name_of,
    untranslated,
    words_of,
)
from upstream.checkout_marks import MEGATRON_LM, needs_checkout, needs_packages

pytestmark = [
    needs_checkout,
    needs_packages,
]
LAST_FLAG_WINS = {"langrl_external_server", "inference_max_batch_size", "disable_chunked_prefill"}
"""Names that several flags with different meanings share."""


@pytest.fixture(scope="module")
def arguments() -> list[dict[str, Any]]:
    driver = Path(__file__).with_name("driver.py")
    command = [sys.executable, "-m", "isthmus", "run", "--platform", "cpu", str(driver), "arguments", MEGATRON_LM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [argument for line in lines if (argument := json.loads(line))["name"] != "help"]


def test_every_flag_has_its_name(arguments: list[dict[str, Any]]) -> None:
    assert len(arguments) > 600
    renamed = {"batch_size": "micro_batch_size", "model_parallel_size": "tensor_model_parallel_size"}
    renamed |= {"warmup": "lr_warmup_fraction"}
    for argument in arguments:
        for flag in argument["flags"]:
            name, value = name_of(flag[2:])
            assert name == renamed.get(argument["name"], argument["name"]), flag
            off = argument["kind"] == "_StoreFalseAction" or (
                argument["kind"] == "BooleanOptionalAction" and flag.startswith("--no-")
            )
            assert value is (False if off else None), flag


def test_defaults_equal_megatron_lm(arguments: list[dict[str, Any]]) -> None:
    for argument in arguments:
        name, default = argument["name"], argument["default"]
        if name in kinds():
            kind, ours = kinds()[name]
            if kind == "list" and default is not None:
                default = [str(default)]
            assert ours == default or (kind == "bool" and not ours and not default), name
        elif name in untranslated() and name not in LAST_FLAG_WINS:
            assert is_neutral(default, untranslated()[name][2]) or default is None, name


def test_flags_that_are_written_exist(arguments: list[dict[str, Any]]) -> None:
    flags = {flag for argument in arguments for flag in argument["flags"]}
    extra = {name for names in TABLES["extra"].values() for name, _ in entries(names)}
    values: dict[str, Any] = {
        name: not default if kind == "bool" else [1] for name, (kind, default) in kinds().items() if name not in extra
    }
    assert {name for name, value in values.items() if words_of(name, value)[0] not in flags} == set()


def test_disabling_flags_give_false() -> None:
    read = read_flags(["--disable-bias-linear", "--no-bias-gelu-fusion", "--no-rope-fusion"])
    assert (read.get("add_bias_linear"), read.get("bias_gelu_fusion")) == (False, False)
