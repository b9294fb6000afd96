"""A translation's YAML is a config again, with everything else in its comments."""

from __future__ import annotations

from pathlib import Path

from isthmus.config.dialects.translation import Translation, World
from isthmus.config.dialects.written import nested, start_command, values_of, write_translation
from isthmus.config.load import settle


def _translation() -> Translation:
    found = Translation("pretrain", world=World(nproc_per_node=8))
    found.put("model.config", {"model_type": "llama", "rope_scaling": {"factor": 8.0}}, "--num-layers 32")
    found.put("model.init", "random", "--num-layers 32")
    found.put("data.sets", {"a": {"files": ["a  b.jsonl"], "weight": 0.3}}, "--data-path 0.3 'a  b.jsonl'")
    found.put("optim.lr", 1e-5, "--lr 1e-5")
    found.put("out", "runs/" + "long name " * 30, "--save")
    found.remark("--use-flash-attn", "otherwise", "Attention is chosen by the platform. " * 5)
    return found


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(write_translation(_translation()))
    settled = settle(None, file)
    assert settled.given == nested(_translation()) | {
        name: {} for name in ("tokenizer", "parallel", "moe", "train", "checkpoint", "logging")
    }
    opening = file.read_text().split("recipe:")[0]
    assert "isthmus pretrain run.yaml --nproc 8" in opening
    assert "--use-flash-attn: done otherwise." in " ".join(opening.split())
    assert all(line.startswith("#") and len(line) < 120 for line in opening.splitlines())
    assert "  lr: 1.0e-05  # --lr 1e-5\n" in file.read_text()


def test_the_command_has_the_ranks() -> None:
    assert start_command("sft", World()) == "isthmus sft run.yaml"
    several = World(nnodes=2, node_rank=1, master_addr="a", master_port=6000)
    wanted = (
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node gpu --master-addr a --master-port 6000 -m isthmus sft x"
    )
    assert start_command("dpo", several, "x") == wanted
    assert values_of(_translation())["world"]["nproc_per_node"] == 8
