"""The parts of a GPU run, in the order in which they run: what is cheap and decides most comes first."""

from __future__ import annotations

from dataclasses import dataclass

from certificate import REPOSITORY

TESTS = tuple(path.stem.removeprefix("test_") for path in sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py")))
DENSE = (
    "isthmus", "plain-compiled", "transformers-compiled", "isthmus-fp8", "isthmus-again", "trainer-compiled", "trl",
    "plain-sac", "plain-fp8",
)  # fmt: skip
QUICK_TESTS, QUICK_DENSE = ("attention", "loss"), DENSE[:5]
FEW = ("isthmus", "plain-compiled", "transformers-compiled", "isthmus-again")
MOE = ("isthmus", "transformers-compiled", "isthmus-again")


@dataclass(frozen=True, slots=True)
class Group:
    """Parts with one purpose; the name of a part is ``GROUP/TURN``."""

    name: str
    turns: tuple[str, ...]
    seconds: int
    """Estimated for each turn on one H100; a turn starts only if so much time remains."""
    quick: tuple[str, ...]
    """Turns of ``make gpu-quick``."""
    about: str


GRPO, LONG = ("isthmus", "trl"), ("isthmus", "plain-sac")
SFT = ("isthmus-fp32-cpu", "isthmus", "isthmus-fp8")
ANSWERS = ("isthmus", "transformers", "transformers-compiled")
BANDWIDTH = ("dense", "experts", "fp8", "loss")
RUN = ("run",)
GROUPS = (
    #     name          turns      s    quick
    Group("probes",     RUN,       45,  RUN,         "ceilings of the device, kernels of this torch"),
    Group("tests",      TESTS,     45,  QUICK_TESTS, "tests/gpu, one outcome per test"),
    Group("llama-1b",   DENSE,     60,  QUICK_DENSE, "Llama 3.2 1B, 8k tokens"),
    Group("kernels",    RUN,       60,  (),          "attention in each backend"),
    Group("bandwidth",  BANDWIDTH, 60,  (),          "GB/s of compiled regions, loss and AdamW"),
    Group("moe-layer",  RUN,       45,  RUN,         "one MoE layer with 16 experts"),
    Group("layers-8b",  DENSE,     75,  (),          "8 layers of Llama 3.1 8B"),
    Group("moe-16",     MOE,       90,  (),          "8 layers of Qwen3 30B-A3B with 16 experts"),
    Group("chats",      MOE,       75,  (),          "Qwen3 0.6B on chats: packed, or padded"),
    Group("sanitizer",  RUN,       240, (),          "memory errors in some of tests/gpu"),
    Group("saves",      RUN,       120, (),          "a kill in an asynchronous save, and resume"),
    Group("sft-200",    SFT,       120, (),          "200 steps: losses beside those of a CPU"),
    Group("generation", ANSWERS,   120, (),          "answers of Llama 3.1 8B"),
    Group("export",     RUN,       180, (),          "Llama 3.1 8B: load, export, compare"),
    Group("grpo",       GRPO,      90,  (),          "one step of GRPO"),
    Group("long-32k",   LONG,      90,  (),          "Llama 3.2 1B, 32k tokens"),
    Group("long-128k",  LONG[:1],  150, (),          "Llama 3.2 1B, 128k tokens"),
    Group("adam-8bit",  LONG[:1],  75,  (),          "Llama 3.2 1B with 8-bit AdamW"),
    Group("qlora-8b",   LONG[:1],  120, (),          "Llama 3.1 8B with QLoRA"),
    Group("qwen-0.6b",  FEW,       75,  (),          "Qwen3 0.6B, 8k tokens"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A process and its result."""

    group: Group
    turn: str

    @property
    def name(self) -> str:
        """``GROUP/TURN``"""
        return f"{self.group.name}/{self.turn}"

    @property
    def quick(self) -> bool:
        """Whether ``make gpu-quick`` has it."""
        return self.turn in self.group.quick

    def selected(self, selection: str) -> bool:
        """By its name or that of its group."""
        return selection in (self.name, self.group.name)


PARTS = tuple(Part(group, turn) for group in GROUPS for turn in group.turns)
