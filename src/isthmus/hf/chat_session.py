"""A conversation with a Hugging Face model, computed by transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from isthmus.data.chat.chat_text import ChatRenderer
from isthmus.data.chat.message_normalization import Message
from isthmus.data.chat.prompt_records import Prompt
from isthmus.errors import UsageError
from isthmus.families.family import is_scored
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tiny_model import no_progress_bars
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer
from isthmus.hf.transformers_model import model_classes


@dataclass(frozen=True, slots=True)
class Sampling:
    max_new_tokens: int = 512
    temperature: float = 0.0
    """0: always the most probable token."""
    top_p: float = 1.0
    seed: int | None = None


class ChatSession:
    """Turns of a user and a model; a model without chat template completes each text on its own."""

    def __init__(
        self,
        folder: ModelFolder,
        sampling: Sampling,
        *,
        template: str | None,
        system: str | None,
        device: str,
        trust_remote_code: bool,
    ) -> None:
        """Load the model in bfloat16 on a GPU, in float32 on a CPU; ``template`` as ``chat.template``."""
        if is_scored(folder.config):
            raise UsageError(
                f"{folder} is a reward model: it scores texts and writes none. Chat with the model that it was trained "
                "from."
            )
        self.tokenizer: Tokenizer = load_tokenizer(folder.path, trust_remote_code=trust_remote_code)
        self.tokenizer.use_chat_template(template)
        self.has_template: bool = self.tokenizer.has_own_template
        self._render = ChatRenderer(self.tokenizer) if self.has_template else None
        _, network = model_classes(folder, trust_remote_code=trust_remote_code)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        ChecksumVerifier().check_folder(folder.path)
        folder.check_published()
        with no_progress_bars():
            self._model: Any = (
                network.from_pretrained(folder.path, dtype=dtype, local_files_only=True).to(device).eval()
            )
        self._sampling, self._device = sampling, device
        if (end := self.tokenizer.turn_end_id) is not None:
            generation, known = self._model.generation_config, self._model.generation_config.eos_token_id
            generation.eos_token_id = [*(known if isinstance(known, list) else {known} - {None}), end]
        self._folder = folder
        self._opening: list[Message] = []
        self.messages: list[Message] = []
        self.use_system(system)
        self.stop_requested: bool = False
        """Set it to end the answer that is being computed after its next token."""
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)

    def describe(self) -> str:
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        kind = "chat" if self.has_template else "no chat template: it completes each text"
        return f"{type(self._model).__name__}, {parameters / 1e6:,.1f} million parameters, on {self._device}; {kind}"

    def use_system(self, system: str | None) -> None:
        """Begin a new conversation with this system prompt.

        Raises:
            UsageError: the model has no chat template.
        """
        if system is not None and not self.has_template:
            raise UsageError(
                f"{self._folder} has no chat template, so it has no system prompt. Name one with --chat-template, or "
                "leave the system prompt out."
            )
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system prompt."""
        self.messages = [*self._opening]

    def answer(self, text: str, show: Callable[[str], None]) -> str:
        """Add the user's turn and the model's; ``show`` gets each piece of the answer when it is complete."""
        self.stop_requested = False
        turns = [*self.messages, {"role": "user", "content": text}]
        answer = self._generate(self._prompt(text, turns), show)
        if self.has_template:
            self.messages = [*turns, {"role": "assistant", "content": answer}]
        return answer

    def answer_alone(self, prompt: Prompt) -> str:
        """The answer to a prompt as a conversation of its own; a system prompt of the messages replaces the session's.

        Raises:
            UsageError: the messages need a chat template, which the model does not have.
        """
        if isinstance(prompt.content, str):
            turns: list[Message] = [*self._opening, {"role": "user", "content": prompt.content}]
            return self._generate(self._prompt(prompt.content, turns), _ignore)
        if not self.has_template:
            raise UsageError(
                f"{prompt.where}: {self._folder} has no chat template for messages. Name one with --chat-template, or "
                "give the text as prompt."
            )
        opening = [] if prompt.content[0]["role"] == "system" else self._opening
        return self._generate(self._prompt("", [*opening, *prompt.content]), _ignore)

    def _generate(self, prompt: list[int], show: Callable[[str], None]) -> str:
        ids = torch.tensor([prompt], device=self._device)
        stream, sampling = _Stream(self.tokenizer, show), self._sampling
        sampled = sampling.temperature > 0
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_new_tokens,
                do_sample=sampled,
                temperature=sampling.temperature if sampled else None,
                top_p=sampling.top_p if sampled else None,
                top_k=0 if sampled else None,
                pad_token_id=self.tokenizer.eos_id,
                streamer=stream,
                stopping_criteria=StoppingCriteriaList([_Stop(self)]),
            )
        return stream.text

    def _prompt(self, text: str, turns: list[Message]) -> list[int]:
        if self._render is not None:
            return self.tokenizer.encode(self._render.prompt(turns))
        first = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        return first + self.tokenizer.encode(text)


def _ignore(piece: str) -> None:
    pass


class _Stop(StoppingCriteria):
    def __init__(self, session: ChatSession) -> None:
        self._session = session

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.full((input_ids.size(0),), self._session.stop_requested, device=input_ids.device)


class _Stream(BaseStreamer):
    """Shows text as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._ids: list[int] | None = None
        """Tokens of the answer; None before the prompt, which comes first."""
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # an incomplete character
            self._advance(text)

    def end(self) -> None:
        self._advance(self._tokenizer.decode(self._ids or [], skip_special_tokens=True))

    def _advance(self, text: str) -> None:
        self._show(text[len(self.text) :])
        self.text = text
