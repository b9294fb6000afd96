"""Rewards of answers: functions with TRL's signature, shipped rewards, their sum, their errors and their deadline."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus import extras
from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, Hang, IsthmusError, MissingInput, UsageError
from isthmus.recipes.rollout import limited_process
from isthmus.recipes.rollout.rewards import Rewards, RewardTable, check_rewards, load_rewards

Q = [{"role": "user", "content": "2 + 2?"}]
CPU = torch.device("cpu")
needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed (extra: rl)"
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``rewards.py`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "rewards.py"


def config(*rewards: str, **rollout: Any) -> RunConfig:
    values = {
        "recipe": "grpo",
        "out": "run",
        "model": {"path": "model"},
        "data": {"files": ["data.jsonl"]},
        "rollout": {"reward": list(rewards), **rollout},
    }
    return RunConfig.model_validate(values)


def rewards_of(*rewards: str, **rollout: Any) -> Rewards:
    return load_rewards(config(*rewards, **rollout), CPU)


def compute(
    rewards: Rewards, answers: Sequence[str] = ("4", "5"), prompt: Any = "2 + 2?", **columns: Sequence[Any]
) -> RewardTable:
    records: list[Mapping[str, Any]] = [
        {"prompt": prompt} | {name: values[k] for name, values in columns.items()} for k in range(len(answers))
    ]
    return rewards.compute(records, answers, [[k, 7] for k in range(len(answers))], step=3, total_steps=12)


def values(*rewards: str, answers: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    table = compute(rewards_of(*rewards), answers, **columns)
    assert table.values.shape == (len(answers), len(rewards))
    return [float(value) for value in table.values[:, 0]]


def test_a_function_gets_the_arguments_of_trl(module: Path) -> None:
    module.write_text("seen = {}\ndef f(prompts, completions, **kwargs):\n    seen.update(locals()); return [1, 0.5]\n")
    table = compute(rewards_of("rewards.py:f"), prompt=Q, answer=["4", "four"])
    seen = sys.modules[[name for name in sys.modules if name.startswith("reward_file_")][-1]].seen
    assert seen["prompts"] == [Q, Q]
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    others = seen["kwargs"]
    assert others.keys() == {"completion_ids", "answer", "trainer_state", "log_extra", "log_metric"}
    assert others["completion_ids"] == [[0, 7], [1, 7]] and others["answer"] == ["4", "four"]
    state = others["trainer_state"]
    assert (state.global_step, state.max_steps, state.epoch) == (3, 12, 0.25)
    assert table.values.tolist() == [[1.0], [0.5]] and table.totals.tolist() == [1.0, 0.5]


def test_completions_of_a_text_prompt_are_texts(module: Path) -> None:
    module.write_text("def f(completions):\n    return [float(text == '4') for text in completions]\n")
    assert compute(rewards_of("rewards.py:f")).totals.tolist() == [1.0, 0.0]


def test_a_field_that_a_record_lacks_is_none(module: Path) -> None:
    module.write_text("def f(hint, **kwargs):\n    return [float(value is None) for value in hint]\n")
    records: list[Mapping[str, Any]] = [{"prompt": "a"}, {"prompt": "b", "hint": "x"}]
    assert rewards_of("rewards.py:f").compute(records, ["1", "2"], [[1], [2]]).totals.tolist() == [1.0, 0.0]


def test_a_function_of_a_module(module: Path) -> None:
    module.with_name("my_rewards.py").write_text(
        "class Length:\n    def __call__(self, completions):\n"
        "        return [len(text) for text in completions]\nlength = Length()\n"
    )
    assert compute(rewards_of("my_rewards:length"), ["4", "four"]).totals.tolist() == [1.0, 4.0]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_with_the_signature_of_verl(module: Path, kind: str) -> None:
    module.write_text(
        f"{kind} compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums' and extra_info == {'split': 'train'}\n"
        "    return {'score': float(solution_str == ground_truth), 'other': 1}\n"
    )
    fields = {"data_source": "sums", "extra_info": {"split": "train"}, "level": 1}
    table = compute(
        rewards_of("rewards.py:compute_score"),
        prompt=Q,
        ground_truth=["4", "4"],
        **{name: [value] * 2 for name, value in fields.items()},
    )
    assert table.totals.tolist() == [1.0, 0.0]


def test_a_mapping_without_a_score(module: Path) -> None:
    module.write_text("def f(solution_str):\n    return {'accuracy': 1}\n")
    with pytest.raises(UsageError, match=r"returned \{'accuracy': 1\} for answer 1 of 2"):
        compute(rewards_of("rewards.py:f"))


def test_a_file_is_run_once_and_imports_its_neighbours(module: Path) -> None:
    module.with_name("scale_of_rewards.py").write_text("SCALE = 3\n")
    module.write_text(
        "from pathlib import Path\nfrom scale_of_rewards import SCALE\n"
        "with Path(__file__).with_name('runs').open('a') as file: file.write('x')\n"
        "def f(completions):\n    return [SCALE for _ in completions]\n"
        "def g(completions):\n    return [1 for _ in completions]\n"
    )
    check_rewards(config("rewards.py:f", "rewards.py:g"))
    table = compute(rewards_of("rewards.py:f", str(module) + ":g"))
    assert table.values.tolist() == [[3.0, 1.0], [3.0, 1.0]]
    assert module.with_name("runs").read_text() == "x"


def test_weighted_sum_of_the_rewards_that_apply(module: Path) -> None:
    module.write_text("def f(completions):\n    return [None, 2]\n")
    table = compute(rewards_of("rewards.py:f", "exact_match", reward_weights=[0.5, 2.0]), answer=["4", "4"])
    np.testing.assert_array_equal(table.values, [[math.nan, 1.0], [2.0, 0.0]])
    assert table.totals.tolist() == [2.0, 1.0] and table.warning is None


def test_an_answer_without_reward_is_reported(module: Path) -> None:
    module.write_text("def f(completions):\n    return [None, 2]\n")
    table = compute(rewards_of("rewards.py:f"), ["a\x1b[2J", "b"], answer=["4", "4"])
    np.testing.assert_array_equal(table.totals, [math.nan, 2.0])
    assert table.warning is not None and "applies to 1 of 2 answers; the first is 'a\\x1b[2J'" in table.warning
    assert "{'answer': '4'}" in table.warning


def test_no_reward_for_any_answer(module: Path) -> None:
    module.write_text("def f(completions):\n    return [None, None]\n")
    with pytest.raises(DataError, match="no reward applies to 2 of 2 answers"):
        compute(rewards_of("rewards.py:f"))


def test_asynchronous_functions_run_at_the_same_time(module: Path) -> None:
    module.write_text(
        "import asyncio\n"
        "class Pair:\n    first = None\n"
        "async def f(completions):\n    Pair.first = asyncio.Event(); await Pair.first.wait(); return [1, 2]\n"
        "async def g(completions):\n"
        "    while Pair.first is None: await asyncio.sleep(0)\n"
        "    Pair.first.set(); return [3, 4]\n"
    )
    table = compute(rewards_of("rewards.py:f", "rewards.py:g", timeout_s=60.0))
    assert table.values.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_functions_log_columns_and_metrics(module: Path) -> None:
    module.write_text(
        "def f(completions, log_extra, log_metric):\n"
        "    log_extra('length', [len(text) for text in completions]); log_metric('longest', 4)\n"
        "    return [0, 1]\n"
    )
    table = compute(rewards_of("rewards.py:f"), ["4", "four"])
    assert table.columns == {"length": [1, 4]} and table.metrics == {"longest": 4.0}


@pytest.mark.parametrize("result", ["numpy.array([1, 0.5])", "torch.tensor([1, 0.5])", "(numpy.float32(1), True / 2)"])
def test_numbers_of_libraries(module: Path, result: str) -> None:
    module.write_text(f"import numpy, torch\ndef f(completions):\n    return {result}\n")
    assert compute(rewards_of("rewards.py:f")).totals.tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ("[1, float('nan')]", "returned nan for answer 2 of 2, '5'. Expected a finite number, or None"),
        ("[float('inf'), 1]", "returned inf for answer 1 of 2, '4'"),
        ("['1', 1]", "returned '1' for answer 1 of 2"),
        ("[[1], [1]]", r"returned \[1\] for answer 1 of 2"),
        ("[1]", "returned 1 reward for 2 answers. Return one each"),
        ("{0: 1, 1: 1}", "returned {0: 1, 1: 1} of type dict. Expected a list of 2 numbers"),
        ("None", "returned None of type NoneType"),
        ("numpy.float64(1)", r"returned np.float64\(1.0\) of type float64"),
    ],
)
def test_bad_values(module: Path, result: str, why: str) -> None:
    module.write_text(f"import numpy\ndef f(completions):\n    return {result}\n")
    with pytest.raises(UsageError, match=f"^rollout.reward rewards.py:f {why}"):
        compute(rewards_of("rewards.py:f"))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_raises(module: Path, kind: str) -> None:
    module.write_text(
        "def parse(text):\n    return int(text)\n"
        f"{kind} f(completions):\n    return [parse(text) for text in completions]\n"
    )
    with pytest.raises(UsageError) as failure:
        compute(rewards_of("rewards.py:f"), ["4", "\x1b[2J"])
    lines = str(failure.value).split("\n")
    assert lines[0].startswith(f"rollout.reward rewards.py:f raised ValueError at {module}:2. ")
    assert [line.strip() for line in lines][-2:] == [
        f"{module}:2 in parse: return int(text)",
        "ValueError: invalid literal for int() with base 10: '\\x1b[2J'",
    ]


def test_an_exception_of_a_library_is_reported_at_the_line_of_the_user(module: Path) -> None:
    module.write_text("import json\ndef f(completions):\n    return [json.loads(text) for text in completions]\n")
    with pytest.raises(UsageError, match=rf"raised JSONDecodeError at {module}:3\."):
        compute(rewards_of("rewards.py:f"), ["4", "four"])


def test_a_function_that_exits(module: Path) -> None:
    module.write_text("def f(completions):\n    raise SystemExit(0)\n")
    with pytest.raises(UsageError, match="raised SystemExit at"):
        compute(rewards_of("rewards.py:f"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    ["def slow(**kwargs):\n    import time; time.sleep(60)", "async def slow(**kwargs):\n    await asyncio.sleep(60)"],
)
def test_the_deadline_names_the_slow_reward(module: Path, body: str) -> None:
    module.write_text(f"import asyncio\n{body}\ndef fast(completions):\n    return [1, 1]\n")
    rewards = rewards_of("rewards.py:fast", "rewards.py:slow", timeout_s=1.5)
    with pytest.raises(Hang, match=r"^rollout.reward rewards.py:slow did not finish: .*2 answers.*timeout_s=1.5"):
        compute(rewards)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "rewards")


@pytest.mark.parametrize(
    ("setting", "answers", "columns", "expected"),
    [
        ("exact_match", [" 4\n", "5"], {"answer": ["4", "4"]}, [1.0, 0.0]),
        ("exact_match", ["4", "4"], {"answer": [4, 4.0]}, [1.0, 1.0]),
        ("exact_match", ["4", "4"], {"answer": [["four", "4"], ["four"]]}, [1.0, 0.0]),
        ("exact_match", ["2 + 2 = 4\n#### 4", "4"], {"answer": ["2 and 2\n#### 4"] * 2}, [1.0, 1.0]),
        ("exact_match", ["<think>4</think>\n5", "<think>5</think>4"], {"answer": ["4"] * 2}, [0.0, 1.0]),
        ("exact_match", ["4", "4"], {"label": ["5", None], "ground_truth": ["4", "4"]}, [1.0, 1.0]),
        ("exact_match", ["4", "4"], {"label": ["5", "4"], "ground_truth": [None, None]}, [0.0, 1.0]),
        ("exact_match:label", ["4", "4"], {"label": ["5", "4"], "answer": ["4", "4"]}, [0.0, 1.0]),
    ],
)
def test_shipped_rewards(setting: str, answers: list[str], columns: dict[str, Any], expected: list[float]) -> None:
    assert values(setting, answers=answers, **columns) == expected


def test_a_record_without_right_answer_has_no_reward() -> None:
    table = compute(rewards_of("exact_match"), answer=["4", None])
    np.testing.assert_array_equal(table.totals, [1.0, math.nan])


def test_a_right_answer_that_is_no_text() -> None:
    with pytest.raises(DataError, match=r"must be text, a number, or a list of them, got {'target': \['4'\]}"):
        compute(rewards_of("exact_match"), answer=[{"target": ["4"]}] * 2)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("exact_match", "reads the field ground_truth or answer or label or solution, .*: hint. .*exact_match:COLUMN"),
        ("exact_match:gold", "reads the field gold, which no record has. Their fields: hint"),
        ("rewards.py:f", "reads the field gold, which no record has. .*give it a default"),
    ],
)
def test_fields_that_no_record_has(module: Path, setting: str, why: str) -> None:
    module.write_text("def f(completions, gold, hint, other=None, **kwargs):\n    return []\n")
    with pytest.raises(DataError, match=f"^rollout.reward {setting} {why}"):
        rewards_of(setting).check_columns(["hint"])


def test_fields_that_some_records_have(module: Path) -> None:
    module.write_text("def f(completions, gold, trainer_state):\n    return []\n")
    rewards_of("exact_match", "format:a", "rewards.py:f").check_columns(["label", "gold"])


@pytest.mark.parametrize(
    ("setting", "error", "why"),
    [
        ("absent.py:f", MissingInput, "absent.py does not exist"),
        ("rewards.py", UsageError, "lacks a function. Give rewards.py:FUNCTION"),
        ("rewards.py:accuracy", MissingInput, "no function 'accuracy' in rewards.py. Did you mean accuracies"),
        ("rewards.py:", MissingInput, "no function ''.* It has: accuracies"),
        ("rewards.py:SCALE", UsageError, "SCALE is a int, not a function"),
        ("broken.py:f", UsageError, "raised SyntaxError"),
        ("failing.py:f", UsageError, "raised ZeroDivisionError at .*failing.py:1"),
        ("absent_module:f", MissingInput, "there is no module absent_module"),
        ("importing:f", UsageError, "raised ModuleNotFoundError at .*importing.py:1"),
        ("format:(", UsageError, "not a regular expression of Python: missing"),
        ("format:", UsageError, "lacks an expression"),
        ("format", UsageError, "lacks an expression"),
        ("exact_match:", UsageError, "lacks a field. Give exact_match:COLUMN"),
        ("exact_mach", MissingInput, "is no reward: expected FILE.py:FUNCTION, exact_match, .*exact_mach does not"),
    ],
)
def test_rewards_that_do_not_exist(module: Path, setting: str, error: type[IsthmusError], why: str) -> None:
    module.write_text("SCALE = 1\ndef accuracies(completions):\n    return []\n")
    module.with_name("broken.py").write_text("def f(:\n")
    module.with_name("failing.py").write_text("1 / 0\n")
    module.with_name("importing.py").write_text("import absent_library\n")
    with pytest.raises(error, match=f"(?s)^rollout.reward .*{why}"):
        check_rewards(config(setting))


def test_a_file_is_not_run_before_the_cheap_checks(module: Path) -> None:
    module.write_text("from pathlib import Path\nPath('run').touch()\ndef f(completions):\n    return []\n")
    with pytest.raises(UsageError, match="not a regular expression"):
        check_rewards(config("rewards.py:f", "format:("))
    assert not module.with_name("run").exists()


def test_math_verify_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs math_verify \(not installed\)\. Run pip install 'isthmus\[rl\]'"):
        check_rewards(config("math_verify"))


@needs_math_verify
@pytest.mark.processes
def test_math_verify() -> None:
    pairs = [
        (r"So $x = \frac{1}{2}$.", "0.5", 1.0),
        (r"The answer is \boxed{1,234}", "1234", 1.0),
        (r"\boxed{5}", "4", 0.0),
        ("2 and 2.\n#### 4", "so\n#### 4", 1.0),
        ("<think>4</think>5", "4", 0.0),
        ("nothing", "4", 0.0),
        ("4", "no mathematics", math.nan),
        ("4", None, math.nan),
        ("4", ["5", "4"], 1.0),
    ]
    answers, right, expected = zip(*pairs, strict=True)
    np.testing.assert_array_equal(values("math_verify:gold", answers=answers, gold=right), expected)


@needs_math_verify
@pytest.mark.processes
def test_an_answer_that_math_verify_cannot_end_is_wrong_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "LIMIT_S", 1)
    endless = r"\boxed{9^{9^{9^{9}}}}"
    table = compute(rewards_of("math_verify"), [endless, endless, "4"], answer=["4"] * 3)
    assert table.totals.tolist() == [0.0, 0.0, 1.0]
    assert table.metrics["math_verify_failures"] == 2.0


@pytest.mark.processes
def test_expressions() -> None:
    rewards = rewards_of("format:<a>.*</a>", r"format:\d:\d")
    table = compute(rewards, ["<a>\n</a>", "<a></a>!", "1:2", "1", '"\u2028"\n'])
    assert table.values.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert table.metrics["format_failures"] == 0.0


@pytest.mark.processes
def test_an_expression_that_backtracks_without_end_gets_0_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "LIMIT_S", 1)
    rewards = rewards_of("format:(a+)+b", "format:(a|aa)+b")
    table = compute(rewards, ["aab", "a" * 60, "aab"])
    assert table.values.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert table.metrics["format_failures"] == 2.0


@pytest.mark.processes
def test_an_expression_that_backtracks_without_end_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "LIMIT_S", 2)
    with pytest.raises(Hang, match=r"format:\(a\+\)\+b did not finish: the rewards of 1 answer took more than"):
        compute(rewards_of("format:(a+)+b", timeout_s=0.5), ["a" * 60])
