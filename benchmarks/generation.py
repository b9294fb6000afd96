"""Greedy answers of small models: Isthmus, and transformers' ``generate`` and ``generate_batch``.

    python benchmarks/generation.py --record

All have the same weights and prompts, and answers of the same length, which are compared before the clock starts.
Contestants run in alternation in one process. Medians of the time are reported, and of the CPU time of the process,
which depends less on other processes. See README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from rounds import CpuWatch

CONTESTANTS = ("isthmus", "generate", "generate_batch", "recomputed")
"""``generate`` and ``generate_batch`` are transformers'; ``recomputed`` is Isthmus as for sequences without states."""
MOST_FOR_OTHERS = 0.05
"""Largest share of CPU time that other processes may use; beyond it the result is not a valid measurement."""
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "58M": _HEADS | {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "vocab_size": 32000},
    "demo": _HEADS | {
        "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
"""Qwen3 models; ``demo`` has the sizes of ``isthmus demo``."""
TINY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2}
Answers = list[list[int]]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--precision", default="fp32,bf16", help="default: %(default)s")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS[:-1]), help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the longest one (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    for name, known in (("models", MODELS), ("precision", ("fp32", "bf16")), ("contestants", CONTESTANTS)):
        values = getattr(chosen, name).split(",")
        setattr(chosen, name, values)
        if unknown := set(values) - set(known):
            parser.error(f"--{name}: not known: {', '.join(sorted(unknown))}")
    if "isthmus" not in chosen.contestants:
        parser.error("--contestants: the others are compared with isthmus")
    if chosen.quick:
        chosen.prompts, chosen.prompt_tokens, chosen.new_tokens, chosen.rounds = 2, 8, 4, 1
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def build_contestants(
    folder: Path, precision: str, prompts: list[list[int]], new_tokens: int
) -> dict[str, Callable[[], Answers]]:
    """Functions that return the answers."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from isthmus.config.schema import ParallelConfig
    from isthmus.engine.generation.inference import Inference
    from isthmus.engine.generation.schedule import Decoding
    from isthmus.engine.step import Evaluator
    from isthmus.recipes.model.load_model import build_from_folder

    built = build_from_folder(folder, precision=precision)
    tokens = max(4096, sum(map(len, prompts)) + len(prompts) * new_tokens)

    def isthmus(*, longest_with_state: int | None) -> Callable[[], Answers]:
        evaluator, architecture = Evaluator(built.stages), built.plan.architecture
        inference = Inference(evaluator, architecture, ParallelConfig(), batch_tokens=tokens, slots=len(prompts))
        inference.longest_with_state = longest_with_state
        return lambda: inference.generate(prompts, Decoding(new_tokens))

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    network.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}

    def generate() -> Answers:
        answers: Answers = network.generate(padded, attention_mask=mask, **options)[:, longest:].tolist()
        return answers

    def generate_batch() -> Answers:
        settings = GenerationConfig(**options, eos_token_id=-1)
        answers = network.generate_batch(prompts, settings, ContinuousBatchingConfig(), warmup=False)
        return [answer.generated_tokens for answer in answers.values()]

    return {
        "isthmus": isthmus(longest_with_state=None),
        "generate": generate,
        "generate_batch": generate_batch,
        "recomputed": isthmus(longest_with_state=1),
    }


def build_model(folder: Path, name: str, *, quick: bool) -> int:
    """Save a model with random weights; returns the number of its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # Logits that differ much: rounding must not decide which token is the most probable.
    config = AutoConfig.for_model("qwen3", **MODELS[name] | (TINY if quick else {}), initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    import torch

    from isthmus.engine.parallel.process_groups import close_groups

    torch.set_num_threads(chosen.threads)
    rows: list[dict[str, Any]] = []
    parameters = {}
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as root:
        for name in chosen.models:
            parameters[name] = build_model(Path(root, name), name, quick=chosen.quick)
            vocabulary = (TINY if chosen.quick else MODELS[name])["vocab_size"]
            lengths = [
                max(1, chosen.prompt_tokens * (number + 1) // chosen.prompts) for number in range(chosen.prompts)
            ]
            prompts = [torch.randint(vocabulary, (length,)).tolist() for length in lengths]
            for precision in chosen.precision:
                runs = build_contestants(Path(root, name), precision, prompts, chosen.new_tokens)
                runs = {contestant: runs[contestant] for contestant in chosen.contestants}
                rows += _turns(runs, chosen.rounds, {"model": name, "precision": precision})
    close_groups()
    return {
        "settings": {
            "parameters": parameters, "prompts": chosen.prompts, "prompt_tokens": lengths,
            "new_tokens": chosen.new_tokens, "rounds": chosen.rounds, "threads": chosen.threads,
        },
        "quiet": all(row["others_cpu_use"] <= MOST_FOR_OTHERS for row in rows),
        "rows": rows,
    }  # fmt: skip


def _turns(runs: dict[str, Callable[[], Answers]], rounds: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    answers = {name: run() for name, run in runs.items()}
    equal = {name: answer == answers["isthmus"] for name, answer in answers.items()}
    if row["precision"] == "fp32" and not all(equal.values()):
        raise SystemExit(f"answers differ: {equal}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    cpu_times: dict[str, list[float]] = {name: [] for name in runs}
    watch = CpuWatch()
    for _ in range(rounds):
        for name, run in runs.items():
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            run()
            times[name].append(time.perf_counter() - started_s)
            cpu_times[name].append(time.process_time() - started_cpu_s)
    others = watch.shares()["others_cpu_use"]
    isthmus_s, isthmus_cpu_s = statistics.median(times["isthmus"]), statistics.median(cpu_times["isthmus"])
    rows = []
    for name, answer in answers.items():
        median_s, cpu_s = statistics.median(times[name]), statistics.median(cpu_times[name])
        tokens = sum(map(len, answer))
        rows.append(
            row | {
                "contestant": name, "time_s": median_s, "time_s_rounds": times[name], "tokens_per_s": tokens / median_s,
                "times_isthmus": median_s / isthmus_s, "cpu_s": cpu_s, "cpu_s_rounds": cpu_times[name],
                "cpu_times_isthmus": cpu_s / isthmus_cpu_s, "others_cpu_use": others, "same_answers": equal[name],
            }
        )  # fmt: skip
        print(
            f"{row['model']:<5} {row['precision']} {name:<14}{median_s:>8.2f} s{tokens / median_s:>9.0f} tokens/s"
            f"{median_s / isthmus_s:>7.2f} x isthmus, CPU time {cpu_s / isthmus_cpu_s:.2f} x",
            flush=True,
        )
    return rows


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    certified = certificate(["benchmarks/generation.py", *arguments])
    result = {"benchmark": "generation", "certificate": certified} | measure(chosen)
    publish_result("generation", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
