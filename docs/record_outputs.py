"""Records what the verbs print: ``docs/outputs/VERB.txt``, a command and its output, for the pages of the verbs.

`python docs/record_outputs.py [VERB...]` runs the commands of ``COMMANDS`` on a small model with random weights and
small data in a temporary folder. tests/unit/docs/test_outputs.py runs them again and compares the lines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OUTPUTS = Path(__file__).resolve().parent / "outputs"
_TRAIN = "train.steps=4 train.global_batch_size=8 train.micro_batch_size=4 data.seq_length=128"

COMMANDS: dict[str, str] = {
    "version": "isthmus version",
    "doctor": "isthmus doctor --quick",
    "init": "isthmus init --model model --data chats.jsonl --out run.yaml",
    "plan": "isthmus plan preset:llama3.1-8b --gpus 8xMI300X --top 3",
    "data view": "isthmus data view chats.jsonl --tokenizer model -n 1",
    "prepare": "isthmus prepare text.jsonl prepared/text --tokenizer model",
    "pretrain": f"isthmus pretrain --model model --data prepared/text --out runs/pretrain --nproc 2 parallel.tp=2 "
    f"{_TRAIN}",
    "sft": f"isthmus sft --model model --data chats.jsonl --out runs/sft {_TRAIN}",
    "dpo": f"isthmus dpo --model runs/sft/hf --data pairs.jsonl --out runs/dpo {_TRAIN}",
    "kto": f"isthmus kto --model runs/sft/hf --data labels.jsonl --out runs/kto {_TRAIN}",
    "reward": f"isthmus reward --model runs/sft/hf --data pairs.jsonl --out runs/reward {_TRAIN}",
    "distill": f"isthmus distill --model model --data chats.jsonl --out runs/distill distill.teacher=runs/sft/hf "
    f"{_TRAIN}",
    "grpo": "isthmus grpo --model runs/sft/hf --data prompts.jsonl --out runs/grpo rollout.reward=exact_match "
    f"rollout.max_new_tokens=16 rollout.group_size=4 {_TRAIN}",
    "report": "isthmus report runs/sft",
    "chat": "echo 'Say the number 7.' | isthmus chat runs/sft --max-new-tokens 12",
    "convert": "isthmus convert model checkpoints/model --to torch_dist",
    "verify": "isthmus verify model checkpoints/model --logits",
    "merge": "isthmus merge model runs/lora/adapter merged",
    "bench": "isthmus bench run.yaml train.micro_batch_size=2,4 --warmup 1 --steps 2",
    "launch": "isthmus launch kubernetes sft run.yaml --out runs/a --gpus 8xH100 launch.nodes=2 "
    "launch.image=isthmus:1 launch.volumes.shared=/shared --dry-run",
    "config show": "isthmus config show preset:llama3.2-1b-sft",
    "config ls": "isthmus config ls qwen3 lora",
    "config cp": "isthmus config cp llama3.2-1b-sft mine.yaml",
    "config schema": "isthmus config schema > isthmus.schema.json && head -n 12 isthmus.schema.json",
    "config from-megatron": "isthmus config from-megatron train.sh",
    "config from-llamafactory": "isthmus config from-llamafactory llamafactory.yaml --data chats.jsonl --nproc 2",
    "config from-axolotl": "isthmus config from-axolotl axolotl.yaml --nproc 2",
    "config from-trl": "isthmus config from-trl trl.yaml --nproc 2",
    "config from-swift": "isthmus config from-swift swift.yaml --nproc 2",
    "config to-megatron": "isthmus config to-megatron pretrain.yaml",
    "config from-env": "isthmus config from-env llama3 MBS=2 BS=128 TP=1 SEQ_LENGTH=8192 MODEL_SIZE=8 TOTAL_ITERS=50",
    "completion": "isthmus completion bash | head -n 6",
}  # fmt: skip
"""Verb -> the command whose output its page shows, in the order in which they need each other."""
UNRECORDED: dict[str, str] = {
    "demo": "it runs for minutes; the [tutorial](../../tutorial.md) describes its output",
    "eval": "its tasks download data sets",
    "tune": "its table is about the libraries of a GPU",
    "run": "it needs a checkout of Megatron-LM",
    "patch checkpoint-saver": "it needs a checkout of Megatron-LM",
    "patch runtime": "it changes the Python environment",
    "config from-primus": "it needs the config files of Primus",
    "config from-verl": "it needs a config that verl wrote",
}
"""Verb -> the reason why its page shows no output."""
_PREPARATION = {
    "merge": f"isthmus sft --model model --data chats.jsonl --out runs/lora lora.rank=4 {_TRAIN}",
}
_SHIM = '#!/bin/sh\nexec "{python}" -m isthmus "$@"\n'


def make_inputs(folder: Path) -> None:
    """The model and the data files of the commands."""
    from isthmus.hf.tiny_model import build_tiny_qwen3

    pairs = [(f"Say the number {number}.", f"The number is {number}.") for number in range(64)]
    build_tiny_qwen3(
        folder / "model", (text for pair in pairs for text in pair), vocab_size=512, hidden_size=64,
        intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    records: dict[str, list[Any]] = {
        "chats": [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs],
        "text": [b for _, b in pairs] * 8,
        "pairs": [{"prompt": a, "chosen": b, "rejected": "No."} for a, b in pairs],
        "labels": [{"prompt": a, "completion": b, "label": n % 2 == 0} for n, (a, b) in enumerate(pairs)],
        "prompts": [{"prompt": a, "answer": b} for a, b in pairs],
    }
    wrap = {"chats": "messages", "text": "text"}
    for name, rows in records.items():
        lines = [json.dumps({wrap[name]: row} if name in wrap else row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    for name, text in FILES.items():
        (folder / name).write_text(text)


FILES = {
    "pretrain.yaml": "recipe: pretrain\nout: runs/megatron\nmodel: {path: model}\n"
    "data: {files: [text.jsonl], seq_length: 128}\n"
    "train: {steps: 100, global_batch_size: 8, micro_batch_size: 4}\n",
    "train.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16 --train-iters 100 "
    "--lr 1e-4 --tensor-model-parallel-size 2 --data-path text --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model model --bf16 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights\n",
    "llamafactory.yaml": "model_name_or_path: model\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n"
    "dataset: chats\ntemplate: qwen\ncutoff_len: 128\noutput_dir: runs/llamafactory\n"
    "per_device_train_batch_size: 2\nlearning_rate: 1.0e-4\nnum_train_epochs: 1\nbf16: true\n",
    "axolotl.yaml": "base_model: model\ndatasets:\n  - path: chats.jsonl\n    type: chat_template\nsequence_len: 128\n"
    "sample_packing: true\nmicro_batch_size: 2\nnum_epochs: 1\nlearning_rate: 1e-5\noutput_dir: runs/axolotl\n",
    "trl.yaml": "model_name_or_path: model\ndataset_name: chats.jsonl\nmax_length: 128\n"
    "per_device_train_batch_size: 2\nlearning_rate: 2.0e-5\nnum_train_epochs: 1\noutput_dir: runs/trl\n",
    "swift.yaml": "model: model\ntrain_type: full\ndataset: [chats.jsonl]\nmax_length: 128\n"
    "per_device_train_batch_size: 2\nlearning_rate: 1e-5\nnum_train_epochs: 1\noutput_dir: runs/swift\n",
}


def command_output(command: str, folder: Path) -> str:
    """What the command prints in ``folder``, errors included; raises if it fails."""
    programs = folder.parent / "bin"
    programs.mkdir(exist_ok=True)
    shim = programs / "isthmus"
    shim.write_text(_SHIM.format(python=sys.executable))
    shim.chmod(0o755)
    shown = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE")}
    environment = shown | {"PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode not in (0, 141) and not command.startswith("isthmus doctor"):
        raise RuntimeError(f"{command}\nended with {done.returncode}:\n{done.stdout}")
    text = done.stdout.replace(f"{folder}/", "").replace(str(folder), ".").replace(str(Path.home()), "~")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n")


def run_verb(verb: str, folder: Path) -> str:
    """The output of the verb's command, after the command that it needs."""
    if verb in _PREPARATION:
        command_output(_PREPARATION[verb], folder)
    return command_output(COMMANDS[verb], folder)


def main(verbs: list[str]) -> None:
    """Run all commands, since later ones use the outputs of earlier ones, and write those of ``verbs``."""
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        folder.mkdir()
        make_inputs(folder)
        for verb, command in COMMANDS.items():
            path = OUTPUTS / f"{verb.replace(' ', '-')}.txt"
            try:
                text = run_verb(verb, folder)
            except RuntimeError as error:
                print(error)
                failed.append(verb)
                continue
            if not verbs or verb in verbs:
                path.write_text(f"$ {command}\n{text}\n", encoding="utf-8")
                print(path.name, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
