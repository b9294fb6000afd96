"""bash runs a script with stand-ins, which record the training run and start nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from isthmus.config.dialects.megatron.training_command import script_command
from isthmus.config.dialects.megatron.translate_megatron import translate_command
from isthmus.config.dialects.scripts import restricted_script
from isthmus.config.dialects.scripts.stand_in import may_train
from isthmus.config.dialects.translation import World
from isthmus.errors import MissingInput, UnsafeInput, UsageError

TRAIN = "torchrun pretrain_gpt.py --num-layers 2"
SCRIPT = r"""
#!/bin/bash
#SBATCH -N 2
export NCCL_DEBUG=WARN HF_TOKEN=hf_secret
OUT=${1:-"checkpoints"}
LAYERS=$(python -c 'print(1 + 1)')
ARGS=( --num-layers $LAYERS --save "$OUT/a b" )
if [ -f data.json ]; then ARGS+=( --bf16 ); fi
for name in lr min-lr; do ARGS+=( --$name $((2 * 2)) ); done
python prepare.py --input x
srun -N 2 torchrun --nproc_per_node 8 --nnodes 2 --node-rank 1 --master-addr $(echo node0) pretrain_gpt.py \
    ${ARGS[@]:0:2} "${ARGS[@]:2}" < /dev/null 2>&1 | tee log.txt
"""

ROCM_SCRIPT = r"""#!/bin/bash
LIST=$(rdma_of_no_machine link -j | python3 -c "import sys, json; print(json.load(sys.stdin)[0])")
for ARGUMENT in "$@"; do
   KEY=$(echo $ARGUMENT | cut -f1 -d=)
   export "$KEY"="${ARGUMENT:${#KEY}+1}"
done
CWD=`pwd`
GPUS=`python3 -c "import no_torch; print(no_torch.cuda.device_count())"`
WORLD_SIZE=$(($GPUS*${NNODES:-1}))
if ! [ -d tokenizer ]; then
  mkdir -p tokenizer
  wget --header="Authorization: Bearer hf_secret" -O tokenizer/tokenizer.json http://127.0.0.1:9/tokenizer.json
fi
if [[ ${SIZE:-8} -ne 8 ]]; then echo "Not supported."; exit 1; fi
export TUNING=1
ARGS="
    --num-layers 2 \
    --micro-batch-size $MBS \
"
if [ "${TE_FP8:-1}" -eq 1 ]; then
ARGS="$ARGS --transformer-impl=te \
    --fp8-format=hybrid \
"
fi
run_cmd="
    torchrun --nproc_per_node $GPUS --nnodes $NNODES --node_rank 0 --master_addr localhost --master_port 6000 \
        pretrain_gpt.py $ARGS --eval-iters -1   \
