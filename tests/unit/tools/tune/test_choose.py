"""isthmus tune measures the matmuls of a model, and runs use its file."""

from __future__ import annotations

import inspect
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.cli.main import parse_and_run
from isthmus.config.load import load_config
from isthmus.config.schema import RunConfig
from isthmus.engine.linear import matmul as matmul_module
from isthmus.engine.linear.matmul_table import MatmulShape
from isthmus.engine.linear.tuned_matmuls import read_tuned
from isthmus.engine.moe.gemm_choice import Timing
from isthmus.errors import IOFailure, OutputExists, UsageError
from isthmus.platforms.cpu import CpuPlatform
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from isthmus.recipes.plan.step_matmuls import StepMatmul, token_counts, tuning_messages
from isthmus.tools.tune import choose as module
from isthmus.tools.tune import measure, run_tune, tunable_op
from isthmus.tools.tune.choose import choose, with_shorter
from isthmus.tools.tune.measure import Operands, compare
from isthmus.tools.tune.run_tune import config_to_tune

LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
SETTINGS = [f"model.config={json.dumps(LLAMA)}", "data.seq_length=32", "platform=cpu", "train.precision=fp32"]
CPU = CpuPlatform(reason="")


def small(m: int = 16, part: str = "forward") -> StepMatmul:
    return StepMatmul("mlp.linear_fc1", part, MatmulShape("matmul", m, 8, 24, True, torch.float32), 2)


@pytest.mark.slow
def test_a_run_uses_the_file_that_was_measured_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    path = tmp_path / "new" / "tune.json"
    before = torch.get_num_threads()
    assert parse_and_run(["tune", *SETTINGS, "--out", str(path), "--json"]) == 0
    assert torch.get_num_threads() == before and matmul_module._table is None
    result = json.loads(capsys.readouterr().out)
    rows = {(row["weight"], row["part"]): row for row in result["matmuls"]}
    assert len(rows) == len(result["matmuls"]) == 15
    assert rows["mlp.linear_fc1", "weight gradient"] | {"ms": 1} == rows["mlp.linear_fc1", "weight gradient"] | {
        "m": 192, "k": 32, "n": 64, "count": 2, "dtype": "float32", "ms": 1,
    }  # fmt: skip
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in rows.values())
    assert read_tuned(path).threads == result["threads"]

    config = load_config("pretrain", None, [*SETTINGS, "model.init=random", "out=o", "data.mock=true", "train.steps=1"])

    def messages(**changed: Any) -> tuple[str, ...]:
        values = config.model_dump(mode="json")
        for name, section in ({"tune": {"file": str(path)}} | changed).items():
            values[name] |= section
        checked = RunConfig.model_validate(values)
        plan = plan_model(open_run_model(checked), checked, world_size=checked.parallel.tp)
        return tuning_messages(checked, plan, CPU, checked.train.precision or "fp32")

    assert messages() == ("tune.file: 15 of 15 matmuls of this run were measured, 100% of their FLOPs",)
    assert messages(data={"seq_length": 24})[0].startswith("tune.file: 15 of 15")  # any length on a CPU
    assert messages(tune={"file": None}) == ()
    with pytest.raises(UsageError, match="has none of the 15 matmuls of this run"):
        messages(train={"precision": "bf16"})
    with pytest.raises(UsageError, match=r"with parallel\.fsdp"):
        messages(parallel={"fsdp": True})
    other = tmp_path / "other.json"
    other.write_text(path.read_text().replace(torch.__version__, "1.0"))
    with pytest.raises(UsageError, match=r"torch is .* here and 1\.0 in the file"):
        messages(tune={"file": str(other)})
    csv = tmp_path / "tune.csv"
    csv.write_text("Validator,PT_VERSION,2.9.0\n")
    with pytest.raises(UsageError, match="of TunableOp, for AMD GPUs, and this run is on cpu"):
        messages(tune={"file": str(csv)})
    csv.write_text("my thesis")
    with pytest.raises(OutputExists, match="is no file of isthmus tune"):
        parse_and_run(["tune", *SETTINGS, "--out", str(csv)])
    capsys.readouterr()
    with pytest.raises(IOFailure, match="cannot be written"):
        parse_and_run(["tune", *SETTINGS, "--out", str(csv / "tune.json")])
    assert "matmuls" not in capsys.readouterr().err  # not measured


