"""Writes the model folder of a case, with random weights in bfloat16, and the samples of the chats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from rounds import turn_files
from sft.workload import Shape, make_workload

from gpu_turns.cases import CASES, DESCRIPTION, model_config


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Write the folder of ``spec["case"]``, whose description comes last, and return that."""
    folder, case = Path(spec["folder"]), CASES[spec["case"]]
    for partial in ("model", "prepared", "samples"):
        shutil.rmtree(folder / partial, ignore_errors=True)
    keys = model_config(case, tiny=spec["dry"])
    described = _chats(folder, keys, spec) if case.chats else _random_weights(folder / "model", keys, spec)
    described |= {"about": case.about, "model": keys}
    (folder / DESCRIPTION).write_text(json.dumps(described))
    return described


def _random_weights(folder: Path, keys: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**keys)
    torch.manual_seed(0)
    with torch.device(spec["device"]):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def _chats(folder: Path, keys: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    shape = Shape(**{name: keys[name] for name in Shape.__slots__})
    few = folder / "few.jsonl"
    if spec["dry"]:
        folder.mkdir(parents=True, exist_ok=True)
        few.write_text("".join(json.dumps({"messages": _counting(number)}) + "\n" for number in range(spec["samples"])))
    data = few if spec["dry"] else None  # None: the documentation of Python's standard library
    workload = make_workload(
        folder, data=data, tokenizer=None, seq_length=spec["seq_length"], num_samples=spec["samples"], shape=shape
    )
    return {"parameters": workload["model"]["parameters"], "data": workload["data"]}


def _counting(number: int) -> list[dict[str, str]]:
    answer = " ".join(str(number + offset) for offset in range(1, 4 + number % 7))
    return [{"role": "user", "content": "Continue counting."}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    spec, result_file = turn_files()
    result_file.write_text(json.dumps(run(spec)))
