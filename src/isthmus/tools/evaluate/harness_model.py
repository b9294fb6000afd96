"""Tasks of lm-evaluation-harness on the parallel model; the only module that imports lm_eval."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Decoding
from isthmus.errors import MissingInput, UsageError
from isthmus.extras import optional_package
from isthmus.hf.hub import use_cache_only
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.tools.evaluate.task_settings import TaskSettings

with optional_package("isthmus eval", "lm_eval"):
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.loggers.utils import get_commit_from_path
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
    from tqdm import tqdm

_REQUESTS_AT_ONCE = 256
_DEFAULT_ANSWER = 256
"""Tokens of an answer if the task names none, as in lm_eval's own models."""
_IGNORED = {"do_sample", "temperature", "until", "max_gen_toks", "max_length"}


def cached_tasks(settings: TaskSettings) -> TaskManager:
    """The tasks, whose data is local or in the cache of the Hub, which does not answer.

    Raises:
        UsageError: a task is unknown.
        MissingInput: the data of a task is neither.
    """
    use_cache_only()
    manager = _task_manager(settings)
    for name in _known(settings.tasks, manager):
        try:
            with redirect_stdout(sys.stderr):
                manager.load([name])
        except (OSError, ValueError) as error:
            task = name if isinstance(name, str) else name.get("task")
            reason = " ".join(str(error).split())[:200]
            raise MissingInput(
                f"the data of task {task} is not in the Hub cache, and the Hub does not answer ({reason}). Run the "
                "command once with --limit 1 on a machine with network access and the same HF_HOME, or name tasks with "
                "local data: --include-path DIR."
            ) from error
    return manager


def run_harness(
    settings: TaskSettings,
    inference: Inference,
    tokenizer: Tokenizer,
    *,
    ends: set[int],
    max_length: int,
    manager: TaskManager | None,
) -> tuple[dict[str, Any], str]:
    """Results in lm_eval's format, and its tables; on one rank.

    Raises:
        UsageError: a task is unknown, or needs an option that is not supported.
    """
    # Standard errors: lm_eval would fork this process, which has threads of collectives.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    # It runs git, which prints an error outside of a repository.
    evaluator.get_git_commit_hash = lambda: get_commit_from_path(os.getcwd())
    manager = manager or _task_manager(settings)
    names = _known(settings.tasks, manager)
    model = HarnessModel(inference, tokenizer, ends, max_length)
    with redirect_stdout(sys.stderr):  # stdout is for the results
        results: dict[str, Any] | None = simple_evaluate(
            model=model,
            tasks=names,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            apply_chat_template=settings.apply_chat_template,
            task_manager=manager,
            log_samples=False,
        )
    assert results is not None  # on rank 0
    results["config"]["model"] = settings.model
    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return results, "\n".join(tables)