"
run_cmd="$run_cmd |& tee $CWD/log.txt"
eval $run_cmd
grep -Eo 'throughput per GPU [^|]*' log.txt | sed -E 's/.*: ([0-9\.]+).*/\1/' > tmp.txt
rm tmp.txt
"""


pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Scripts call `python`, which not every system has.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


def script(text: str) -> Path:
    path = Path("train.sh")
    path.write_text(text)
    return path


def test_the_training_run_is_recorded_and_other_commands_run() -> None:
    Path("data.json").write_text("")
    Path("prepare.py").write_text("open('prepared', 'w')")
    command = script_command(script(SCRIPT), ["runs"])
    assert command.script == "pretrain_gpt.py" and command.world == World(2, 1, 8, "node0")
    assert command.flags == ("--num-layers", "2", "--save", "runs/a b", "--bf16", "--lr", "4", "--min-lr", "4")
    assert command.environment == {"NCCL_DEBUG": "WARN", "HF_TOKEN": "..."}
    assert Path("prepared").exists() and Path("log.txt").exists()


@pytest.mark.parametrize(
    "start",
    [
        "export PATH=$PWD/venv/bin:$PATH\nexec python pretrain_gpt.py --num-layers 2",
        f"{sys.executable} -u pretrain_gpt.py --num-layers 2 &",
        f"eval {TRAIN}; exit 3",
        "sbatch --export ALL inner.sh",
        "srun -N 2 bash inner.sh",
        "touch log.txt; sbatch -o log.txt inner.sh",
        f"export PYTHONPATH=/none; {sys.executable} pretrain_gpt.py --num-layers 2",
        "python submit.py",
    ],
)
def test_every_way_to_start_a_training_run_is_recorded(start: str) -> None:
    Path("venv/bin").mkdir(parents=True)
    Path("venv/bin/python").write_text("#!/bin/sh\ntouch started\n")
    os.chmod("venv/bin/python", 0o755)
    Path("pretrain_gpt.py").write_text("open('started', 'w')")
    Path("inner.sh").write_text(f"#!/bin/bash\n{TRAIN}\n")
    Path("submit.py").write_text("import subprocess; subprocess.run(['sbatch', 'inner.sh'], check=True)")
    assert script_command(script(start)).flags == ("--num-layers", "2")
    assert not Path("started").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{TRAIN}\n{TRAIN} --seed 3", r"starts 2 training runs.*\n  torchrun .* 2\n  torchrun .*--seed 3"),
        (
            "echo hello; srun hostname; exit 3",
            r"(?s)It ended with exit code 3 after train.sh:1: exit 3\nits output:\n  hello\n  .*not run: srun hostname",
        ),
        ("python train_tokenizer.py", r"no training run with --num-layers, only:\n  python train_tokenizer.py"),
        ("sleep 60", r"was stopped after 0.3 s"),
    ],
)
def test_scripts_without_exactly_one_training_run(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        script_command(script(text), time_limit_s=0.3 if text.startswith("sleep") else 60.0)
    with pytest.raises(MissingInput):
        script_command(Path("none.sh"))


def test_a_script_with_backticks_downloads_and_eval() -> None:
    """The constructs of ROCm's scripts, on a machine without GPUs: its count of them is empty."""
    command = script_command(script(ROCM_SCRIPT), ["MBS=4", "NNODES=2"])
    assert command.script == "pretrain_gpt.py" and command.world == World(2, 0, None, "localhost", 6000)
    words = "--num-layers 2 --micro-batch-size 4 --transformer-impl=te --fp8-format=hybrid --eval-iters -1"
    assert command.flags == tuple(words.split())
    assert "TUNING" in command.environment and not Path("tokenizer/tokenizer.json").exists()
    assert Path("log.txt").read_text() == ""
    with pytest.raises(UsageError, match=r"exit code 1 after train.sh:14: exit 1\nits output:\n(.*\n)*  Not supported"):
        script_command(script(ROCM_SCRIPT), ["SIZE=9"])


def test_commands_that_may_train_beside_the_training_run_are_named() -> None:
    command = script_command(script(f"python train_tokenizer.py --vocab 9\n{TRAIN}"))
    assert (command.flags, command.not_run) == (("--num-layers", "2"), ("python train_tokenizer.py --vocab 9",))
    more = "--hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1"
    more += " --mock-data"
    remarks = translate_command(command, more.split()).translation.remarks
    assert any(remark.option == "python train_tokenizer.py --vocab 9" for remark in remarks)


def test_secrets_are_hidden_and_similar_names_are_not() -> None:
    secrets = {"wandb_api_key": "a", "MY_PASSWD": "b", "PROXY": "http://me:word@host"}
    exports = " ".join(f"{name}={value}" for name, value in (secrets | {"TOKENIZER_MODEL": "m"}).items())
    environment = script_command(script(f"export {exports}\n{TRAIN}")).environment
    assert environment == dict.fromkeys(secrets, "...") | {"TOKENIZER_MODEL": "m"}


def test_ranks_of_srun() -> None:
    command = script_command(script("srun --nodes=2 --ntasks-per-node 8 python -u pretrain_gpt.py --num-layers 2"))
    assert (command.world.nnodes, command.world.nproc_per_node) == (2, 8)


def test_commands_that_may_train() -> None:
    for words in (
        "python -m torch.distributed.run x.py",
        "torchrun x.py",
        "python3 -u a/finetune_llama.py",
        "x --lr 1",
        "srun -c 8 -m block python train.py",
    ):
        assert may_train(words.split()), words
    for words in (
        "python -c 1",
        "python -m pip install x",
        "python tools/preprocess_data.py --workers 2",
        "srun date",
        "srun -c 8 python -c 1",
    ):
        assert not may_train(words.split()), words


@pytest.mark.parametrize(
    "command",
    [
        "touch made", "/bin/mkdir made", "command -p mkdir made", "echo > made", "echo >> made", "cd /", "exec ls",
        ". ./other.sh", "PATH=/bin:/usr/bin", "enable kill", "kill -0 $$", "srun /bin/bash other.sh", "python other.py",
        "hash -p /bin/mkdir torchrun", "X=$(date -d yesterday +%F)", "X=$(python3 -c 'print(2)')",
        "BASH_ENV= bash other.sh",
    ],
)  # fmt: skip
def test_a_restricted_script_starts_nothing(command: str) -> None:
    Path("other.sh").write_text("mkdir made")
    Path("other.py").write_text("open('made', 'w')")
    with pytest.raises(UsageError, match=r"more than set variables(?s:.*)With --run train.sh"):
        script_command(script(f"{command}\n{TRAIN}"), restricted=True)
    assert sorted(os.listdir()) == ["other.py", "other.sh", "train.sh"]


