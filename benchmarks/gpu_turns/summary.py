"""The tables of a GPU run: aims, speed, where the time goes, tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_turns.cases import CASES
from gpu_turns.measure import CONVENTION

MFU_WANTED = {"llama-1b": 0.50, "layers-8b": 0.55}
FP8_WANTED, MOE_LAYER_WANTED, SAME_LOSS = 1.25, 0.40, 0.01
Parts = Mapping[str, Mapping[str, Any]]


def aims(parts: Parts) -> list[dict[str, Any]]:
    """Each aim with its limit and the measured value; None where a contestant has not run, or the peak is unknown."""
    return [
        {
            "aim": text,
            "wanted": f"{'<=' if at_most else '>='} {expected}",
            "got": got,
            "met": _met(got, expected, at_most),
        }
        for text, expected, got, at_most in _aims(parts)
    ]


def _met(got: float | None, target: float, at_most: bool) -> bool | None:
    return None if got is None else got <= target if at_most else got >= target


def _aims(parts: Parts) -> Iterator[tuple[str, float, float | None, bool]]:
    def value(name: str, key: str) -> float | None:
        result: float | None = parts.get(name, {}).get(key)
        return result

    for case, expected in MFU_WANTED.items():
        yield f"{case}: MFU in bf16", expected, value(f"{case}/isthmus", "mfu"), False
    for case, described in CASES.items():
        bf16 = value(f"{case}/isthmus", "tokens_per_s")
        if "isthmus-fp8" in described.contestants:
            fast = value(f"{case}/isthmus-fp8", "tokens_per_s")
            yield f"{case}: tokens/s of FP8 / bf16", FP8_WANTED, fast / bf16 if fast and bf16 else None, False
        (rival,) = (name for name in described.contestants if name.startswith("transformers") and "compiled" in name)
        other = value(f"{case}/{rival}", "tokens_per_s")
        yield f"{case}: tokens/s of isthmus / {rival}", 1.0, bf16 / other if bf16 and other else None, False
    for row in parts.get("moe-layer", {}).get("rows", [{"contestant": "isthmus", "model": "moe-layer"}]):
        if row["contestant"] == "isthmus":
            yield f"MoE layer {row['model']}: MFU in bf16", MOE_LAYER_WANTED, row.get("mfu"), False
    for case, described in CASES.items():
        losses = [loss for name in described.contestants if (loss := value(f"{case}/{name}", "first_loss"))]
        apart = max(losses) / min(losses) - 1 if len(losses) > 1 else None
        yield f"{case}: first losses of all contestants differ by, relative", SAME_LOSS, apart, True


def summary(result: Mapping[str, Any]) -> str:
    """The whole result as Markdown."""
    parts, certified = result["parts"], result["certificate"]
    described = ", ".join(f"{name} {text}" for name, text in certified["packages"].items())
    lines = [
        f"# GPU run on {certified['device']}",
        "",
        f"{certified['date']}, commit {certified['commit']}{' with changes' if certified['dirty'] else ''}, "
        f"source {certified['source_sha256'][:12]}; {described}.",
        *(["", "**A dry run of tiny models on a CPU: its numbers mean nothing.**"] if result["dry"] else []),
        *_table("Aims", ["aim", "wanted", "got", ""], [_aim(item) for item in result["aims"]]),
        *_table(
            "Speed",
            ["model", "contestant", "tokens/s", "TFLOP/s", "MFU", "peak GiB", "start-up s", "step ms"],
            [_speed(case, name, parts) for case, item in CASES.items() for name in item.contestants],
        ),
        "",
        f"TFLOP/s: {CONVENTION}. MFU: of the peak of the precision. Peak GiB: reserved by the allocator. Start-up: "
        "from the start of the process to the end of the first step.",
    ]
    rows = parts.get("moe-layer", {}).get("rows", ())
    lines += _table("One MoE layer", ["model", "contestant", "ms", "TFLOP/s", "MFU"], [_layer(row) for row in rows])
    for case in CASES:
        lines += _profile(case, parts)
    lines += _table("Tests", ["file", "passed", "failed", "skipped"], [*_tests(parts)])
    failures = [
        f"- `{name}`: {outcome['state']}: {_short(outcome['error'])}"
        for name, outcome in parts.items()
        if "error" in outcome
    ]
    failures += [
        f"- `{name}` {test}: {_short(why)}"
        for name, outcome in parts.items()
        for test, why in outcome.get("failed", {}).items()
    ]
    return "\n".join([*lines, *(["", "## Failures", "", *failures] if failures else []), ""])


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [[*heads], ["---"] * len(heads), *rows]
    return ["", f"## {title}", "", *("| " + " | ".join(cells) + " |" for cells in lines)]


def _aim(aim: Mapping[str, Any]) -> list[str]:
    verdict = {True: "met", False: "**not met**", None: "not measured"}[aim["met"]]
    return [aim["aim"], aim["wanted"], "" if aim["got"] is None else f"{aim['got']:.3f}", verdict]


def _speed(case: str, name: str, parts: Parts) -> list[str]:
    result = parts.get(f"{case}/{name}", {"state": "not run"})
    if result["state"] != "done":
        return [
            case,
            name,
            f"{result['state']}: {result['absent']}" if "absent" in result else result["state"],
            *[""] * 5,
        ]
    mfu = "" if result["mfu"] is None else f"{result['mfu']:.1%}"
    numbers = [f"{result['tokens_per_s']:,.0f}", f"{result['tflops']:,.1f}", mfu, f"{result['memory_gib']:.1f}"]
    return [case, name, *numbers, f"{result['startup_s']:.1f}", f"{1e3 * result['step_time_s']:.1f}"]


def _layer(row: Mapping[str, Any]) -> list[str]:
    mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return [row["model"], row["contestant"], f"{1e3 * row['time_s']:.2f}", f"{row['tflops']:,.1f}", mfu]


def _profile(case: str, parts: Parts) -> list[str]:
    """Shares of the step by part, one column a contestant, the largest parts first."""
    names = [name for name in CASES[case].contestants if "profile" in parts.get(f"{case}/{name}", {})]
    profiles = [parts[f"{case}/{name}"]["profile"] for name in names]
    rows = sorted(
        {row for profile in profiles for row in profile}, key=lambda row: -max(item.get(row, 0) for item in profiles)
    )
    cells = [[row, *(f"{profile[row]:.1%}" if row in profile else "" for profile in profiles)] for row in rows]
    return _table(f"Where the time of a step goes: {case}", ["part", *names], cells)


def _tests(parts: Parts) -> Iterator[list[str]]:
    for name, result in parts.items():
        if name.startswith("tests/") and "passed" in result:
            skipped = "; ".join(sorted(set(result["skipped"].values())))
            yield [
                name,
                str(result["passed"]),
                str(len(result["failed"])),
                f"{len(result['skipped'])} {skipped}".strip(),
            ]


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
