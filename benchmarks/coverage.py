"""Which model types of transformers are converted: by a family, by ``--learn``, or not, and why not.

python benchmarks/coverage.py --state coverage.json --record

A small random model of each type is converted to a Megatron-Core checkpoint and back, and its float32 logits are
compared with those of transformers. Each type runs in a process of its own with limited memory and time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, publish_result

sys.path.insert(0, str(REPOSITORY / "src"))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

LIMIT_S = 300.0
MEMORY_BYTES = 12 << 30
"""Address space of one process."""
TOLERANCE = 1e-4
SENSITIVE = 1e-2
"""Below this difference, a model is tried again with smaller weights."""
LENGTHS = (37, 23)
"""Tokens of the samples; longer than the attention windows."""
MIN_VOCAB = 83
LARGE = 9999
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": LARGE, "n_shared_experts": LARGE, "num_experts_per_tok": LARGE},
    "deepseek_v2": {"num_experts_per_tok": LARGE},
    "hunyuan_v1_dense": {"head_dim": LARGE},
    "hunyuan_v1_moe": {"head_dim": LARGE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mamba2": {"expand": 1, "num_heads": 64},
    "ministral": {"head_dim": LARGE},
    "nemotron": {"num_key_value_heads": LARGE},
} | {name: {"is_decoder": True} for name in ("bert", "roberta", "electra", "ernie", "camembert", "rembert", "roformer")}
"""What some types need and have no default for."""
SMALL_SETTINGS: dict[str, dict[str, Any]] = {"gpt_neo": {"attention_types": [[["global", "local"], 2]]}}
"""Settings that depend on the number of layers."""
RESULTS = {
    "native": "a family of Isthmus",
    "learned": "`isthmus convert --learn` finds the mapping",
    "refused": "the message names what is not supported",
    "unbuilt": "transformers has no causal language model of this type that runs with small sizes",
    "wrong": "logits or bytes differ without a message",
    "failed": "an error without a hint, or no result in time",
}


def model_types() -> list[str]:
    """Those with a causal language model, then those with a model for images and text."""
    from transformers.models.auto import modeling_auto as auto

    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return list(dict.fromkeys(name for table in tables for name in sorted(table)))


def measure(model_type: str, folder: Path) -> dict[str, Any]:
    """Convert a small model of this type; everything is written to ``folder``."""
    from isthmus.errors import IsthmusError
    from isthmus.families.registry import all_families

    try:
        native = _config(model_type)["model_type"] in all_families()  # some share the config class of another
        if not native:
            _learn(model_type, folder)
        difference, differing = _convert(_build(model_type, folder / "first"), folder / "first")
        if not differing and TOLERANCE < difference < SENSITIVE:
            # A recurrence can amplify rounding errors; errors of another kind stay with smaller weights.
            folder = folder / "smaller"
            difference, differing = _convert(_build(model_type, folder, scale=0.5), folder)
    except IsthmusError as error:
        reason = _reason(error, folder)
        return {"result": "unbuilt" if reason.startswith("transformers ") else "refused", "reason": reason}
    if differing or not difference <= TOLERANCE:
        what = f"not the same bytes: {', '.join(differing)}" if differing else f"logits differ by {difference:.1e}"
        return {"result": "wrong", "reason": what, "max_abs_difference": difference}
    return {"result": "native" if native else "learned", "max_abs_difference": difference}


def _config(model_type: str) -> dict[str, Any]:
    """The defaults of a type, with what else it needs."""
    from isthmus.hf.tiny_model import default_config

    return default_config(model_type) | OWN_SETTINGS.get(model_type, {})


def _build(model_type: str, folder: Path, scale: float = 1.5) -> Path:
    """A random model with the defaults of its type, and the first sizes with which it runs."""
    from isthmus.errors import IsthmusError
    from isthmus.families.discover.setting_values import independent_defaults
    from isthmus.families.discover.small_config import FIRST, small_config
    from isthmus.hf.tiny_model import effective_config, save_random_model, saved_model_logits

    default = _config(model_type)
    given = {"model_type": model_type} | OWN_SETTINGS.get(model_type, {})
    own = independent_defaults(default, lambda name, value: effective_config(given | {name: value}))
    config = {name: value for name, value in default.items() if name in own or not isinstance(value, int)}
    failures = []
    for number, sizes in enumerate(FIRST):
        model = folder / f"model-{number}"
        try:
            small = small_config(config, sizes) | SMALL_SETTINGS.get(model_type, {})
            save_random_model(model, small, seed=7, scale=scale)
            saved_model_logits(model, _samples())
        except IsthmusError as error:
            failures.append(error)
        else:
            return model
    raise failures[0]


def _samples() -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, MIN_VOCAB, (length,), generator=generator) for length in LENGTHS]


def _learn(model_type: str, folder: Path) -> None:
    """Infer the family from a config alone."""
    from isthmus.convert.learn import learn, save_family
    from isthmus.families.registry import FAMILIES_ENV

    source = folder / "config"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(_config(model_type)))
    save_family(learn(source), folder / "families")
    os.environ[FAMILIES_ENV] = str(folder / "families")


def _convert(model: Path, folder: Path) -> tuple[float, list[str]]:
    """The largest difference of logits, and the names of tensors that differ after the way there and back."""
    import torch
    from safetensors.torch import load_file

    from isthmus.convert.transfer import convert
    from isthmus.families.registry import family_for
    from isthmus.hf.tiny_model import saved_model_logits
    from isthmus.recipes.setup.load_model import load_model, model_logits

    convert(model, folder / "megatron")
    convert(folder / "megatron", folder / "back")
    before, after = (load_file(path / "model.safetensors") for path in (model, folder / "back"))
    nested = family_for(json.loads((model / "config.json").read_text())).nested
    if nested is not None:
        before = {own: before[name] for name, own in nested.renamed(before).items()}
    alike = {name for name in before.keys() & after.keys() if _same_bytes(before[name], after[name])}
    samples = _samples()
    theirs = saved_model_logits(model, samples)
    decoder = load_model(model)
    pairs = zip((model_logits(decoder, sample) for sample in samples), theirs, strict=True)
    differences = torch.stack([(a - b).abs().max() for a, b in pairs])
    return differences.max().item(), sorted((before.keys() | after.keys()) - alike)


def _same_bytes(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def _reason(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).replace(f"{folder}/", "").split()) or type(error).__name__
    text = text.partition(" was not learned: ")[2] or text
    return text if len(text) <= 300 else f"{text[:297]}..."


def isolated(model_type: str, limit_s: float) -> dict[str, Any]:
    """``measure`` in a forked process."""
    with tempfile.TemporaryDirectory(prefix="isthmus-coverage-") as scratch:
        answer, log = Path(scratch, "answer.json"), Path(scratch, "log")

        def run() -> None:
            with log.open("w") as file:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            try:
                found = measure(model_type, Path(scratch))
            except BaseException as error:
                traceback.print_exc()
                found = {"result": "failed", "reason": f"{type(error).__name__}: {_reason(error, Path(scratch))}"}
            answer.write_text(json.dumps(found))
            os._exit(0)

        started_s = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join(limit_s)
        if process.is_alive():
            process.kill()
        process.join()
        ended = f"no result in {limit_s:g} s" if process.exitcode == -9 else f"ended with {process.exitcode}"
        found = json.loads(answer.read_text()) if answer.exists() else {"result": "failed", "reason": ended}
        return {"type": model_type, **found, "time_s": time.monotonic() - started_s}


def walk(
    types: Sequence[str], state_file: Path | None, *, limit_s: float, pause: Path | None, commit: str | None
) -> list[dict[str, Any]]:
    """A row for each type; those in the state are not measured again."""
    known = json.loads(state_file.read_text()) if state_file is not None and state_file.exists() else []
    rows = {row["type"]: row for row in known}
    for number, name in enumerate(types, 1):
        if name in rows:
            continue
        while pause is not None and pause.exists():
            time.sleep(2)
        row = rows[name] = isolated(name, limit_s) | {"commit": commit}
        print(
            f"{number:3}/{len(types)} {row['result']:8}{row['time_s']:5.1f} s  {name}  {row.get('reason', '')}",
            flush=True,
        )
        if state_file is not None:
            state_file.write_text(json.dumps(list(rows.values())))
    return [rows[name] for name in types]


def main(arguments: list[str]) -> int:
    """Exit code 1 if a result is wrong, or an error has no hint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="some of the model types")
    parser.add_argument("--state", type=Path, help="continue from this file, and write it after each type")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time of one type (default: %(default)g)")
    parser.add_argument("--pause-while", type=Path, metavar="FILE", help="start no type while this file exists")
    parser.add_argument("--quick", action="store_true", help="three types only")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    certified = certificate(["benchmarks/coverage.py", *arguments])
    import isthmus.convert.learn
    import isthmus.recipes.setup.load_model  # noqa: F401

    types = chosen.only or (["llama", "mixtral", "rwkv"] if chosen.quick else model_types())
    rows = walk(types, chosen.state, limit_s=chosen.limit_s, pause=chosen.pause_while, commit=certified["commit"])
    counts = Counter(row["result"] for row in rows)
    print(", ".join(f"{name} {counts[name]}" for name in RESULTS))
    result = {"benchmark": "coverage", "certificate": certified, "counts": dict(counts), "rows": rows}
    publish_result("coverage", result, record=chosen.record, out=chosen.out)
    return 1 if counts["wrong"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