def _task_manager(settings: TaskSettings) -> TaskManager:
    """Without lm_eval's own tasks if none is needed: to index them takes ten seconds."""
    paths = [str(path) for path in settings.include_path] or None
    manager = TaskManager(include_path=paths, include_defaults=False)
    if all(_is_file(name) or manager.match_tasks([name]) for name in settings.tasks):
        return manager
    return TaskManager(include_path=paths)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _known(names: Sequence[str], manager: TaskManager) -> list[str | dict[str, Any]]:
    """The names of tasks, with patterns resolved; YAML files as lm_eval reads them."""
    tasks: list[str | dict[str, Any]] = []
    for task in names:
        if _is_file(task):
            tasks.append(load_yaml(str(Path(task).absolute()), resolve_func=True))
            continue
        matches = manager.match_tasks([task])
        if not matches:
            near = difflib.get_close_matches(task, manager.all_tasks, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"--tasks {task} is not a task of lm_eval{hint}. --include-path DIR adds tasks of your own."
            )
        tasks += matches
    return tasks


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """The model as lm_eval sees it: texts in, log-likelihoods and texts out. Tokenization is that of its hf model."""

    def __init__(self, inference: Inference, tokenizer: Tokenizer, ends: set[int], max_length: int) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer.inner
        self._tokenizer = tokenizer
        self.max_length = max_length
        self._inference, self._ends = inference, ends

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if longest > self.max_length:
            raise UsageError(
                f"an answer of a task has {longest} tokens, and the longest text has {self.max_length}. Raise "
                "--max-length, or choose another task."
            )
        samples = [((context + answer)[-(self.max_length + 1) :], len(answer)) for _, context, answer in requests]

        def scores(chunk: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
            results = self._inference.score(chunk)
            return [
                (-sum(losses), chosen == tokens[len(tokens) - scored :])
                for (tokens, scored), (losses, chosen) in zip(chunk, results, strict=True)
            ]

        return _in_chunks(samples, scores, "log-likelihoods", length=lambda sample: len(sample[0]))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            text_windows = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += text_windows
            counts.append(len(text_windows))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [self._prompt(*request.args) for request in requests]
        # Answers of one chunk are computed together, so they share their options.
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, (_, decoding, stops) in enumerate(prompts):
            groups.setdefault(repr((decoding.max_new_tokens, decoding.temperature, stops)), []).append(number)
        for numbers in groups.values():
            _, decoding, stops = prompts[numbers[0]]

            def answers(
                chunk: Sequence[int], decoding: Decoding = decoding, stops: Sequence[str] = tuple(stops)
            ) -> list[str]:
                tokens = self._inference.generate([prompts[number][0] for number in chunk], decoding)
                decoded = [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in tokens]
                return [postprocess_generated_text(text, list(stops), None) for text in decoded]

            answer_texts = _in_chunks(numbers, answers, "answers", length=lambda number: len(prompts[number][0]))
            texts |= dict(zip(numbers, answer_texts, strict=True))
        return [texts[number] for number in range(len(prompts))]

    def _prompt(self, context: str, task_options: dict[str, Any]) -> tuple[list[int], Decoding, list[str]]:
        """Tokens of the prompt, how to continue it, and where to cut the answer."""
        options = normalize_gen_kwargs(dict(task_options), _DEFAULT_ANSWER)
        stops = handle_stop_sequences(list(options.get("until") or []), self.tokenizer.decode(self.eot_token_id))
        longest, temperature = int(options["max_gen_toks"]), float(options.get("temperature") or 0.0)
        if unsupported := sorted(options.keys() - _IGNORED) if temperature else []:
            raise UsageError(
                f"a task samples with {', '.join(unsupported)}, and only temperature is supported. Choose another task."
            )
        if longest >= self.max_length:
            raise UsageError(
                f"a task asks for answers of {longest} tokens, and the longest text has {self.max_length}. Raise "
                "--max-length, or choose another task."
            )

        def is_complete(answer: Sequence[int]) -> bool:
            text = self.tokenizer.decode(list(answer), skip_special_tokens=False)
            return any(stop in text for stop in stops if stop)

        tokens = self.tok_encode(context)[-(self.max_length - longest) :]
        return tokens, Decoding(longest, self._ends, temperature, is_complete=is_complete), stops


def _in_chunks(
    items: Sequence[Any], compute: Callable[[Sequence[Any]], list[Any]], what: str, *, length: Callable[[Any], int]
) -> list[Any]:
    """Results in the order of ``items``; items of similar length are computed together, the longest first."""
    order = sorted(range(len(items)), key=lambda number: -length(items[number]))
    results: dict[int, Any] = {}
    with tqdm(total=len(items), desc=what, disable=not sys.stderr.isatty()) as bar:
        for first in range(0, len(order), _REQUESTS_AT_ONCE):
            numbers = order[first : first + _REQUESTS_AT_ONCE]
            results |= dict(zip(numbers, compute([items[number] for number in numbers]), strict=True))
            bar.update(len(numbers))
    return [results[number] for number in range(len(items))]
