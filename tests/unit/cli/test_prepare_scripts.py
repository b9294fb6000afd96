"""The scripts that prepare data sets, with a Hub on this machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from isthmus.data.store.indexed_dataset import open_indexed
from isthmus.hf.tiny_model import build_tiny_qwen3
from unit.hub_server import HubServer, serve_hub

ROOT = Path(__file__).resolve().parents[3]
LINES = [f"Sentence {number} of a document." for number in range(30)]
CHATS = [{"instruction": line, "input": "", "output": "Ja."} for line in LINES]
WIKI = """---
configs:
- config_name: 20231101.en
  data_files:
  - split: train
    path: 20231101.en/train-*
---
"""


def parquet(rows: list[str]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), sink)
    return sink.getvalue()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = build_tiny_qwen3(tmp_path_factory.mktemp("model") / "m", LINES, vocab_size=300, hidden_size=16,
                              intermediate_size=16, num_hidden_layers=1)  # fmt: skip
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    repositories = {
        "meta-llama/Llama-3.1-8B": files,
        "deepseek-ai/DeepSeek-V2-Lite": files,
        "datasets/wikimedia/wikipedia": {
            "README.md": WIKI.encode(), "20231101.en/train-00000-of-00001.parquet": parquet(LINES[:20]),
        },
        "datasets/DKYoon/SlimPajama-6B": {"data/train-00000-of-00001.parquet": parquet(LINES[:10])},
        "datasets/shibing624/alpaca-zh": {"alpaca.json": json.dumps(CHATS).encode()},
    }  # fmt: skip
    with serve_hub(repositories) as server:
        yield server


def start(line: str, folder: Path, hub: HubServer) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["bash", "-c", line], text=True, env=environment, cwd=folder, **pipes)


@pytest.mark.thorough
@pytest.mark.processes
def test_data_sets_are_downloaded_and_tokenized(hub: HubServer, tmp_path: Path) -> None:
    llama, deepseek = (f"bash {ROOT}/examples/{name}/prepare_dataset.sh" for name in ("llama", "deepseek_v2"))
    samples = {
        (f"DATASET=wiki {llama}", "data/wiki_text_document"): 20,
        (deepseek, "deepseek-datasets/mmap_deepseekv2_datasets_text_document"): 10,
        (f"DATASET=alpaca_zh {deepseek}", "deepseek-datasets/alpaca_zh_chat_document"): 30,
    }
    started = [start(line, tmp_path, hub) for line, _ in samples]
    for process, ((line, prefix), number) in zip(started, samples.items(), strict=True):
        output, _ = process.communicate()
        assert process.returncode == 0, f"{line}: {output}"
        assert open_indexed(tmp_path / prefix).lengths.size == number, output
