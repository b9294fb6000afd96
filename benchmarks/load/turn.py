"""Runs one contestant of the loading benchmark."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rounds import CpuWatch, anonymous_rss_gib, peak_rss_gib, rss_gib, turn_files


def copy_file(folder: Path) -> dict[str, Any]:
    """``cp`` of the weights to the same disk, without a sync; its memory is not measured."""
    (file,) = folder.glob("*.safetensors")
    target = folder / "copy"
    before_gib = rss_gib()
    watch, started_s = CpuWatch(), time.perf_counter()
    subprocess.run(["cp", str(file), str(target)], check=True)
    time_s, cpu = time.perf_counter() - started_s, watch.shares()
    target.unlink()
    return _result(time_s, before_gib, file.stat().st_size) | cpu


def transformers_model(folder: Path, *, write: bool) -> dict[str, Any]:
    """``from_pretrained`` as a user calls it.

    On a CPU its weights are pages of the file, mapped copy-on-write: nothing is copied until a weight is written.
    With ``write`` each page is written once, so that the process has its own copy, as in training.
    """
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401  # the class is imported lazily

    before_gib = rss_gib()
    watch, started_s = CpuWatch(), time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    read = touch((parameter.detach() for parameter in model.parameters()), write=write)
    return _result(time.perf_counter() - started_s, before_gib, read) | watch.shares()


def isthmus_model(folder: Path, precision: str, *, training: bool) -> dict[str, Any]:
    """The steps of a recipe between process groups and optimizer."""
    import torch

    from isthmus.config.schema import ParallelConfig
    from isthmus.convert.online import import_weights
    from isthmus.engine.parallel.process_groups import close_groups, open_groups
    from isthmus.families.registry import family_for
    from isthmus.families.rules.shard import Layout
    from isthmus.hf.model_folder import ModelFolder
    from isthmus.platforms.detect import detect

    open_groups(ParallelConfig(), detect("cpu"), seed=0)  # first, since it makes megatron.core importable without CUDA
    from isthmus.engine.decoder.decoder import build_model
    from isthmus.engine.decoder.model_config import transformer_config
    from isthmus.engine.decoder_config import padded_vocab_size
    from isthmus.engine.optim.optimizer import wrap_data_parallel
    from isthmus.engine.parallel.live_parameters import live_tensors

    before_gib = rss_gib()
    watch, started_s = CpuWatch(), time.perf_counter()
    source = ModelFolder.open(folder)
    family = family_for(source.config)
    architecture = family.to_architecture(source.config)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model: Any = build_model(architecture, transformer_config(architecture, dtype=dtype))
    if training:
        model = wrap_data_parallel(model)
    built_s = time.perf_counter()
    live = live_tensors(model)
    vocab = padded_vocab_size(architecture.vocab_size, 1)
    import_weights(live, family, architecture, source, layout=Layout(padded_vocab_size=vocab))
    filled_s = time.perf_counter()
    read = touch(live.values())
    result = _result(time.perf_counter() - started_s, before_gib, read) | watch.shares()
    close_groups()
    return result | {"first_round_parts_s": {"build": built_s - started_s, "fill": filled_s - built_s}}


def touch(tensors: Iterable[Any], *, write: bool = False) -> int:
    """Read (or write) one element in every page of every tensor; returns their bytes."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor.data_ptr() not in seen:  # a tied weight counts once
            seen[tensor.data_ptr()] = tensor.nbytes
            one_a_page = tensor.view(-1)[:: 4096 // tensor.element_size()]
            if write:
                one_a_page.mul_(1)
            float(one_a_page.float().sum())
    return sum(seen.values())


def _result(time_s: float, before_gib: float, num_bytes: int) -> dict[str, Any]:
    """``rss_added_gib`` is the peak above the memory before the clock started."""
    peak_gib = peak_rss_gib()
    return {
        "time_s": time_s,
        "peak_rss_gib": peak_gib,
        "rss_added_gib": peak_gib - before_gib,
        "anonymous_rss_gib": anonymous_rss_gib(),
        "weight_bytes": num_bytes,
        "line": f"{time_s:7.2f} s  peak {peak_gib:.2f} GiB, {peak_gib - before_gib:.2f} above the start",
    }


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the contestant of ``spec``."""
    folder = Path(spec["folder"])
    if spec["contestant"] == "cp":
        return copy_file(folder)
    if spec["contestant"].startswith("from-pretrained"):
        return transformers_model(folder, write=spec["contestant"].endswith("-own"))
    return isthmus_model(folder, spec["precision"], training=spec["contestant"] == "isthmus-training")


if __name__ == "__main__":
    spec, result_file = turn_files()
    Path(result_file).write_text(json.dumps(run(spec)))
