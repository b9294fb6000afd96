"""Sample answers at evaluations."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from isthmus.config.schema.section import Length, PathText, Section, lacks, refuse

_Text = Annotated[str, Field(min_length=1)]
# Not Field(strict=False): the members of a union are strict in pydantic 2.9.
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class EvalConfig(Section):
    """Answers to fixed prompts, at each evaluation."""

    generate: bool = False
    """Answer the prompts with the current weights at each evaluation, into samples.jsonl and the trackers."""
    prompts: PathText | _Texts = ()
    """A list of prompts, or a file: a prompt per line, or .jsonl with prompt or messages. A prompt is the user's turn
    of a chat; pretrain: text to continue."""
    max_new_tokens: Length = 64
    """Longest answer, in tokens."""
    temperature: float = Field(default=0.0, ge=0)
    """0: always the most probable token; else random tokens, the same in all layouts."""

    @model_validator(mode="after")
    def _prompts_are_used(self) -> EvalConfig:
        if self.generate and not self.prompts:
            lacks("prompts")
        if not self.generate:
            for name in ("prompts", "max_new_tokens", "temperature"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    refuse(name, f"{name} is for generate=true, got false; set eval.generate, or leave it out")
        return self