def test_harmless_programs_of_a_restricted_script() -> None:
    text = "mkdir -p made; X=$(date +2 | tee made)\nnone 2>/dev/null || Y=4\ntorchrun a.py --num-layers $X --lr $Y"
    command = script_command(script(text), restricted=True)
    assert command.flags == ("--num-layers", "2", "--lr", "4")
    assert command.not_run == ("line 2: none 2>/dev/null || Y=4",)
    assert os.listdir() == ["train.sh"]
    Path("other.sh").write_text("\n\n\nnone 2>/dev/null || Y=4\n")
    with pytest.raises(UsageError, match=r"other.sh: line 4: /dev/null: restricted"):
        script_command(script(f". other.sh\n{TRAIN}"), restricted=True)


def test_a_restricted_script_sets_variables() -> None:
    lines = ["set -euo pipefail", "export N=$((2 * ${1:-1}))", 'ARGS="--num-layers $N"', "for x in 1 2; do Y=$x; done"]
    lines += ['if [[ $N -gt 2 ]]; then ARGS+=" --lr `echo $Y`"; fi']
    lines += ['eval "torchrun --nproc_per_node 2 pretrain_gpt.py $ARGS" 2>&1']
    recorded = script_command(script("\n".join(lines)), ["3"], restricted=True)
    assert recorded.flags == ("--num-layers", "6", "--lr", "2") and recorded.environment == {"N": "6"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("while :; do :; done", r"was stopped after 0.5 s: a script has"),
        ("f() { while :; do :; done | f; }; f", r"was stopped at 4 processes: .*With --run"),
        ("for x in {1..100000000}; do :; done", r"more than 1 GiB of memory, .*cannot allocate"),
        ("ARGS=$(</etc/passwd)", r"a file outside its folder.*/etc/passwd: Permission denied"),
        ("while read X; do ARGS=$X; done < .env", r"or a hidden one.*.env: Permission denied"),
        ("ARGS=$(<link)", r"a file outside its folder.*link: Permission denied"),
        ("ARGS=$(</proc/$PPID/environ)", r"a file outside its folder.*environ: Permission denied"),
        ("echo $CHAT_BOT", r"reads CHAT_BOT from the environment.*unset CHAT_BOT.*With --run"),
        ("ARGS=${SERVICE_TOKEN:-0}", r"reads SERVICE_TOKEN from the environment"),
    ],
)
def test_limits_of_a_restricted_script(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "secret")
    monkeypatch.setenv("CHAT_BOT", "secret")
    if "| f" in text:
        monkeypatch.setattr(restricted_script, "PROCESSES", 4)
    Path(".env").write_text("secret")
    Path("link").symlink_to("/etc/passwd")
    with pytest.raises(UnsafeInput, match=message):
        script_command(
            script(f"{text}\n{TRAIN} --x $ARGS"), restricted=True, time_limit_s=0.5 if "while :" in text else None
        )


def test_a_restricted_script_reads_its_folder_and_usual_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MBS": "2",
        "NCCL_DEBUG": "WARN",
        "SLURM_NNODES": "4",
        "OTHER": "x",
        "S3_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    Path("layers.txt").write_text("6")
    text = "OTHER=y\nexport OTHER ALL=$(declare -p S3_KEY 2>&1)\n"
    text += "torchrun --nnodes $SLURM_NNODES x.py --num-layers $(<layers.txt) --micro-batch-size $MBS"
    command = script_command(script(text), restricted=True)
    assert command.flags == ("--num-layers", "6", "--micro-batch-size", "2") and command.world.nnodes == 4
    assert command.environment["OTHER"] == "y" and "not found" in command.environment["ALL"]


def test_a_restricted_script_reads_no_file_without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restricted_script, "restricted_files", lambda *_: None)
    for text in ("X=$(<layers.txt)", "while read X; do :; done < layers.txt", "read X <layers.txt"):
        with pytest.raises(UnsafeInput, match=r"train.sh:2 reads a file, and this system has no Landlock"):
            script_command(script(f"Y=1\n{text}\n{TRAIN}"), restricted=True)
    assert script_command(script(f"read X <<< 'a < b'; Y=$((1 << 2))\n{TRAIN}"), restricted=True).flags
