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
from collections.abc import Callable, Sequence
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
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_WITH_MROPE = "qwen2_vl qwen2_5_vl qwen2_5_omni_thinker glm4v glm46v glmga glm_ocr glm4v_moe paddleocr_vl"
_DECODERS = "bert roberta electra ernie camembert rembert roformer roberta-prelayernorm xlm-roberta xlm-roberta-xl"
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mamba2": {"expand": 1, "num_heads": 64},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    **{name: {"text_config": {"rope_parameters": _MROPE}} for name in _WITH_MROPE.split()},
    **{name: {"is_decoder": True} for name in _DECODERS.split()},
}
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
        return _compared(model_type, folder, "native" if native else "learned")
    except IsthmusError as error:
        reason = _reason(error, folder)
        return {"result": "unbuilt" if reason.startswith("transformers ") else "refused", "reason": reason}


def _compared(model_type: str, folder: Path, result: str) -> dict[str, Any]:
    """``result`` if a small model keeps its logits and bytes."""
    difference, differing = _convert(_build(model_type, folder / "first"), folder / "first")
    if not differing and TOLERANCE < difference < SENSITIVE:
        # A recurrence can amplify rounding errors; errors of another kind stay with smaller weights.
        folder = folder / "smaller"
        difference, differing = _convert(_build(model_type, folder, scale=0.5), folder)
    if differing or not difference <= TOLERANCE:
        what = f"not the same bytes: {', '.join(differing)}" if differing else f"logits differ by {difference:.1e}"
        return {"result": "wrong", "reason": what, "max_abs_difference": difference}
    return {"result": result, "max_abs_difference": difference}


def _config(model_type: str) -> dict[str, Any]:
    """The defaults of a type, with what else it needs."""
    from isthmus.hf.tiny_model import default_config, effective_config

    settings = OWN_SETTINGS.get(model_type)
    return default_config(model_type) if settings is None else effective_config({"model_type": model_type} | settings)


def _build(model_type: str, folder: Path, scale: float = 1.5) -> Path:
    """A random model with the defaults of its type, and the first sizes with which it runs."""
    from isthmus.errors import IsthmusError
    from isthmus.hf.tiny_model import effective_config, save_random_model, saved_model_logits
    from isthmus.tools.learn.setting_values import independent_defaults
    from isthmus.tools.learn.small_config import FIRST, small_config

    default = _config(model_type)
    base = {"model_type": model_type} | OWN_SETTINGS.get(model_type, {})
    independent = independent_defaults(default, lambda name, value: effective_config(base | {name: value}))
    config = {name: value for name, value in default.items() if name in independent or not isinstance(value, int)}
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


def measure_hidden(model_type: str, folder: Path) -> dict[str, Any]:
    """What ``--learn`` finds for a type with a family, as if the family did not exist."""
    from isthmus.errors import IsthmusError
    from isthmus.families.registry import register_family
    from isthmus.tools.learn.learn import prove

    try:
        register_family(prove(_config(model_type)), replace=True)
        return _compared(model_type, folder, "learned")
    except IsthmusError as error:
        return {"result": "refused", "reason": _reason(error, folder)}


def _learn(model_type: str, folder: Path) -> None:
    """Infer the family from a config alone."""
    from isthmus.families.registry import FAMILIES_ENV
    from isthmus.tools.learn.learn import learn, save_family

    source = folder / "config"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(_config(model_type)))
    save_family(learn(source), folder / "families")
    os.environ[FAMILIES_ENV] = str(folder / "families")


def _convert(model: Path, folder: Path) -> tuple[float, list[str]]:
    """The largest difference of logits, and the names of tensors that differ after the way there and back."""
    import torch
    from safetensors.torch import load_file

    from isthmus.convert.hf.hf_weights import open_weights
    from isthmus.convert.transfer import convert
    from isthmus.families.registry import family_for
    from isthmus.hf.model_folder import ModelFolder
    from isthmus.hf.tiny_model import saved_model_logits
    from isthmus.recipes.model.load_model import load_model, model_logits

    convert(model, folder / "megatron")
    convert(folder / "megatron", folder / "back")
    # transformers writes some models in another form than the published files, which exports have.
    opened = ModelFolder.open(model)
    source = open_weights(opened, family_for(opened.config)).source
    before, after = ({name: source.read(name) for name in source.tensors}, load_file(folder / "back/model.safetensors"))
    alike = {name for name in before.keys() & after.keys() if _same_bytes(before[name], after[name])}
    samples = _samples()
    theirs = saved_model_logits(model, samples)
    decoder = load_model(model)
    pairs = zip((model_logits(decoder, sample) for sample in samples), theirs, strict=True)
    differences = torch.stack([(a - b).abs().max() for a, b in pairs])
    return differences.max().item(), sorted((before.keys() | after.keys()) - alike)


