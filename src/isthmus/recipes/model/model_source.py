"""The model and the tokenizer that a run starts from."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.model_file import merge_config, read_model
from isthmus.config.presets import is_model_file
from isthmus.config.schema import RunConfig
from isthmus.config.schema.model import ModelConfig
from isthmus.convert.open_model import checkpoint_folder
from isthmus.data.store.answer_views import AnswerEnd
from isthmus.errors import DataError, MissingInput, UsageError, escaped
from isthmus.families.known_keys import IGNORED_KEYS, is_metadata, keys_read
from isthmus.families.registry import family_for, language_config
from isthmus.families.rules.rope_overlay import overlay_rotary
from isthmus.files.remote_files import refuse_url
from isthmus.hf.hub import fetch, looks_like_id
from isthmus.hf.model_folder import ModelFolder, tokenizer_files
from isthmus.hf.special_tokens import SPECIAL_TOKENS, tokens_beyond_vocabulary
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.hf.tokenizer.tokenizer_kinds import NumberTokenizer, open_tokenizer
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.run_dir import RunDir


def open_source(model: ModelConfig) -> ModelFolder:
    """Open ``model.path`` and merge ``model.config`` into its config.

    Of a multimodal model, ``model.config`` has keys of the language model; with random weights it is the language model
    alone, since there are none for its towers.
    """
    if model.path is None:
        return _described("model.config", model.config)
    if is_model_file(model.path):
        folder = _described(model.path, read_model(model.path))
    else:
        path = local_folder(model.path, weights=model.init == "hf", code=model.trust_remote_code)
        _check_is_model(path)
        folder = ModelFolder.open(path)
    config = language_config(folder.config)
    if model.init == "random" and config is not folder.config:
        folder = ModelFolder.from_config(folder.path, config)
    if not model.config:
        return folder
    merged = merge_config(config, model.config)
    merged |= overlay_rotary(config, model.config, family_for(merged).rope_names)
    _check_keys("model.config", model.config, keys_read(family_for(merged), merged), merged)
    if model.init == "random":
        return ModelFolder.from_config(folder.path, merged)
    if why := _changed_tensors(config, merged):
        raise UsageError(
            f"model.config changes the tensors of {folder}: {why}. Leave out the keys that do, or set "
            "model.init=random."
        )
    _check_effects(config, model.config, merged)
    nested = None if config is folder.config else family_for(folder.config).nested
    return folder.with_config(merged if nested is None else nested.with_language_config(folder.config, merged))


def _check_effects(before: Mapping[str, Any], keys: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Refuse keys without which the model is the same, such as the window of a model whose layers have none."""
    family = family_for(merged)
    meaning = family.to_architecture(merged), family.read_dropout(merged)
    for key, value in keys.items():
        if not value or is_metadata(key) or key in IGNORED_KEYS or before.get(key) == merged[key]:
            continue
        others = {name: other for name, other in keys.items() if name != key}
        without = merge_config(before, others) | overlay_rotary(before, others, family.rope_names)
        try:
            is_same = (family.to_architecture(without), family.read_dropout(without)) == meaning
        except (UsageError, DataError):  # other keys need it
            continue
        if is_same:
            raise UsageError(
                f"model.config.{key} has no effect on this model of type {family.name}. Leave it out, or add the key "
                "that it depends on, such as layer_types for sliding_window."
            )