def test_the_lengths_of_micro_batches() -> None:
    def lengths(*overrides: str) -> list[int]:
        return token_counts(config_to_tune(None, [*SETTINGS, *overrides], None))

    assert lengths() == [32] and lengths("train.micro_batch_size=2") == [64]
    assert lengths("parallel.tp=2", "parallel.cp=2", "data.seq_length=33") == [20]  # 40: each of 2 ranks has 2 chunks
    assert lengths("data.length_buckets=[16,32]") == [16, 32]
    assert lengths("recipe=dpo") == lengths("recipe=dpo", "data.files=[a.json]") == [64]
    assert with_shorter([64], 1) == [16, 32, 64] and with_shorter([6], 4) == [4]


def test_experts_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    words = [*SETTINGS[1:], f"model.config={json.dumps(LLAMA | experts)}", "parallel.ep=2"]
    plan = plan_model(
        open_run_model(config_to_tune(None, words, None)), config_to_tune(None, words, None), world_size=2
    )
    seen: list[Any] = []

    def time_gemms(*arguments: Any) -> tuple[Timing, Timing]:
        seen.append(arguments[:3])
        return Timing("matmuls", 0.5, 1.0, 0.0), Timing("weight gradients", 2.0, 1.0, 0.0)

    monkeypatch.setattr(run_tune, "time_gemms", time_gemms)
    what = "experts: 4 of 96 x 64 and 64 x 48: "
    assert run_tune._expert_note(plan, CPU, "bf16", 32) == (
        f"{what}a loop of GEMMs, whose rows differ in each micro batch; not measured"
    )
    gpu: Any = SimpleNamespace(device_type="cuda")
    assert "not measured" in run_tune._expert_note(plan, gpu, "fp32", 32) and not seen
    note = run_tune._expert_note(plan, gpu, "bf16", 32)
    assert note.startswith(f"{what}matmuls by grouped_mm (0.50 ms") and seen == [(4, ((96, 64), (64, 48)), 64)]


