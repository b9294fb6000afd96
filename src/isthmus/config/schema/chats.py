"""How chats become text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Section, refuse


class ChatConfig(Section):
    """How chats and preference pairs become text; the exported tokenizer has the template."""

    template: str | None = Field(default=None, min_length=1)
    """Chat template: a Jinja file, its text, or alpaca, chatml, deepseek, gemma, llama2, llama3, mistral, phi3, phi4,
    qwen2.5, qwen3, vicuna or zephyr; null: that of the tokenizer."""
    system: str | None = Field(default=None, min_length=1)
    """System prompt of chats that have none; null: the template decides."""
    override_system: bool = False
    """Replace the system prompts of the chats with system."""
    reasoning: Literal["keep", "last", "drop"] = "keep"
    """Reasoning of answers (reasoning_content, <think> blocks): keep it as far as the template does, keep it only after
    the last user turn, or drop it."""
    split_turns: bool = True
    """sft, distill: a chat whose earlier turns the template renders differently when more turns follow becomes a sample
    per answer; false: one sample, with the earlier answers as the template renders them there."""

    @model_validator(mode="after")
    def _override_has_a_text(self) -> ChatConfig:
        if self.override_system and self.system is None:
            refuse("override_system", "override_system=true replaces system prompts with chat.system; set that too")
        return self
