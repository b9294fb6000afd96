"""``isthmus chat`` answers like transformers, turn by turn."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from isthmus.cli.main import main, parse_and_run
from isthmus.errors import UsageError
from isthmus.hf.chat_session import ChatSession, Sampling
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tiny_model import build_tiny_qwen3, generate

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "run" / "hf"  # as a run exports it
    return build_tiny_qwen3(folder, ["Paris is a city. Grüße, 城市!"] * 8, vocab_size=300, scaled_init=True, **SIZES)


def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str, *words: str) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert parse_and_run(["chat", *words, "--max-new-tokens", "6"]) == 0
    return capsys.readouterr().out.removesuffix("\n").split("\n")


@pytest.mark.slow
def test_turns_are_a_conversation(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = "\n".join(talk(monkeypatch, capsys, "Hi\nAnd then?\n/reset\nHi\n/exit\nHi\n", str(model.parent)))
    first = generate(model, [[{"role": "user", "content": "Hi"}]], max_new_tokens=6)[0]
    turns = [("user", "Hi"), ("assistant", first), ("user", "And then?")]
    second = generate(model, [[{"role": role, "content": text} for role, text in turns]], max_new_tokens=6)[0]
    assert out == f"{first}\n{second}\n{first}"


@pytest.mark.slow
def test_commands(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*turns: tuple[str, str]) -> str:
        return generate(model, [[{"role": role, "content": text} for role, text in turns]], max_new_tokens=6)[0]

    lines = ["/system Be brief.", "Hi", "/clear", "Hi", "/system", "Hi", "/help", "/nonsense", "/etc is what?", "/quit"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "Hi"])))
    assert parse_and_run(["chat", str(model), "--max-new-tokens", "6"]) == 0
    printed = capsys.readouterr()
    brief, plain = answer(("system", "Be brief."), ("user", "Hi")), answer(("user", "Hi"))
    last = answer(("user", "Hi"), ("assistant", plain), ("user", "/etc is what?"))
    assert printed.out == f"{brief}\n{brief}\n{plain}\n{last}\n"
    assert "/system TEXT" in printed.err and "/nonsense is not a command; /help lists them" in printed.err


@pytest.mark.slow
def test_the_prompts_of_a_file_are_answered(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    words = ["chat", str(model), "--file", str(file), "--out", str(out), "--max-new-tokens", "6", "--system", "Short."]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße"}]
    records = [{"id": 7, "prompt": "Hi"}, {"messages": messages}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(words) == 0
    first = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi"}]
    expected = generate(model, [first], max_new_tokens=6) + generate(model, [messages], max_new_tokens=6)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [record | {"answer": text} for record, text in zip(records, expected, strict=True)]
    assert "2 answers" in capsys.readouterr().err
    assert main(words) == 73 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "Hi"}\n{"text": "Hi"}', "prompts.jsonl:2: expected an object with prompt or messages"),
        ('{"prompt": "Hi", "answer": "x"}', "prompts.jsonl:1: has a field answer already"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "the last message is of the assistant"),
        ('{"prompt": "Hi"}\n{', "prompts.jsonl:2: not JSON"),
    ],
)
def test_prompts_are_checked_before_the_model_is_loaded(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text(lines)
    assert main(["chat", str(tmp_path / "no-model"), "--file", str(file), "--out", str(out)]) == 65
    assert message in capsys.readouterr().err and not out.exists()
    assert main(["chat", "m", "--file", str(file)]) == 2 and "--file needs --out" in capsys.readouterr().err


@pytest.mark.slow
def test_template_and_system_prompt_of_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "hf").symlink_to(model)
    settings = {"model": {"path": str(model)}, "data": {"files": ["a"]}, "chat": {"system": "Be brief."}}
    (run / "config.yaml").write_text(json.dumps({"recipe": "sft", "out": str(run), **settings}))
    turns = [("system", "Be brief."), ("user", "Hi")]
    expected = generate(model, [[{"role": role, "content": text} for role, text in turns]], max_new_tokens=6)[0]
    assert "\n".join(talk(monkeypatch, capsys, "Hi", str(run))) == expected
    session = session_of(model, template="zephyr")
    assert session.describe().endswith("; chat")
    assert session._prompt("Hi", [{"role": "user", "content": "Hi"}]) == session.tokenizer.encode(
        "<|user|>\nHi<|im_end|>\n<|assistant|>\n"
    )


@pytest.mark.slow
def test_system_prompt_and_sampling(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("system", "Be brief."), ("user", "Hi")]
    expected = generate(model, [[{"role": role, "content": text} for role, text in turns]], max_new_tokens=6)[0]
    assert "\n".join(talk(monkeypatch, capsys, "Hi", str(model), "--system", "Be brief.")) == expected
    sampled = ["--temperature", "5", "--seed", "1"]
    once, again = (talk(monkeypatch, capsys, "Hi", str(model), *sampled) for _ in range(2))
    assert once == again != talk(monkeypatch, capsys, "Hi", str(model), "--temperature", "5", "--seed", "2")


def session_of(model: Path, **more: str) -> ChatSession:
    return ChatSession(
        ModelFolder.open(model),
        Sampling(50),
        device="cpu",
        trust_remote_code=False,
        **{"template": None, "system": None, **more},
    )


@pytest.mark.slow
def test_a_stop_ends_the_answer_and_keeps_its_text(model: Path) -> None:
    session, pieces = session_of(model), []

    def show(piece: str) -> None:
        pieces.append(piece)
        session.stop_requested = True

    answer = session.answer("Hi", show)
    assert answer == "".join(pieces) and session.messages[-1] == {"role": "assistant", "content": answer}
    longer = session_of(model).answer("Hi", lambda _: None)
    assert longer.startswith(answer) and len(longer) > len(answer)


@pytest.mark.slow
def test_a_model_without_template_completes(tmp_path: Path, model: Path) -> None:
    base = build_tiny_qwen3(tmp_path / "base", ["Paris is a city."] * 8, vocab_size=300, scaled_init=True, **SIZES)
    (base / "chat_template.jinja").unlink()
    session = session_of(base)
    assert session.answer("Paris", lambda _: None) == generate(base, ["Paris"], max_new_tokens=50)[0]
    assert not session.messages and "it completes each text" in session.describe()
    with pytest.raises(UsageError, match=r"no chat template, so it has no system prompt"):
        session_of(base, system="Be brief.")


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path / "none")]) == 66
    assert "does not exist" in capsys.readouterr().err


def test_interrupt_ends_only_the_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.cli.chat import _interrupt_ends_answer

    session = session_of(model)
    before = signal.getsignal(signal.SIGINT)
    with _interrupt_ends_answer(session):
        os.kill(os.getpid(), signal.SIGINT)
        assert session.stop_requested
    assert signal.getsignal(signal.SIGINT) is before