def _same_bytes(tensor: Any, other: Any) -> bool:
    return (
        tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and tensor.numpy().tobytes() == other.numpy().tobytes()
    )


def _reason(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).replace(f"{folder}/", "").split()) or type(error).__name__
    text = text.partition(" was not learned: ")[2] or text
    return text if len(text) <= 300 else f"{text[:297]}..."


def isolated(
    model_type: str, limit_s: float, measured: Callable[[str, Path], dict[str, Any]] = measure
) -> dict[str, Any]:
    """``measured`` in a forked process."""
    with tempfile.TemporaryDirectory(prefix="isthmus-coverage-") as scratch:
        answer, log = Path(scratch, "answer.json"), Path(scratch, "log")

        def run() -> None:
            with log.open("w") as file:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            try:
                result = measured(model_type, Path(scratch))
            except BaseException as error:
                traceback.print_exc()
                result = {"result": "failed", "reason": f"{type(error).__name__}: {_reason(error, Path(scratch))}"}
            answer.write_text(json.dumps(result))
            os._exit(0)

        started_s = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join(limit_s)
        if process.is_alive():
            process.kill()
        process.join()
        ended = f"no result in {limit_s:g} s" if process.exitcode == -9 else f"ended with {process.exitcode}"
        result = json.loads(answer.read_text()) if answer.exists() else {"result": "failed", "reason": ended}
        return {"type": model_type, **result, "time_s": time.monotonic() - started_s}


def walk(
    types: Sequence[str],
    state_file: Path | None,
    *,
    limit_s: float,
    pause: Path | None,
    commit: str | None,
    hidden: bool = False,
) -> list[dict[str, Any]]:
    """A row for each type; those in the state are not measured again.

    With ``hidden``, rows of families also have what is found without the family.
    """
    known = json.loads(state_file.read_text()) if state_file is not None and state_file.exists() else []
    rows = {row["type"]: row for row in known}

    def show(number: int, row: dict[str, Any], what: str = "") -> None:
        text = f"{row['result']:8}{row['time_s']:5.1f} s  {row['type']}{what}  {row.get('reason', '')}"
        print(f"{number:3}/{len(types)} {text}", flush=True)
        if state_file is not None:
            state_file.write_text(json.dumps(list(rows.values())))

    for number, name in enumerate(types, 1):
        while pause is not None and pause.exists():
            time.sleep(2)
        if name not in rows:
            rows[name] = isolated(name, limit_s) | {"commit": commit}
            show(number, rows[name])
        if hidden and rows[name]["result"] == "native" and "hidden" not in rows[name]:
            rows[name]["hidden"] = isolated(name, limit_s, measure_hidden) | {"commit": commit}
            show(number, rows[name]["hidden"], " without its family")
    return [rows[name] for name in types]


def main(arguments: list[str]) -> int:
    """Exit code 1 if a result is wrong, or an error has no hint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="some of the model types")
    parser.add_argument("--state", type=Path, help="continue from this file, and write it after each type")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time of one type (default: %(default)g)")
    parser.add_argument("--pause-while", type=Path, metavar="FILE", help="start no type while this file exists")
    parser.add_argument("--hidden", action="store_true", help="also try --learn on the types that have a family")
    parser.add_argument("--quick", action="store_true", help="four types only")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    certified = certificate(["benchmarks/coverage.py", *arguments])

    types = chosen.only or (["llama", "mixtral", "ovis2", "rwkv"] if chosen.quick else model_types())
    rows = walk(
        types,
        chosen.state,
        limit_s=chosen.limit_s,
        pause=chosen.pause_while,
        commit=certified["commit"],
        hidden=chosen.hidden,
    )
    counts, hidden = (Counter(row["result"] for row in item) for item in (rows, _hidden(rows)))
    print(", ".join(f"{name} {counts[name]}" for name in RESULTS))
    print("without its family:", ", ".join(f"{name} {count}" for name, count in hidden.items()) or "not tried")
    result = {"benchmark": "coverage", "certificate": certified, "counts": dict(counts), "counts_hidden": dict(hidden)}
    publish_result("coverage", result | {"rows": rows}, record=chosen.record, out=chosen.out)
    bad = counts + hidden
    return 1 if bad["wrong"] or bad["failed"] else 0


def _hidden(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row["hidden"] for row in rows if "hidden" in row]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
