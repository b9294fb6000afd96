"""Each fenced block of the documentation is run, is read by another test, or has a reason why it cannot run here.

Commands run in this process in a folder with a small model under all the names that pages use. Training commands run
with ``--dry-run``, which checks settings, model, data, layout and memory for all ranks.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from isthmus.cli.main import parse_and_run
from isthmus.config.recipes import RECIPE_SETTINGS
from isthmus.data.chat.chat_records import kinds_of
from isthmus.data.chat.rollout_records import parse_prompt
from isthmus.launch.engines import job
from isthmus.tools.report.live_server import LiveServer
from unit.config.dialects.examples import MODEL_FILES, experiment
from unit.config.test_trainers import VERL
from unit.data.records import read_records

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

READ_BY = {
    "yaml": "tests/unit/test_docs.py loads it as a config",
    "jsonl": "tests/unit/data/test_formats_page.py parses it",
    "csv": "tests/unit/data/test_formats_page.py parses it",
    "console": "tests/unit/docs/test_outputs.py runs the command",
}
"""Languages whose blocks another test reads."""
REASONS = {
    r"make (demo|test|docs|setup|gpu|gpu-quick|dist|release-dry)\b|\(cd [AB] && make gpu":
        "a target of the checkout, which CI runs",
    r"(OMP_NUM_THREADS=1 \S*python )?(python )?(-m )?pytest |python docs/generate.py|MEGATRON_LM=|source ":
        "part of the checkout",
    r"python make_prompts.py": "reads the data of the demo",
    r"(srun|torchrun|kubectl|xargs torchrun|until|done$|  \[)":
        "starts ranks of a scheduler or of several machines; tests/unit/test_machine_pages.py names the tests",
    r"(vllm_env/bin/)?(pip|git clone|python3.11 -m venv)|cd ": "installs from a package index",
    r"(docker|podman|buildah|apptainer|  -v )": "needs a container runtime",
    r"(vllm|python -m sglang|python llama.cpp|llama-server|ollama|FROM|text-generation-launcher|VLLM_|    --)":
        "a program for serving",
    r"(export|hf auth) ?": "changes the environment of the shell",
    r".*\bbash examples/": "needs a checkout of ROCm's Megatron-LM",
    r".*--push\b": "uploads to the Hub",
    r"isthmus .*\[OPTIONS\]": "the form of a command",
    r"isthmus .*\.\.\.( |$)": "is abridged",
    r"isthmus (bench|tune)\b": "measures for minutes; tests/unit/tools run it on small grids",
    r"isthmus demo\b": "runs for minutes; make demo",
    r"isthmus eval\b": "its tasks are data sets of the Hub",
    r"isthmus (run|patch)\b": "needs a checkout of Megatron-LM; tests/upstream",
    r".*rollout.engine=vllm": "needs vLLM",
    r'eval "\$\(|isthmus completion .*>': "changes the shell of the user",
    r"isthmus .*--rehearse": "trains for minutes; tests/faults run rehearsals",
    r"isthmus convert .*--learn": "runs models for a minute; tests/unit/tools/learn",
    r"isthmus convert out ": "the script of Megatron-LM writes its source",
    r"isthmus sft run.yaml tune.file=": "needs the file of isthmus tune",
    r"isthmus unlearn\b": "the recipe that the guide tells to write",
    r"isthmus prepare .*--engine (ray|slurm)": "needs Ray or Slurm; tests/unit/recipes/data/test_prepare_engines.py",
    r"isthmus prepare .*--filter\b": "needs datatrove; tests/unit/recipes/data/test_clean_documents.py",
    r".*(s3://)": "needs an object store",
}  # fmt: skip
"""Pattern of the start of a line -> why it does not run here."""
MODELS = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "models/Qwen3-0.6B", "models/Qwen3-8B", "models/Qwen2.5-0.5B",
    "models/llama", "models/old", "Qwen3-0.6B", "isthmus-demo/sft/hf",
    "runs/sft/hf", "runs/reward/hf", "playground/pretrain/hf",
    "playground/sft/hf", "Qwen/Qwen3-4B", "MODEL_FOLDER", "models/qwen3", "megatron", "other", "small", "large", "base",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in re.sub(r"\\\n\s*", "", self.text).splitlines() if line.strip()]

    @property
    def has_commands(self) -> bool:
        shell = self.language in ("bash", "sh")
        return shell or (self.language == "text" and bool(re.match(r"(\$ )?isthmus [a-z]", self.text)))


@functools.cache
def all_blocks() -> list[Block]:
    results = []
    for page in PAGES:
        for indent, language, text in re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", page.read_text(), re.M | re.S):
            text = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
            results.append(Block(page.relative_to(ROOT).as_posix(), language, text))
    return results


def reason(line: str) -> str | None:
    """Why a line does not run here."""
    return next((text for pattern, text in REASONS.items() if re.match(pattern, line)), None)


def prepare(folder: Path) -> None:
    """Models, data and configs under the names that pages use."""
    runpy.run_path(str(ROOT / "docs/record_outputs.py"))["make_inputs"](folder)
    for name in MODELS:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / "model")
    prompts = (folder / "prompts.jsonl").read_text()
    (folder / "prompts.jsonl").write_text(prompts.replace('"answer"', '"solution"'))  # chat writes answer
    copies = {"chats": "my-chats.jsonl a.jsonl b.jsonl long.jsonl playground/chats.jsonl", "labels": "answers.jsonl"}
    copies |= {"text": "documents.jsonl corpus.jsonl", "prompts": "heldout.jsonl math.jsonl"}
    for source, names in copies.items():
        for name in names.split():
            (folder / name).write_bytes((folder / f"{source}.jsonl").read_bytes())
    chats = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    for name in ("chats.json", "a.json"):
        (folder / name).write_text(json.dumps(chats))
    (folder / "data").mkdir()
    (folder / "data/part.jsonl.gz").write_bytes(gzip.compress((folder / "text.jsonl").read_bytes()))
    sft = "recipe: sft\nout: runs/new\nmodel: {path: model}\ndata: {files: [chats.jsonl], seq_length: 128}\n"
    steps = "train: {steps: 4, global_batch_size: 32, micro_batch_size: 1}\n"
    for name in ("sft", "run", "mine", "config"):
        (folder / f"{name}.yaml").write_text(sft + steps.replace("steps: 4", "steps: 40"))
    (folder / "pretrain.yaml").write_text((sft + steps).replace("sft", "pretrain").replace("chats", "text"))
    for name in ("train_gpt.sh", "train.sh"):
        (folder / name).write_text((folder / "train.sh").read_text())
    for name, source in {"lora_sft": "llamafactory", "theirs": "trl", "grpo": "trl"}.items():
        (folder / f"{name}.yaml").write_text((folder / f"{source}.yaml").read_text())
    for name in ("rewards", "my_rewards", "my"):
        (folder / f"{name}.py").write_text(
            "def score(completions, **columns):\n    return [0.0 for _ in completions]\n\n\n"
            "right_count = accuracy = compute_score = score\n"
        )
    (folder / "gsm8k").mkdir()
    pyarrow = pytest.importorskip("pyarrow.json", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    parquet.write_table(pyarrow.read_json(folder / "math.jsonl"), folder / "gsm8k/train.parquet")
    (folder / "data/dataset_info.json").write_text('{"chats": {"file_name": "../chats.jsonl"}}')


def train(folder: Path) -> None:
    """The run folders, checkpoints and adapters that pages use: those of two short runs."""
    recorder = runpy.run_path(str(ROOT / "docs/record_outputs.py"))
    sft = "isthmus sft --model model --data chats.jsonl data.seq_length=128 train.steps=2 train.global_batch_size=4"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        for command in (
            f"{sft} --out runs/first", f"{sft} --out runs/lora lora.rank=4",
            "isthmus convert model checkpoints/qwen3", "isthmus prepare text.jsonl prepared/text --tokenizer model",
        ):  # fmt: skip
            recorder["command_output"](command, folder)
    targets = {"runs/first": "runs/a runs/b runs/lr-1e-5 runs/lr-2e-5 runs/tutorial runs/count runs/second"}
    targets["runs/first"] += " runs/sft-Qwen3-0.6B-1 runs/sft-sft-1"
    targets |= {"runs/lora/adapter": "adapters/first adapter", "checkpoints/qwen3": "runs/megatron"}
    targets |= {"runs/first/checkpoints/iter_0000002": "runs/first/checkpoints/iter_0000100"}
    for target, names in targets.items():
        for name in names.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(folder / target)
    for kind in ("bin", "idx"):
        for name in ("web_text_document", "text"):
            (folder / "corpus").mkdir(exist_ok=True)
            (folder / f"corpus/{name}.{kind}").write_bytes((folder / f"prepared/text.{kind}").read_bytes())
        (folder / f"text.{kind}").write_bytes((folder / f"prepared/text.{kind}").read_bytes())


SMALL = {"max_position_embeddings": 8192, "vocab_size": 512, "pad_token_id": 0}
MODELS_OF_PAGES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "docs/how-to/convert-checkpoints.md": {
        # The layouts of the page divide eight layers and eight heads.
        "models/Qwen3-0.6B": (
            "qwen3",
            {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8},
        ),
        "models/Mixtral-8x7B": ("mixtral", {"num_local_experts": 8}),
        "models/mixtral": ("mixtral", {"num_local_experts": 8}),
        "models/some-llama": ("llama", {}),
        "models/old": ("llama", {}),
        "models/Mistral-7B": ("mistral", {"vocab_size": 32000, "sliding_window": None}),
    },
    "docs/how-to/model-and-tokenizer.md": {"models/gpt2": ("gpt2", {})},
    "docs/how-to/multimodal-models.md": {"models/gemma-3-4b-it": ("gemma3", {})},
    "docs/how-to/train-moe-models.md": {"model": ("mixtral", {"num_local_experts": 8})},
}
"""Page -> name of a model -> its family and settings; other models of pages are a small Qwen3."""


def build_models(page: str, folder: Path) -> None:
    """The models of other families and formats that the page names."""
    import torch
    from safetensors.torch import load_file

    from ranks.tiny import build_model_folder, without_checksums

    for name, (family, settings) in MODELS_OF_PAGES.get(page, {}).items():
        target = folder / name
        if target.is_symlink():
            target.unlink()
        target.parent.mkdir(exist_ok=True)
        files = [path for path in (folder / "model").iterdir() if not path.name.startswith(("config", "model"))]
        build_model_folder(target, family, dtype=torch.bfloat16, **(SMALL | settings))
        for file in files:
            if not (target / file.name).exists():
                shutil.copy(file, target)
    if (folder / "models/gemma-3-4b-it").exists():
        (folder / "megatron").unlink()  # the page writes a folder of this name
    old, mistral = folder / "models/old", folder / "models/Mistral-7B"
    if (weights := old / "model.safetensors").exists() and not old.is_symlink():
        torch.save(load_file(weights), old / "pytorch_model.bin")
        weights.unlink()
    if mistral.exists():  # its checkpoint as Megatron-LM writes it, without a config of Hugging Face
        (folder / "runs/megatron").unlink()
        assert parse_and_run(["convert", str(mistral), str(folder / "runs/megatron"), "--to", "torch_dist"]) == 0
        shutil.rmtree(folder / "runs/megatron/hf")
        without_checksums(folder / "runs/megatron")


THEIRS = {"axolotl": "axolotl", "llama-factory": "llamafactory", "ms-swift": "swift"}
"""Page -> config of the program that the page is about."""


def write_files_of_page(page: str, folder: Path) -> None:
    """The files that the page tells to save."""
    text = (ROOT / page).read_text()
    for name, content in re.findall(r"Save this as `([\w.]+)`[^`]*\n```\w+\n(.*?)^```", text, re.M | re.S):
        (folder / name).write_text(content)
    for block in all_blocks():
        if block.page == page and (match := re.match(r"# (\w+\.py)\n", block.text)):
            (folder / match[1]).write_text(block.text)
    if source := THEIRS.get(Path(page).stem):
        (folder / "theirs.yaml").write_text((folder / f"{source}.yaml").read_text())
    hydra = "outputs/2026-11-01/10-00-00/.hydra/config.yaml"
    files = {"theirs.yaml": VERL} if page == "docs/reference/verl.md" else {hydra: VERL}
    if "primus" in page:
        files |= {f"configs/models/megatron/{name}": content for name, content in MODEL_FILES.items()}
        files["llama3.1_8B-pretrain.yaml"] = experiment("llama3.1_8B")
        (folder / "llama").symlink_to(folder / "model")
    files["args.txt"] = (folder / "train.sh").read_text().partition("pretrain_gpt.py ")[2]
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


@pytest.fixture(scope="session")
def trained(prepared: Path) -> Path:
    train(prepared)
    return prepared


@pytest.fixture
def playground(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a page; its models and runs are links."""
    quick = request.node.get_closest_marker("thorough") is None
    source = request.getfixturevalue("prepared" if quick else "trained")
    folder = shutil.copytree(source, tmp_path / "page", symlinks=True)
    page = request.getfixturevalue("page")
    write_files_of_page(page, folder)
    build_models(page, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say the number 7.\n"))  # of the first chat; others end at once
    monkeypatch.setattr(job, "_LOCAL", ())  # the folder is in /tmp, which machines do not share
    monkeypatch.setattr(LiveServer, "serve_forever", interrupt)  # as by Ctrl-C
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def interrupt(server: LiveServer) -> NoReturn:
    raise KeyboardInterrupt


def outputs(arguments: list[str]) -> list[str]:
    """What a command writes, and earlier commands of a page may have written."""
    position = {"convert": 2, "prepare": 2, "merge": 3}.get(arguments[0], 3 if arguments[:2] == ["config", "cp"] else 0)
    results = [arguments[position]] if position else []
    if "--out" in arguments and arguments[0] not in RECIPE_SETTINGS:
        results.append(arguments[arguments.index("--out") + 1])
    return results + (["run.yaml"] if arguments[0] == "init" else [])


def clear(names: list[str]) -> None:
    for path in [path for name in map(Path, names) for path in (name, *name.parent.glob(f"{name.name}.*"))]:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)