def _changed_tensors(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """How the tensors of two configs differ, in names, shapes or the heads that their rows belong to."""
    families = family_for(before), family_for(after)
    if families[0].name != families[1].name:
        return f"model_type is {families[0].name}, with model.config {families[1].name}"
    old, new = (families[0].to_architecture(config) for config in (before, after))
    for name in ("num_attention_heads", "num_query_groups", "kv_channels", "window_attention"):
        if old.setting(name) != new.setting(name):
            key = families[0].keys[name].hf if name in families[0].keys else name
            return f"{key} is {old.setting(name)}, with model.config {new.setting(name)}"
    shapes, others = (families[0].hf_shapes(arch) for arch in (old, new))
    for name in sorted(shapes.keys() | others.keys()):
        if shapes.get(name) != others.get(name):
            there, here = (list(model[name]) if name in model else "absent" for model in (shapes, others))
            return f"{name} is {there}, with model.config {here}"
    return None


def local_folder(path_or_id: str, *, weights: bool, code: bool = False) -> Path:
    """A local path, downloaded if ``named`` is a Hub id; ``code`` includes Python files."""
    path = Path(path_or_id)
    if path.exists():
        return path
    refuse_url(path_or_id)
    if not looks_like_id(path_or_id):
        raise MissingInput(
            f"{path_or_id} does not exist. Give a folder, an id on the Hub (org/name), or for a model preset:NAME."
        )
    return fetch(
        path_or_id, weights=weights, code=code, report=lambda line: print(escaped(line), file=sys.stderr, flush=True)
    )


def _check_is_model(folder: Path) -> None:
    """Refuse a Megatron checkpoint and a run folder, and name the next command."""
    if (folder / "config.json").is_file():
        return
    run = RunDir(folder)
    if checkpoint_folder(folder) is None and (run.export() / "config.json").is_file():
        raise MissingInput(f"{folder} is a run folder. Use the model that the run exported: {run.export()}")
    for place in (folder, run.checkpoints):
        if (checkpoint := checkpoint_folder(place)) is not None:
            layout = "legacy" if any(checkpoint.glob("mp_rank_*")) else "torch_dist"
            converted = folder.with_name(f"{folder.resolve().name}-hf")
            raise MissingInput(
                f"{place} is a Megatron checkpoint ({layout}), and a run starts from a Hugging Face model. Convert it, "
                f"then use {converted}: isthmus convert {place} {converted} --to hf"
            )


def _described(name: str, config: Mapping[str, Any]) -> ModelFolder:
    """A model given as a complete config, which may have keys that only transformers uses."""
    config = language_config(config)
    family = family_for(config)
    known = keys_read(family, config) | {*IGNORED_KEYS}
    if not family.auto_map and family.data is None:
        from isthmus.hf.tiny_model import default_config  # a slow import

        known |= default_config(family.name).keys()
    _check_keys(name, config, known, config)
    return ModelFolder.from_config(name, config)


def _check_keys(where: str, keys: Mapping[str, Any], known: set[str], config: Mapping[str, Any]) -> None:
    """Refuse keys without effect: most are typing errors."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if key in keys and isinstance(rope, Mapping) and rope.get("factor", 1) != 1:
            if rope.get("rope_type", rope.get("type", "default")) == "default":
                raise UsageError(
                    f"{where}: {key}.factor={rope['factor']} has no effect without {key}.rope_type. Set that "
                    "too, for example to linear, or leave the factor out."
                )
    unknown = [key for key in keys if key not in known and not is_metadata(key)]
    if not unknown:
        return
    listed = []
    for key in unknown:
        near = difflib.get_close_matches(key, known, n=1)
        listed.append(key + (f" (did you mean {near[0]}?)" if near else ""))
    balance = " Load balancing is set under moe." if any("aux_loss" in key for key in unknown) else ""
    raise UsageError(
        f"{where}: a model of type {config['model_type']} does not use {', '.join(listed)}. Leave it out.{balance}"
    )


def run_tokenizer(config: RunConfig, source: ModelFolder, vocab_size: int) -> Tokenizer:
    """Open the tokenizer, by default the model's, and check that it has at most ``vocab_size`` tokens."""
    tokenizer = _open_tokenizer(config, source, vocab_size)
    tokenizer.use_chat_template(config.chat.template)
    if tokenizer.vocab_size > vocab_size and not config.data.mock:  # mock data has the model's tokens only
        last = tokenizer.inner.convert_ids_to_tokens(tokenizer.vocab_size - 1)
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the last of them {last!r}, and the model's embedding "
            f"{vocab_size} rows ({source}). Use the tokenizer that belongs to the model, or with model.init=random set "
            f"model.config.vocab_size={tokenizer.vocab_size}."
        )
    return tokenizer


def tokenizer_at(path_or_id: str, kind: str | None, *, trust_remote_code: bool = False) -> Tokenizer:
    """Open a tokenizer: a folder, a sentencepiece file, or an id on the Hub."""
    folder = local_folder(path_or_id, weights=False, code=trust_remote_code)
    return open_tokenizer(folder, kind, trust_remote_code=trust_remote_code)


def _open_tokenizer(config: RunConfig, source: ModelFolder, vocab_size: int) -> Tokenizer:
    settings, code = config.tokenizer, config.model.trust_remote_code
    if settings.type == "NullTokenizer":
        assert settings.vocab_size is not None
        if not recipe_of(config).records.is_text and not config.data.mock:
            raise UsageError(f"NullTokenizer reads numbers, and {config.recipe} trains on chats. Leave it out.")
        return NumberTokenizer(settings.vocab_size)
    if settings.path is not None:
        return tokenizer_at(settings.path, settings.type, trust_remote_code=code)
    if tokenizer_files(source.path):
        return open_tokenizer(source.path, settings.type, trust_remote_code=code)
    if config.data.mock and settings.type is None:
        return NumberTokenizer(vocab_size - 1)
    raise MissingInput(f"{source} has no tokenizer. Set one with tokenizer.path: a folder, or an id on the Hub.")


def with_tokens_of(tokenizer: Tokenizer, hf_config: dict[str, Any]) -> dict[str, Any]:
    """``hf_config`` with the BOS, EOS, end-of-turn and padding tokens of ``tokenizer``, unless it has them already."""
    inner, changed = tokenizer.inner, dict(hf_config)
    for name in SPECIAL_TOKENS:
        old, new = hf_config.get(name), getattr(inner, name)
        if new not in (old if isinstance(old, list) else [old]):
            changed[name] = new
    ends = changed["eos_token_id"] if isinstance(changed.get("eos_token_id"), list) else [changed.get("eos_token_id")]
    if tokenizer.turn_end_id not in (None, *ends):
        changed["eos_token_id"] = [*(end for end in ends if end is not None), tokenizer.turn_end_id]
    return changed | tokens_beyond_vocabulary(changed)


def answer_end(hf_config: Mapping[str, Any], tokenizer: Tokenizer) -> AnswerEnd:
    """The end of the texts of a reward model, in training and in transformers.

    Padding is the tokenizer's padding token, or without one that of the config, or as in TRL the EOS token.
    """
    tokens = (tokenizer.inner.pad_token_id, hf_config.get("pad_token_id"), tokenizer.eos_id)
    turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(turns)
    full, answer = tokenizer.encode_batch([text, text.rstrip()])
    return AnswerEnd(next((token for token in tokens if token is not None), None), tuple(full[len(answer) :]))
