"""Task of a rank pool: a rollout by a small server in place of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from isthmus.engine.generation.schedule import Decoding
from isthmus.engine.parallel.process_groups import FIRST_RANK, agree, barrier, gather_objects
from isthmus.errors import explain
from isthmus.recipes.rollout import vllm_engine, vllm_weights
from isthmus.recipes.rollout.vllm_engine import VllmEngine
from unit.recipes.rollout.fake_vllm import Policy, rollout_config
from unit.recipes.rollout.group_vllm import SHAPES


def rollout(*, url: str, folder: str, transfer: str = "files") -> list[Any]:
    """What each rank gets: tokens and log-probabilities of two answers, or exit code and message."""
    policy, path = Policy(Path(folder)), Path(folder)
    policy.position = replace(FIRST_RANK, rank=dist.get_rank())

    def export(model: Any, target: Path, tokenizer: Any, **_: Any) -> None:
        if dist.get_rank() == 0:
            target.mkdir()
            save_file({"a": torch.ones(3), "b": torch.zeros(2)}, target / "model.safetensors")
        barrier()

    def full_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(SHAPES.items()):
            values = torch.full(shape, float(number))
            dist.reduce(values, dst=0)  # each rank takes part
            if dist.get_rank() == 0:
                yield name, values

    config = rollout_config(url, transfer=transfer)
    tensors = mock.patch.object(vllm_engine, "full_tensors", full_tensors)
    with mock.patch.object(vllm_weights, "export_hf", export), tensors:
        engine = VllmEngine.build(config, policy, policy, policy, path, lambda text: None, torch.device("cpu"))  # type: ignore[arg-type]
        try:
            engine.update_weights(0)
        except Exception as error:
            return gather_objects(explain(error))
    try:
        answers = engine.start([[5, 6], [8]], range(2), Decoding(3, (2,), temperature=1.0)).wait(lambda: None)
        result: Any = [[answer.tokens, answer.logps] for answer in answers]
    except Exception as error:
        result = explain(error)
    agree(engine.close)
    return gather_objects(result)