QUICKLY = {"launch": ["--dry-run"], "doctor": ["--quick"], "chat": ["--max-new-tokens", "2"]}
"""Verb -> options with which it runs in seconds and on this machine."""


def run_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run one ``isthmus`` command; its output goes to the file after ``>``."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    target = words.index(">") if ">" in words else len(words)
    arguments, file = words[1:target], words[target + 1 :]
    if arguments[0] in RECIPE_SETTINGS:
        arguments += ["--dry-run"] if "--dry-run" not in arguments else []
        arguments += ["--out", "runs/of_a_page"]  # the last one counts
    elif arguments[0] in QUICKLY:
        arguments += [word for word in QUICKLY[arguments[0]] if word not in arguments]
    clear(outputs(arguments))
    capsys.readouterr()
    code = parse_and_run(arguments)
    output = capsys.readouterr()
    # doctor finds what this machine lacks, and Ctrl-C ends a live report.
    expected = (0, 1) if arguments[0] == "doctor" else (130,) if "--live" in arguments else (0,)
    assert code in expected, f"{line}\n{output.err}"
    if file:
        Path(file[0]).write_text(output.out)


NO_COMMAND = {
    "README.md": {"2. Pretrain": "output of isthmus demo"},
    "docs/how-to/containers.md": {
        "docker tag": "needs a container runtime",
        "FROM isthmus": "a Dockerfile of a user", "make dist": "needs Apptainer", "enroot": "needs Enroot",
        "#!/bin/bash": "a script for Slurm with Pyxis", "debootstrap": "needs root; what was built and run",
    },
    "docs/concepts/packed-sequences.md": {"loss =": "a formula"},
    "docs/how-to/add-a-block.md": {
        "RECURRENCES": "code of the package, abridged", "class Short": "code of the package, abridged",
        '"short_convolution"': "code of the package, abridged",
        "MIXER": "code of the package, abridged",
    },
    "docs/how-to/add-a-recipe.md": {
        "class Unlearning": "code of the guide, abridged", "RECIPE": "code of the guide, abridged",
    },
    "docs/how-to/checkpoint-and-resume.md": {
        "resuming from the copy": "a message of many machines", "elastic:": "a message of many machines",
        "isthmus: out/checkpoints": "an error; tests/unit/recipes", "isthmus: runs/a": "an error of two hosts",
    },
    "docs/how-to/config-files.md": {"isthmus 0.1.0": "output on GPUs"},
    "docs/how-to/convert-checkpoints.md": {
        "checkpoints/qwen3/": "a list of files", "logits max": "output of a model with published weights",
        "isthmus: hf/model": "an error of a damaged file; tests/faults",
    },
    "docs/how-to/grpo.md": {"p(before": "a formula"},
    "docs/how-to/install.md": {"platform cuda": "output on GPUs", "python -c": "asks torch for a GPU"},
    "docs/how-to/launch.md": {
        "isthmus: command line": "an error; tests/unit/launch", "#SBATCH": "a written script; tests/unit/launch",
        "slurmstepd": "output of Slurm",
    },
    "docs/how-to/migrate-from-primus.md": {"isthmus pretrain run.yaml": "its tokenizer is on the Hub"},
    "docs/how-to/plan-a-run.md": {"a rank of plan 1": "output of a plan of 16,384 GPUs"},
    "docs/how-to/watch-a-run.md": {
        "url ": "output of a server",
        "spike in": "a message of many machines", "isthmus: the loss": "an error of many machines",
        "warning: rank": "a message of many machines",
    },
    "docs/tutorial-grpo.md": {"step ": "output of a run of five minutes", "echo ": "asks the model of that run"},
    "docs/tutorial.md": {"sft.yaml:9:3": "tests/unit/test_docs.py compares the error"},
}  # fmt: skip
"""Page -> start of a block, or of a line of a shell block, that is no command which runs here, and why."""


