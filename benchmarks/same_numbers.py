"""Compares two source trees: losses of training runs bit for bit, and converted files byte for byte.

    python benchmarks/same_numbers.py inputs --out DIR                    models and data, made once
    python benchmarks/same_numbers.py run --source TREE --inputs DIR --out a.json
    python benchmarks/same_numbers.py compare a.json b.json [--record]
    python benchmarks/same_numbers.py speed TREE TREE --inputs DIR [--record]

Every recipe, mixer and kind of layout is in a run. Both trees read the same inputs through the command line, so a
redesign that keeps it can be compared with the code before. A case that is in the output already is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, result_path, write_result

Case = dict[str, Any]
COMMON = [
    "data.seq_length=64",
    "train.global_batch_size=4",
    "train.steps=4",
    "optim.lr=1e-3",
    "data.valid_fraction=0.1",
]
DENSE, HYBRID = "qwen3", "qwen3_next"
FAMILIES = (
    "qwen3", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_next", "kimi_linear", "jamba", "mamba2", "lfm2", "nemotron_h",
    "deepseek_v32", "gemma4_text", "qwen3_moe", "mixtral", "llama4_text", "falcon_h1", "olmo_hybrid", "phimoe",
    "step3p5", "glm4_moe", "bailing_moe_v2", "granitemoehybrid", "cohere2",
)  # fmt: skip
MOE = {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "glm4_moe"}
RUNS: dict[str, tuple[str, str, int, list[str]]] = {
    # name: (verb, model, ranks, settings)
    "sft": ("sft", DENSE, 1, []),
    "sft accuracy and test": ("sft", DENSE, 1, ["train.eval_every=2", "data.test_fraction=0.1"]),
    "sft label smoothing": ("sft", DENSE, 1, ["train.label_smoothing=0.1"]),
    "sft tp": ("sft", DENSE, 2, ["parallel.tp=2"]),
    "sft pp": ("sft", DENSE, 2, ["parallel.pp=2"]),
    "sft pp vpp": ("sft", DENSE, 2, ["parallel.pp=2", "parallel.vpp=2"]),
    "sft cp": ("sft", DENSE, 2, ["parallel.cp=2"]),
    "sft dp": ("sft", DENSE, 2, []),
    "sft fsdp": ("sft", DENSE, 2, ["parallel.fsdp=true"]),
    "sft bf16": ("sft", DENSE, 1, ["train.precision=bf16"]),
    "sft fp16": ("sft", DENSE, 1, ["train.precision=fp16"]),
    "sft recompute": ("sft", DENSE, 1, ["train.recompute=full"]),
    "sft dropout": ("sft", DENSE, 1, ["train.hidden_dropout=0.1", "train.attention_dropout=0.1"]),
    "sft lora": ("sft", DENSE, 1, ["lora.rank=4"]),
    "sft muon": ("sft", DENSE, 1, ["optim.optimizer=muon"]),
    "sft frozen": ("sft", DENSE, 1, ["train.freeze=[model.embed_tokens*]"]),
    "pretrain": ("pretrain", "gpt2", 1, []),
    "dpo": ("dpo", DENSE, 1, []),
    "dpo sigmoid with sft, tp": ("dpo", DENSE, 2, ["parallel.tp=2", "dpo.beta=0.3"]),
    "kto": ("kto", DENSE, 1, []),
    "kto apo": ("kto", DENSE, 1, ["kto.loss=apo_zero_unpaired"]),
    "reward": ("reward", DENSE, 1, []),
    "distill": ("distill", DENSE, 1, ["distill.teacher={teacher}"]),
    "experts": ("sft", "qwen3_moe", 1, []),
    "experts ep": ("sft", "mixtral", 2, ["parallel.ep=2"]),
    "experts etp": ("sft", "mixtral", 2, ["parallel.tp=2", "parallel.etp=1", "parallel.ep=2"]),
    "sinks and windows": ("sft", "gpt_oss", 1, []),
    "latent attention": ("sft", "deepseek_v3", 1, []),
    "selected keys": ("sft", "deepseek_v32", 1, []),
    "delta nets": ("sft", "qwen3_next", 2, ["parallel.tp=2"]),
    "delta nets with decays of channels": ("sft", "kimi_linear", 1, []),
    "mamba": ("sft", "jamba", 1, []),
    "mamba2": ("sft", "nemotron_h", 1, []),
    "short convolutions": ("sft", "lfm2", 1, []),
}


def make_inputs(folder: Path) -> None:
    """Tiny models of :data:`FAMILIES` with one tokenizer, and records of each kind, from this checkout's tests."""
    sys.path[:0] = [str(REPOSITORY / "tests")]
    from faults.conftest import CHATS, tiny_qwen3
    from ranks.tiny import build_model_folder

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_qwen3(folder / "tokenizer")
    for family in FAMILIES:
        settings = {"num_hidden_layers": 2} if family in ("qwen3_moe", "mixtral", "deepseek_v3") else {}
        model = build_model_folder(folder / family, family, vocab_size=300, **settings)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (tokenizer / name).is_file():
                shutil.copy(tokenizer / name, model / name)
    build_model_folder(folder / "teacher", "qwen3", vocab_size=300, num_hidden_layers=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / "teacher" / name)
    records: dict[str, list[dict[str, Any]]] = {
        "chats": CHATS,
        "texts": [{"text": f"{chat['instruction']} {chat['output']}"} for chat in CHATS],
        "pairs": [
            {"prompt": chat["instruction"], "chosen": chat["output"], "rejected": f"No {number}."}
            for number, chat in enumerate(CHATS)
        ],
        "labels": [
            {"prompt": chat["instruction"], "completion": chat["output"], "label": bool(number % 2)}
            for number, chat in enumerate(CHATS)
        ],
    }
    for name, rows in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of the files whose content depends only on the model."""
    skipped = {"README.md", "checksums.json", "environment.json"}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in skipped]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Tree:
    """A source tree, used through its command line."""

    def __init__(self, source: Path, inputs: Path) -> None:
        self.inputs = inputs
        self.environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
        self.environment["HF_HUB_OFFLINE"] = "1"

    def isthmus(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "isthmus", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"isthmus {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1500:]}")

    def train(self, name: str, out: Path) -> Case:
        """Losses and gradient norms of the steps as hexadecimal floats, and digests of the exported files."""
        verb, model, ranks, settings = RUNS[name]
        data = {"pretrain": "texts", "dpo": "pairs", "reward": "pairs", "kto": "labels"}.get(verb, "chats")
        settings = [setting.replace("{teacher}", str(self.inputs / "teacher")) for setting in settings]
        files = ["--model", str(self.inputs / model), "--data", str(self.inputs / f"{data}.jsonl"), "--out", str(out)]
        self.isthmus(verb, *files, "--nproc", str(ranks), "platform=cpu", *COMMON, *settings)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        names = ("loss", "grad_norm", "lr", "valid_loss", "test_loss", "mtp_loss", "kl", "rewards/margins")
        numbers = [{key: float(row[key]).hex() for key in names if isinstance(row.get(key), float)} for row in rows]
        folders = [out / "hf", *([out / "adapter"] if (out / "adapter").is_dir() else [])]
        return {"numbers": numbers, "files": {folder.name: digest(folder) for folder in folders if folder.is_dir()}}

    def convert(self, family: str, out: Path) -> Case:
        """Digests of a model in both formats of Megatron-Core, split and in bfloat16, and of its way back."""
        source, split = str(self.inputs / family), ["--tp", "2", *(["--ep", "2"] if family in MOE else [])]
        self.isthmus("convert", source, str(out / "torch_dist"), "--to", "torch_dist")
        self.isthmus("convert", str(out / "torch_dist"), str(out / "hf"), "--to", "hf", "--dtype", "bf16")
        files = {"torch_dist": digest(out / "torch_dist"), "hf": digest(out / "hf")}
        try:
            self.isthmus("convert", source, str(out / "legacy"), "--to", "torch", *split)
        except RuntimeError as refusal:  # Megatron-LM has no such model: the reason is part of the result
            return {"files": files, "refused": str(refusal).split("isthmus: ")[-1]}
        return {"files": {**files, "legacy": digest(out / "legacy")}}


def run_cases(source: Path, inputs: Path, out: Path, only: str, workers: int) -> None:
    results: dict[str, Case] = json.loads(out.read_text()) if out.is_file() else {}
    tree = Tree(source.resolve(), inputs.resolve())
    cases = {f"train {name}": (tree.train, name) for name in RUNS}
    cases |= {f"convert {family}": (tree.convert, family) for family in FAMILIES}
    todo = [name for name in cases if name not in results and only in name]

    def run(name: str) -> tuple[str, Case]:
        method, argument = cases[name]
        with tempfile.TemporaryDirectory(prefix="same-numbers-") as folder:
            return name, method(argument, Path(folder) / "out")

    with ThreadPoolExecutor(workers) as pool:
        for number, (name, case) in enumerate(pool.map(run, todo), start=1):
            results[name] = case
            out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{number}/{len(todo)}  {name}", flush=True)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths of values that differ; a value that is missing on one side differs."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for key in sorted({*a, *b}) for line in differences(a.get(key), b.get(key), f"{path}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [line for k, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{path}/{k}")]
    return [] if a == b else [path]


def compare(first: Path, second: Path, *, recorded: bool) -> int:
    before, after = json.loads(first.read_text()), json.loads(second.read_text())
    names = sorted({*before, *after})
    rows = {name: differences(before.get(name), after.get(name)) for name in names}
    numbers = sum(len(row) for case in after.values() for row in case.get("numbers", ()))
    files = sum(len(folder) for case in after.values() for folder in case["files"].values())
    for name, paths in rows.items():
        print(f"{'equal' if not paths else 'DIFFERENT'}  {name}  {', '.join(paths[:4])}")
    different = [name for name, paths in rows.items() if paths]
    print(f"{len(names)} cases, {numbers} numbers and {files} files compared; {len(different)} cases differ")
    if recorded:
        result = {
            "cases": len(names),
            "numbers": numbers,
            "files": files,
            "differences": {n: rows[n] for n in different},
        }
        certified = certificate(sys.argv)
        write_result(result_path("same_numbers", certified), {"certificate": certified, **result})
    return bool(different)


SPEED = [
    "platform=cpu", "model.init=random", "model.config.hidden_size=256", "model.config.intermediate_size=768",
    "data.seq_length=512", "train.global_batch_size=4", "train.steps=12", "optim.lr=1e-4",
    "checkpoint.save_final=false", "checkpoint.export_final=false",
]  # fmt: skip


def speed(sources: list[Path], inputs: Path, rounds: int, *, recorded: bool) -> None:
    """Start-up and training throughput of two trees, which run alternately."""
    turns: list[dict[str, list[float]]] = [{"startup_s": [], "tokens_per_s": []} for _ in sources]
    for _ in range(rounds):
        for source, values in zip(sources, turns, strict=True):
            tree = Tree(source.resolve(), inputs.resolve())
            started_s = time.perf_counter()
            tree.isthmus("sft", "--help")
            values["startup_s"].append(time.perf_counter() - started_s)
            with tempfile.TemporaryDirectory(prefix="same-numbers-") as folder:
                out, data = Path(folder) / "out", inputs / "chats.jsonl"
                tree.isthmus("sft", "--model", str(inputs / DENSE), "--data", str(data), "--out", str(out), *SPEED)
                rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            steps = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
            values["tokens_per_s"].append(statistics.median(steps[2:]))
    ratios = {name: statistics.median(turns[1][name]) / statistics.median(turns[0][name]) for name in turns[0]}
    for name, ratio in ratios.items():
        print(f"{name:<14} {' '.join(f'{statistics.median(turn[name]):.4g}' for turn in turns)}  ratio {ratio:.3f}")
    if recorded:
        certified = certificate(sys.argv)
        commits = [
            subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
            for source in sources
        ]
        result = {"certificate": certified, "commits": commits, "rounds": turns, "ratios": ratios}
        write_result(result_path("two_trees_speed", certified), result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("inputs").add_argument("--out", type=Path, required=True)
    run = verbs.add_parser("run")
    run.add_argument("--source", type=Path, required=True)
    run.add_argument("--inputs", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--only", default="", help="cases whose name contains this")
    run.add_argument("--workers", type=int, default=2)
    both = verbs.add_parser("compare")
    both.add_argument("results", type=Path, nargs=2)
    both.add_argument("--record", action="store_true")
    speed_parser = verbs.add_parser("speed")
    speed_parser.add_argument("sources", type=Path, nargs=2)
    speed_parser.add_argument("--inputs", type=Path, required=True)
    speed_parser.add_argument("--rounds", type=int, default=5)
    speed_parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if arguments.verb == "inputs":
        make_inputs(arguments.out)
    elif arguments.verb == "run":
        run_cases(arguments.source, arguments.inputs, arguments.out, arguments.only, arguments.workers)
    elif arguments.verb == "speed":
        speed(arguments.sources, arguments.inputs, arguments.rounds, recorded=arguments.record)
    else:
        return compare(*arguments.results, recorded=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
