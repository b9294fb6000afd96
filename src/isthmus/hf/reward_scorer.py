"""The scores of a reward model, computed by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from isthmus.data.chat.message_normalization import Message
from isthmus.data.chat.template_capabilities import TemplateCapabilities, adapt
from isthmus.errors import DataError, MissingInput, UnsafeInput, UsageError
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tiny_model import no_progress_bars
from isthmus.hf.tokenizer.tokenizer import load_tokenizer

_BATCH_TOKENS = 16_384
"""Tokens of a batch, with padding; one longer text is a batch of its own."""


class RewardScorer:
    """A classifier of transformers with one label, whose logit is the score."""

    def __init__(self, folder: ModelFolder, device: torch.device, *, trust_remote_code: bool = False) -> None:
        """Load the model in bfloat16 on a GPU, in float32 on a CPU.

        Raises:
            MissingInput: there are no weights or no tokenizer.
            DataError: the weights are damaged, or some are missing.
            UnsafeInput: the model needs code of its folder, without ``trust_remote_code``.
        """
        if not folder.has_weights:
            raise MissingInput(f"{folder} has no weights. Expected model.safetensors or its index.")
        self._folder, self._device = folder, device
        self._tokenizer = load_tokenizer(folder.path, trust_remote_code=trust_remote_code)
        self._capabilities: TemplateCapabilities | None = None
        if self._tokenizer.has_own_template:
            self._capabilities = TemplateCapabilities.probe(self._tokenizer.apply_chat_template)
        ChecksumVerifier().check_folder(folder.path)
        folder.check_published()
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._model: Any = self._loaded(dtype, trust_remote_code=trust_remote_code).to(device).eval()
        # The score is that of the last token that is not this one. isthmus reward writes it into config.json.
        config, inner = self._model.config.get_text_config(), self._tokenizer.inner
        padding = [config.pad_token_id, inner.pad_token_id, inner.eos_token_id]
        self._padding = next((token for token in padding if token is not None), 0)
        config.pad_token_id = self._model.config.pad_token_id = self._padding

    def __call__(self, prompts: Sequence[str | list[Message]], answers: Sequence[str]) -> list[float]:
        """The score of each answer.

        Messages are rendered with the chat template of the reward model, texts are concatenated, both without further
        special tokens as in TRL.

        Raises:
            UsageError: prompts are messages, and the model has no chat template.
            DataError: the chat template rejects a prompt, or a score is not finite.
        """
        token_ids = self._tokenizer.encode_batch(list(map(self._text, prompts, answers)))
        order = sorted(range(len(token_ids)), key=lambda place: len(token_ids[place]))
        scores = [0.0] * len(token_ids)
        while order:
            longest = max(len(token_ids[order[-1]]), 1)
            places = order[-max(_BATCH_TOKENS // longest, 1) :]
            del order[-len(places) :]
            for place, score in zip(places, self._scores([token_ids[place] for place in places]), strict=True):
                scores[place] = score
        return scores

    def _text(self, prompt: str | list[Message], answer: str) -> str:
        if isinstance(prompt, str):
            return prompt + answer
        if self._capabilities is None:
            raise UsageError(
                f"the reward model {self._folder} has no chat template for prompts of messages. Add one to its folder "
                "(chat_template.jinja), or give prompts as text."
            )
        messages, _ = adapt([*prompt, {"role": "assistant", "content": answer}], None, self._capabilities)
        return self._tokenizer.apply_chat_template(messages)

    def _scores(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        length = max(map(len, token_ids))
        input_ids = torch.full((len(token_ids), max(length, 1)), self._padding)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(token_ids):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        with torch.inference_mode():
            logits = self._model(input_ids.to(self._device), attention_mask=mask.to(self._device)).logits
        scores: list[float] = logits[:, 0].double().tolist()
        return scores

    def _loaded(self, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
        try:
            with no_progress_bars():
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    self._folder.path,
                    dtype=dtype,
                    trust_remote_code=trust_remote_code,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            if "trust_remote_code" in reason:
                raise UnsafeInput(
                    f"the reward model {self._folder} needs code of its folder. Review it, then set "
                    "model.trust_remote_code=true."
                ) from error
            raise DataError(f"the reward model {self._folder} cannot be loaded: {reason}") from error
        if missing := sorted(info["missing_keys"]):
            raise DataError(f"the reward model {self._folder} has no tensor for {', '.join(missing[:4])}.")
        return model
