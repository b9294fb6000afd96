"""The tables of a GPU run: aims, speed, where the time goes, tests."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_turns.cases import CASES, CONTESTANTS, MODELS
from gpu_turns.measure import COMPARED_STEPS, CONVENTION, difference, speed
from gpu_turns.parts import GROUPS, PARTS
from gpu_turns.rows import Row, of_kind

MFU_WANTED = {"llama-1b": 0.50, "layers-8b": 0.55}
FP8_WANTED, MOE_LAYER_WANTED, BANDWIDTH_WANTED, RESUME_WANTED = 1.25, 0.40, 0.70, 1e-3
CPU_LOSSES_WANTED = {"isthmus": 0.01, "isthmus-fp8": 0.02}
"""Mean relative difference of the losses of 200 steps from those in float32 on a CPU."""
COMPILED = ("transformers-compiled", "trainer-compiled")
COMPARED = tuple(name for name in CASES if name != "sft-200")
Parts = Mapping[str, Mapping[str, Any]]


def aims(parts: Parts) -> list[dict[str, Any]]:
    """Each aim with its limit and the measured value; None where it was not measured, or may not be compared."""
    return [
        {
            "aim": text,
            "wanted": f"{'<=' if at_most else '>='} {expected}",
            "got": got,
            "met": None if got is None else got <= expected if at_most else got >= expected,
        }
        for text, expected, got, at_most in (*_speed_aims(parts), *_other_aims(parts))
    ]


def not_the_same(parts: Parts, case: str, name: str) -> str | None:
    """Why the speed of a contestant is not ranked: it trained something else than Isthmus did; None if it may be."""
    mine, other = (of_kind(parts.get(f"{case}/{item}", {}).get("rows", []), "step") for item in ("isthmus", name))
    if name == "isthmus":
        return None
    return difference(mine, other, "fp8" if "fp8" in name else "bf16")


def _tokens_per_s(parts: Parts, case: str, name: str) -> float | None:
    result = _speed_of(parts, case, name)
    return None if result is None or not_the_same(parts, case, name) else result["tokens_per_s"]


def _speed_of(parts: Parts, case: str, name: str) -> dict[str, Any] | None:
    part = parts.get(f"{case}/{name}")
    return None if part is None else speed(part)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _speed_aims(parts: Parts) -> Iterator[tuple[str, float, float | None, bool]]:
    for case, expected in MFU_WANTED.items():
        yield f"{case}: MFU in bf16", expected, (_speed_of(parts, case, "isthmus") or {}).get("mfu"), False
    for group in GROUPS:
        if group.name not in COMPARED:
            continue
        bf16 = _mean(_tokens_per_s(parts, group.name, name) for name in ("isthmus", "isthmus-again"))
        if "isthmus-fp8" in group.turns:
            fast = _tokens_per_s(parts, group.name, "isthmus-fp8")
            yield f"{group.name}: tokens/s of FP8 / bf16", FP8_WANTED, _ratio(fast, bf16), False
        for rival in set(COMPILED) & set(group.turns):
            other = _tokens_per_s(parts, group.name, rival)
            yield f"{group.name}: tokens/s of isthmus / {rival}", 1.0, _ratio(bf16, other), False


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _other_aims(parts: Parts) -> Iterator[tuple[str, float, float | None, bool]]:
    layers = _rows(parts, "moe-layer/run", "layer")
    for row in [row for row in layers if row["contestant"] == "isthmus"] or [{"model": "with 16 experts"}]:
        yield f"MoE layer {row['model']}: MFU in bf16", MOE_LAYER_WANTED, row.get("mfu"), False
    rates = generation_rates(parts)
    for sequences in sorted({key[1] for key in rates}) or [1]:
        mine, bound = rates.get(("isthmus", sequences), (None, None))
        yield f"generation of {sequences} answers: share of the bound", BANDWIDTH_WANTED, _ratio(mine, bound), False
        other, _ = rates.get(("transformers-compiled", sequences), (None, None))
        text = f"generation of {sequences} answers: tokens/s of isthmus / transformers-compiled"
        yield text, 1.0, _ratio(mine, other), False
    steps = {name: _rows(parts, f"grpo/{name}", "grpo") for name in ("isthmus", "trl")}
    seconds = {name: rows[0]["step_s"] if rows else None for name, rows in steps.items()}
    yield "grpo: step time of trl / isthmus", 1.0, _ratio(seconds["trl"], seconds["isthmus"]), False
    resumed = _rows(parts, "saves/run", "resume")
    error = resumed[0]["loss_difference"] if resumed else None
    yield "saves: losses after a kill and resume differ by, relative", RESUME_WANTED, error, True
    exported = _rows(parts, "export/run", "exported")
    yield "export: tensors equal their source", 1.0, float(exported[0]["equal"]) if exported else None, False
    for name, expected in CPU_LOSSES_WANTED.items():
        yield f"sft-200: losses of {name} beside float32 on a CPU", expected, _loss_difference(parts, name), True


def _rows(parts: Parts, name: str, kind: str) -> list[Row]:
    return of_kind(parts.get(name, {}).get("rows", []), kind)


def _loss_difference(parts: Parts, name: str) -> float | None:
    expected, steps = (_rows(parts, f"sft-200/{item}", "step") for item in ("isthmus-fp32-cpu", name))
    number = min(len(expected), len(steps))
    if not number or parts[f"sft-200/{name}"]["state"] != "done":
        return None
    return statistics.fmean(abs(steps[k]["loss"] / expected[k]["loss"] - 1) for k in range(number))


def generation_rates(parts: Parts) -> dict[tuple[str, int], tuple[float, float | None]]:
    """(contestant, sequences) -> median tokens/s, and the bound by the memory bandwidth."""
    rates: dict[tuple[str, int], list[Row]] = {}
    for part in PARTS:
        if part.group.name == "generation":
            for row in _rows(parts, part.name, "generation"):
                rates.setdefault((part.turn, row["sequences"]), []).append(row)
    return {
        key: (statistics.median(row["tokens"] / row["time_s"] for row in rows), rows[0]["bound_tokens_per_s"])
        for key, rows in rates.items()
    }


def summary(result: Mapping[str, Any]) -> str:
    """The whole result as Markdown, of any number of parts."""
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
            ["model", "contestant", "tokens/s", "TFLOP/s", "MFU", "peak GiB", "start-up s", "step ms", "MHz, W, °C"],
            [_speed(case, name, parts) for case, name in _contestants() if f"{case}/{name}" in parts],
        ),
        "",
        f"TFLOP/s: {CONVENTION}. MFU: of the peak of the precision. Peak GiB: reserved by the allocator. Start-up: "
        "from the start of the process to the end of the first step. Clock and power: medians; temperature: highest. "
        "Not ranked: the contestant trained something else than Isthmus; its speed proves nothing.",
        *_table(
            "Losses", ["model", "contestant", "step 1", f"step {COMPARED_STEPS}", "gradient norm 1"], [*_losses(parts)]
        ),
        *_table("Probes", ["probe", "got", "reachable"], [*_probes(parts)]),
        *_table("Attention, forward and backward", ["case", "backend", "ms", "TFLOP/s"], [*_attention(parts)]),
        *_table(
            "Memory bandwidth, each tensor counted once",
            ["part", "kernel", "MB", "us", "GB/s", "of the data sheet"],
            [*_bandwidth(parts)],
        ),
        *_table("One MoE layer", ["model", "contestant", "ms", "TFLOP/s", "MFU"], [*_layers(parts)]),
        *_table("Generation, bf16", ["contestant", "answers", "tokens/s", "of the bound"], [*_generation(parts)]),
        *_table("Saves, export, GRPO, memory errors", ["part", "measured"], [*_facts(parts)]),
    ]
    for case in CASES:
        lines += _profile(case, parts)
    lines += _table("Tests", ["file", "passed", "failed", "skipped", "recorded"], [*_tests(parts)])
    return "\n".join([*lines, *_list("Failures", _failures(parts)), *_list("Not measured", _missing(parts)), ""])


def _contestants() -> Iterator[tuple[str, str]]:
    for part in PARTS:
        if part.turn in CONTESTANTS and part.group.name in CASES:
            yield part.group.name, part.turn


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [[*heads], ["---"] * len(heads), *rows]
    return ["", f"## {title}", "", *("| " + " | ".join(cells) + " |" for cells in lines)]


def _list(title: str, items: Iterator[str]) -> list[str]:
    lines = [f"- {item}" for item in items]
    return ["", f"## {title}", "", *lines] if lines else []


def _aim(aim: Mapping[str, Any]) -> list[str]:
    verdict = {True: "met", False: "**not met**", None: "not measured"}[aim["met"]]
    return [aim["aim"], aim["wanted"], "" if aim["got"] is None else f"{aim['got']:.3g}", verdict]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _speed(case: str, name: str, parts: Parts) -> list[str]:
    part = parts[f"{case}/{name}"]
    result = speed(part)
    if result is None:
        return [case, name, part["state"], *[""] * 6]
    why = not_the_same(parts, case, name) if case in COMPARED else None
    tokens = f"{result['tokens_per_s']:,.0f}" + (f" not ranked: {why}" if why else "")
    if part["state"] != "done":
        tokens += f" ({part['state']} after {result['steps']} timed steps)"
    numbers = [tokens, f"{result['tflops']:,.1f}", _percent(result["mfu"]), f"{result['memory_gib']:.1f}"]
    times = [f"{result['startup_s']:.1f}", f"{1e3 * result['step_time_s']:.1f}"]
    return [case, name, *numbers, *times, _sensors(part["sensors"])]


def _sensors(readings: Sequence[Mapping[str, Any]]) -> str:
    def known(key: str) -> list[float]:
        return [reading[key] for reading in readings if reading[key] is not None]

    values = [statistics.median(known(key)) for key in ("clock_mhz", "power_w") if known(key)]
    values += [max(known("temperature_c"))] if known("temperature_c") else []
    return ", ".join(f"{value:.0f}" for value in values)


def _losses(parts: Parts) -> Iterator[list[str]]:
    for case, name in _contestants():
        if steps := _rows(parts, f"{case}/{name}", "step")[:COMPARED_STEPS]:
            yield [case, name, *(f"{steps[k]['loss']:.5f}" for k in (0, -1)), f"{steps[0]['grad_norm']:.4g}"]


def _probes(parts: Parts) -> Iterator[list[str]]:
    for row in _rows(parts, "probes/run", "check"):
        yield [row["name"], "works" if row["works"] else f"no: {row['why']}", ""]
    for row in _rows(parts, "probes/run", "fact"):
        kept = "fails the next kernel" if row["error_is_kept"] else "does not fail the next kernel"
        yield ["a refused host registration", f"{kept} if it is not cleared", ""]
    for row in _rows(parts, "probes/run", "measurement"):
        reachable = "" if row["reachable"] is None else f"{row['reachable']:,.0f}"
        yield [row["name"], f"{row['value']:,.0f} {row['unit']}", reachable]


def _attention(parts: Parts) -> Iterator[list[str]]:
    for row in _rows(parts, "kernels/run", "attention"):
        measured = [f"no: {row['why']}", ""] if row["ms"] is None else [f"{row['ms']:.2f}", f"{row['tflops']:,.1f}"]
        yield [row["case"], row["backend"], *measured]


def _bandwidth(parts: Parts) -> Iterator[list[str]]:
    for part in PARTS:
        for row in _rows(parts, part.name, "bandwidth"):
            numbers = [f"{row['mb']:,.1f}", f"{row['us']:,.1f}", f"{row['gb_per_s']:,.0f}", _percent(row["share"])]
            yield [part.turn, row["name"], *numbers]


def _layers(parts: Parts) -> Iterator[list[str]]:
    for row in _rows(parts, "moe-layer/run", "layer"):
        numbers = [f"{1e3 * row['time_s']:.2f}", f"{row['tflops']:,.1f}", _percent(row["mfu"])]
        yield [row["model"], row["contestant"], *numbers]


def _generation(parts: Parts) -> Iterator[list[str]]:
    for (contestant, sequences), (rate, bound) in generation_rates(parts).items():
        yield [contestant, str(sequences), f"{rate:,.1f}", _percent(_ratio(rate, bound))]


def _facts(parts: Parts) -> Iterator[list[str]]:
    for row in _rows(parts, "saves/run", "resume"):
        saves = ", ".join(row["saves_at_kill"])
        text = f"killed after step {row['killed_after_step']} ({saves}), resumed at step {row['resumed_at']}"
        yield ["saves", text]
    for row in _rows(parts, "sanitizer/run", "sanitizer"):
        yield ["sanitizer", f"{row['tool']}: {row['errors']} errors{row['first'] and ', first: ' + row['first']}"]
    for row in _rows(parts, "export/run", "transfer"):
        yield ["export", f"{row['operation']}: {row['seconds']:.1f} s, {row['gb_per_s']:.2f} GB/s"]
    for row in _rows(parts, "export/run", "exported"):
        yield ["export", f"{row['tensors']} tensors, different: {', '.join(row['different']) or 'none'}"]
    for name in ("isthmus", "trl"):
        for row in _rows(parts, f"grpo/{name}", "grpo"):
            yield [f"grpo/{name}", f"{row['step_s']:.2f} s a step"]


def _profile(case: str, parts: Parts) -> list[str]:
    """Shares of the step by part, one column a contestant, the largest parts first."""
    profiles = {
        name: rows[-1]["shares"]
        for item, name in _contestants()
        if item == case and (rows := _rows(parts, f"{case}/{name}", "profile"))
    }
    keys = {key for profile in profiles.values() for key in profile}
    rows = sorted(keys, key=lambda key: -max(profile.get(key, 0) for profile in profiles.values()))
    cells: list[list[str]] = [[row, *(_percent(profile.get(row)) for profile in profiles.values())] for row in rows]
    return _table(f"Where the time of a step goes: {MODELS[CASES[case].model][0]} ({case})", ["part", *profiles], cells)


def _tests(parts: Parts) -> Iterator[list[str]]:
    for part in PARTS:
        last = {row["name"]: row for row in _rows(parts, part.name, "test")}.values()
        if last:
            kinds = [[row for row in last if row["outcome"] == kind] for kind in ("passed", "failed", "skipped")]
            reasons = "; ".join(sorted({row["why"] for row in kinds[2]}))
            recorded = "; ".join(f"{key} {value}" for row in last for key, value in row["recorded"].items())
            yield [part.name, *(str(len(rows)) for rows in kinds[:2]), f"{len(kinds[2])} {reasons}".strip(), recorded]


def _failures(parts: Parts) -> Iterator[str]:
    for name, part in parts.items():
        for row in of_kind(part["rows"], "error"):
            yield f"`{name}`: {_short(row['why'])}"
        for row in {row["name"]: row for row in of_kind(part["rows"], "test")}.values():
            if row["outcome"] == "failed":
                yield f"`{row['name']}`: {_short(row['why'])}"
        if part["state"] == "failed" and not of_kind(part["rows"], "error") and not of_kind(part["rows"], "test"):
            yield f"`{name}`: its process died; see log.txt"


def _missing(parts: Parts) -> Iterator[str]:
    """Parts without a complete result, with the reason."""
    for item in PARTS:
        part = parts.get(item.name)
        if part is not None and part["state"] not in ("done", "failed"):
            absent = of_kind(part["rows"], "absent")
            why = (
                absent[0]["why"] if absent else part.get("why", f"{part['state']} after {part.get('seconds', 0):.0f} s")
            )
            yield f"`{item.name}`: {why}"
    if remaining := [item.name for item in PARTS if item.name not in parts]:
        yield f"not started: {', '.join(remaining)}"


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