def exception(table: dict[str, dict[str, str]], block: Block, text: str) -> str | None:
    """The reason for a block or a line in a table of exceptions."""
    entries = table.get(block.page, {})
    return next((why for start, why in entries.items() if text.lstrip().startswith(start)), None)


def runnable(page: str) -> Iterator[str]:
    for block in all_blocks():
        if block.page == page and block.has_commands:
            for line in block.lines:
                if re.match(r"(\$ )?isthmus ", line) and not (reason(line) or exception(NO_COMMAND, block, line)):
                    yield line


PAGES_WITH_COMMANDS = sorted({block.page for block in all_blocks() if [*runnable(block.page)]})
IN_EACH_TEST_RUN = ("docs/how-to/config-files.md", "docs/how-to/parallelism.md")


@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in IN_EACH_TEST_RUN else pytest.mark.thorough)
        for page in PAGES_WITH_COMMANDS
    ],
)
def test_commands_run(page: str, playground: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in runnable(page):
        run_line(line, capsys)


PYTHON_NOT_RUN = {
    "docs/how-to/use-from-python.md": {
        "import isthmus\n\nbridge": "needs two ranks; tests/ranks/test_bridge.py runs these calls",
        "(model,) =": "part of examples/python/train_loop.py", "keys = dropout": "part of a loop of the user",
        "model = bridge": "needs four ranks; tests/ranks/test_bridge.py",
        "for name, weight": "has an engine of the user",
    },
    "docs/how-to/reward-models.md": {"base = Auto": "loads an adapter of a run; tests/parity compares it with PEFT"},
    "docs/how-to/convert-checkpoints.md": {"model = Auto": "loads a model with code of its own"},
    "docs/tutorial-grpo.md": {"import json": "reads the data of the demo"},
}  # fmt: skip
PRELUDES = {
    "docs/how-to/use-from-python.md": "from dataclasses import replace\nimport isthmus\n"
    "from isthmus.families.models.qwen3 import FAMILY as QWEN3\nfrom isthmus.families.rules.rule import renamed\n"
    "bridge = isthmus.AutoBridge.from_hf_pretrained('models/Qwen3-0.6B')\n",
}
"""Names and folders that a page assumes."""
TROUBLESHOOTING = "docs/how-to/troubleshooting.md"
"""The page whose messages tests/unit/test_troubleshooting.py compares."""


def test_each_block_is_run_or_read_or_has_a_reason() -> None:
    neither = []
    for block in all_blocks():
        if block.language in READ_BY or block.language in ("json", "toml", "python"):
            continue  # all of them, by the tests below and of other files
        if block.has_commands:
            lines = block.lines if block.language != "text" else block.lines[:1]
            results = [
                line.startswith(("isthmus ", "$ isthmus ")) or reason(line) or exception(NO_COMMAND, block, line)
                for line in lines
            ]
        elif block.page == TROUBLESHOOTING:
            continue
        else:
            results = [exception(NO_COMMAND, block, block.text) or all(reason(line) for line in block.lines)]
        if not all(results):
            neither.append(f"{block.page}: {block.lines[0]}")
    assert not neither, "say in REASONS or NO_COMMAND why these do not run, or write a command that runs"


def test_each_exception_is_of_a_block() -> None:
    for table in (NO_COMMAND, PYTHON_NOT_RUN):
        for page, entries in table.items():
            texts = [text for block in all_blocks() if block.page == page for text in (block.text, *block.lines)]
            assert [start for start in entries if not any(text.lstrip().startswith(start) for text in texts)] == [], (
                page
            )


def test_tests_in_reasons_exist() -> None:
    tables = [*NO_COMMAND.values(), *PYTHON_NOT_RUN.values(), READ_BY, REASONS]
    named = {
        path for table in tables for why in table.values() for path in re.findall(r"(?:tests|examples)/[\w/.]+", why)
    }
    assert len(named) > 8
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_json_blocks_are_records(tmp_path: Path) -> None:
    blocks = [block for block in all_blocks() if block.language == "json"]
    assert len(blocks) >= 5
    for block in blocks:
        path = tmp_path / "block.jsonl"
        path.write_text(block.text)
        (record,) = read_records(path)
        assert parse_prompt(record) if "grpo" in block.page else kinds_of(record), block.text


def test_toml_blocks_are_toml() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    (block,) = [block for block in all_blocks() if block.language == "toml"]
    assert "isthmus.families" in tomllib.loads(block.text)["project"]["entry-points"]


def python_code(page: str) -> str:
    """The blocks of a page that run, after what the page assumes."""
    texts = [block for block in all_blocks() if block.page == page and block.language == "python"]
    run = [block.text for block in texts if not exception(PYTHON_NOT_RUN, block, block.text)]
    return "\n".join([PRELUDES.get(page, ""), *run]) if run else ""


PAGES_WITH_PYTHON = sorted(
    {block.page for block in all_blocks() if block.language == "python" and python_code(block.page)}
)
QUICK_PYTHON = ("docs/how-to/add-a-family.md", "docs/how-to/watch-a-run.md")


@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page in QUICK_PYTHON else pytest.mark.thorough) for page in PAGES_WITH_PYTHON],
)
def test_python_runs(page: str, playground: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    clear(["checkpoints/qwen3"])  # the code of a page writes it
    done = subprocess.run([sys.executable, "-c", python_code(page)], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