def test_choices_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library or a number of threads replaces the default only where it is clearly faster."""
    times = {
        "forward": {(4, "default"): 10.0, (4, "onednn"): 8.0, (2, "default"): 9.0, (2, "onednn"): 9.9},
        "input gradient": {(4, "default"): 10.0, (4, "onednn"): 9.9, (2, "default"): 5.0, (2, "onednn"): 5.0},
    }
    monkeypatch.setattr(module, "_thread_counts", lambda: [4, 2])
    monkeypatch.setattr(module, "cores_in_use", lambda: 3)
    monkeypatch.setattr(module, "default_library", lambda *_: "default")
    monkeypatch.setattr(module, "compare", lambda operands, candidates, **_: times[operands.part])
    monkeypatch.setattr(module, "Operands", lambda matmul, _device: SimpleNamespace(part=matmul.part, a=None, b=None))
    both = [small(part="forward"), small(32, part="input gradient")]
    result = choose(both, CPU, lambda _line: None)
    assert result.threads == 2 and [row.chosen for row in result.rows] == ["MKL", "MKL"]
    assert [(row.default_ms, row.ms) for row in result.rows] == [(10.0, 9.0), (10.0, 5.0)]
    times["input gradient"] |= {(2, "default"): 10.5, (2, "onednn"): 10.5}
    result = choose(both, CPU, lambda _line: None)
    assert result.threads == 4 and [row.chosen for row in result.rows] == ["oneDNN", "MKL"]
    assert json.loads(result.content)["matmuls"][0]["library"] == "onednn"
    assert any(note.startswith("other processes use 3 of") for note in result.notes)
    assert result.total_ms(tuned=False) == 40.0 and result.total_ms(tuned=True) == 36.0


def test_wrong_and_failing_candidates_are_left_out() -> None:
    operands = Operands(small(), torch.device("cpu"))

    @contextmanager
    def wrong() -> Any:
        operands.a.mul_(2)
        yield
        operands.a.div_(2)

    @contextmanager
    def fails() -> Any:
        raise RuntimeError("not supported")
        yield

    @contextmanager
    def right() -> Any:
        yield

    result = compare(operands, {"a": right, "b": wrong, "c": fails, "d": right}, seconds=0)
    assert set(result) == {"a", "d"} and min(result.values()) > 0


class TunableOp:
    """Finds a kernel for each new product while tuning is on; ``torch.cuda.tunable`` on ROCm."""

    def __init__(self) -> None:
        self.enabled = self.tunes = False
        self.results: dict[tuple[str, str], tuple[str, float]] = {}
        self.file = ""

    def see(self, m: int, k: int, n: int) -> None:
        if self.enabled and self.tunes:
            key = "GemmTunableOp_float_TN", f"tn_{n}_{m}_{k}_ld_{k}_{k}_{n}"
            self.results.setdefault(key, (f"Gemm_Hipblaslt_{len(self.results)}", 0.5))

    def enable(self, val: bool = True) -> None:
        self.enabled = val

    def is_enabled(self) -> bool:
        return self.enabled

    def tuning_enable(self, val: bool = True) -> None:
        self.tunes = val

    def tuning_is_enabled(self) -> bool:
        return self.tunes

    def set_filename(self, filename: str, insert_device_ordinal: bool = False) -> None:
        self.file = filename

    def set_max_tuning_duration(self, duration: int) -> None: ...

    def set_max_tuning_iterations(self, iterations: int) -> None: ...

    def get_validators(self) -> Any:
        return (("PT_VERSION", "2.9.0"), ("ROCM_VERSION", "7.0"))

    def get_results(self) -> Any:
        return tuple((*key, *value) for key, value in self.results.items())


def test_gpu_kernels_are_measured_by_tunable_op(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = TunableOp()
    for name in (name for name in vars(TunableOp) if not name.startswith("_") and name != "see"):
        real, ours = inspect.signature(getattr(torch.cuda.tunable, name)), inspect.signature(getattr(fake, name))
        assert list(real.parameters) == list(ours.parameters), name
    monkeypatch.setattr(torch.cuda, "tunable", fake)
    inner = Operands.run

    def run(self: Operands) -> torch.Tensor:
        if not self.adds:
            fake.see(self.a.size(0), *self.b.shape)
        return inner(self)

    def compare(operands: Operands, candidates: Any, **_: Any) -> dict[str, float]:
        with candidates["tuned"]():
            assert fake.enabled and not fake.tunes and matmul_module._tunable_op
            operands.run()
        with candidates["default"]():
            assert not fake.enabled
        return {"default": 2.0, "tuned": 1.99 if operands.a.size(0) == 32 else 1.0}

    monkeypatch.setattr(Operands, "run", run)
    monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(module, "_GPU", torch.device("cpu"))
    adds = StepMatmul("w", "weight gradient", MatmulShape("add_matmul", 24, 16, 8, False, torch.float32), 1)
    lines: list[str] = []
    result = choose([small(16), small(32), small(16, "again"), adds], SimpleNamespace(name="rocm"), lines.append)  # type: ignore[arg-type]
    assert [row.chosen for row in result.rows] == ["Gemm_Hipblaslt_0", "Default", "Gemm_Hipblaslt_0", "Default"]
    assert [row.gain for row in result.rows] == [2.0, 1.0, 2.0, 1.0] and len(lines) == 4
    assert result.notes == ["weight gradient: TunableOp has no kernels for it, because it is added to float32"]
    assert result.content.splitlines() == [
        "Validator,PT_VERSION,2.9.0", "Validator,ROCM_VERSION,7.0",
        "GemmTunableOp_float_TN,tn_24_16_8_ld_8_8_24,Gemm_Hipblaslt_0,0.5",
        "GemmTunableOp_float_TN,tn_24_32_8_ld_8_8_24,Default,0.5",
    ]  # fmt: skip
    (tmp_path / "tune.csv").write_text(result.content)
    assert read_tuned(tmp_path / "tune.csv").covers(small(16).shape)
    assert not fake.enabled and not Path(fake.file).parent.exists()
    fake.enable = lambda val=True: None  # type: ignore[method-assign]
    fake.enabled = True
    with pytest.raises(UsageError, match="Unset the variables PYTORCH_TUNABLEOP"), tunable_op.tuning():
        pass
    assert measure.MARGIN < 1
