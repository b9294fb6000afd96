"""Rollouts by a vLLM server on a CPU: differences of log-probabilities, times and answers, beside the native engine.

vllm-group-fp32 sends weights through a process group to a server that is started before, the others through files.

    ISTHMUS_VLLM_PYTHON=vllm_env/bin/python python benchmarks/vllm_rollouts.py --demo playground --record

The run is that of the tutorial on reinforcement learning: the model of the demo counts names. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from grpo_turns import workload
from rounds import CpuWatch

from isthmus.recipes.rollout.vllm_server import EXTENSION, GROUP_OPTION, PLUGIN

RUNS = {
    "native-fp32": ("native", "fp32"),
    "vllm-fp32": ("vllm", "fp32"),
    "vllm-group-fp32": ("vllm", "fp32"),
    "vllm-bf16": ("vllm", "bf16"),
}
GROUP = "vllm-group-fp32"
START_S = 900
"""Longest time of the start of a server."""
REWARD = '''
def right_count(completions, names, **columns):
    """1 for the number of names, else 0."""
    return [float(text.strip() == str(name.count(",") + 1)) for text, name in zip(completions, names)]
'''
RECORDED = ("reward", "answer_tokens", "logp_difference_mean", "logp_difference_max", "generation_s", "step_time_s")
MOST_FOR_OTHERS = 0.05
"""Largest share of CPU time that other processes may use; beyond it the times are not a valid measurement."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--demo", type=Path, help="folder of `isthmus demo`; not with --quick")
    parser.add_argument("--steps", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--only", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    if chosen.quick == (chosen.demo is not None):
        parser.error("give either --demo or --quick")
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    if chosen.quick:
        chosen.steps = 2
    return chosen


def tutorial(demo: Path, folder: Path) -> list[str]:
    """Settings of the tutorial's run, whose prompts and reward are written to ``folder``."""
    questions = [json.loads(line)["messages"][0]["content"] for line in (demo / "chats.jsonl").read_text().splitlines()]
    matches = [match for q in questions if (match := re.fullmatch(r"How many parameters has .*\((.*)\)\?", q))]
    records = [{"prompt": f"Count these names: {match[1]}", "names": match[1]} for match in matches[:1000]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "rewards.py").write_text(REWARD)
    sizes = ["data.seq_length=128", "rollout.max_new_tokens=12", "train.global_batch_size=64"]
    paths = [f"model.path={demo / 'sft' / 'hf'}", f"rollout.reward={folder / 'rewards.py'}:right_count"]
    return [*paths, *sizes, f"data.files={folder / 'prompts.jsonl'}", "train.micro_batch_size=32", "optim.lr=2e-4"]


def tiny(folder: Path) -> list[str]:
    """Settings of a run of a tiny model with random weights."""
    model, prompts, _ = workload.build(folder, tiny=True)
    sizes = ["data.seq_length=128", "rollout.max_new_tokens=4", "rollout.group_size=4", "train.global_batch_size=8"]
    return [f"model.path={model}", f"data.files={prompts}", f"rollout.reward={workload.__file__}:reward", *sizes]


@contextmanager
def server(settings: list[str], threads: int, folder: Path) -> Iterator[str]:
    """The address of a server that joins process groups, with the model of ``settings``."""
    model = next(text.partition("=")[2] for text in settings if text.startswith("model.path="))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [os.environ["ISTHMUS_VLLM_PYTHON"], str(PLUGIN), "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "128", "--generation-config", "vllm", "--worker-extension-cls", EXTENSION]
    variables = {"PYTHONPATH": str(PLUGIN.parent), "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": str(threads)}
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, *shlex.split(GROUP_OPTION)],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + START_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit((folder / "server.log").read_text()[-3000:])
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        assert process.stdin is not None
        process.stdin.close()  # which ends it
        process.wait()


def answers(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
    except OSError:
        return False


def run(name: str, settings: list[str], steps: int, threads: int, folder: Path) -> dict[str, Any]:
    """The steps of a run, and an answer to each of the last prompts."""
    engine, precision = RUNS[name]
    out = folder / name
    fixed = [f"rollout.engine={engine}", f"train.precision={precision}", f"train.steps={steps}", "platform=cpu"]
    fixed += ["data.valid_fraction=0", "rollout.samples_every=1"]
    fixed += ["checkpoint.save_final=false", "checkpoint.export_final=false"]
    command = [sys.executable, "-m", "isthmus", "grpo", "--out", str(out), *settings, *fixed]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-3000:])
    rows = [row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return {
        "run": name,
        "steps": [
            {
                "step": row["step"],
                **{key: row[key] for key in RECORDED},
                "weights_s": row["rollout_s"] - row["generation_s"] - row["reward_s"],
            }
            for row in rows
        ],
        "answers": [
            {key: sample[key] for key in ("prompt", "completion", "reward")}
            for sample in samples
            if sample["step"] == samples[-1]["step"]
        ],
    }


def line(row: dict[str, Any]) -> str:
    """The printed line of a run."""
    steps = row["steps"]
    largest, mean = (max(step[f"logp_difference_{kind}"] for step in steps) for kind in ("max", "mean"))
    return (
        f"{row['run']:<12} differences of log-probabilities at most {largest:.2g}, mean {mean:.2g}; reward "
        f"{steps[0]['reward']:.3f} -> {steps[-1]['reward']:.3f}; weights {steps[0]['weights_s']:.1f} s, then "
        f"{steps[-1]['weights_s']:.2f} s; generation {steps[-1]['generation_s']:.2f} s"
    )


def vllm_versions() -> dict[str, str]:
    """Versions in the environment of vLLM."""
    code = "import importlib.metadata as m; print({d.name: d.version for d in m.distributions()})"
    done = subprocess.run([os.environ["ISTHMUS_VLLM_PYTHON"], "-c", code], capture_output=True, text=True, check=True)
    installed = dict(re.findall(r"'([^']+)': '([^']+)'", done.stdout))
    return {name: installed[name] for name in ("vllm", "vllm-cpu", "torch", "transformers") if name in installed}


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants one after another and return the result, without its certificate."""
    names, watch, rows = chosen.only.split(","), CpuWatch(), []
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as root:
        folder = Path(root)
        settings = tiny(folder) if chosen.quick else tutorial(chosen.demo.absolute(), folder)
        for number in range(chosen.rounds):
            for name in names:
                place = folder / f"round-{number}"
                with ExitStack() as stack:
                    further = []
                    if name == GROUP:
                        url = stack.enter_context(server(settings, chosen.threads, place))
                        further = [f"rollout.url={url}", "rollout.transfer=group"]
                    rows.append(run(name, [*settings, *further], chosen.steps, chosen.threads, place))
                print(line(rows[-1]), flush=True)
    others = watch.shares()["others_cpu_use"]
    versions = vllm_versions() if any(RUNS[name][0] == "vllm" for name in names) else {}
    sizes = {name: getattr(chosen, name) for name in ("steps", "rounds", "threads")} | {"vllm_environment": versions}
    return {"settings": sizes, "others_cpu_use": others, "quiet": others <= MOST_FOR_OTHERS, "rows": rows}


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    certified = certificate(["benchmarks/vllm_rollouts.py", *arguments])
    result = {"benchmark": "vllm_rollouts", "certificate": certified} | measure(chosen)
    publish_result("vllm_rollouts", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
