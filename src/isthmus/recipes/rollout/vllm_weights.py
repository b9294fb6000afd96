"""Weights for vLLM servers, through safetensors files or a process group.

Into files each rank writes its own slices, without a collective (:func:`~isthmus.recipes.model.hf_export.export_hf`).
After each transfer two things are checked: the SHA-256 of each tensor as the server's workers got it, and the
log-probabilities of probe tokens, which depend on what the workers made of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.config.schema import RunConfig
from isthmus.convert.towers import Towers
from isthmus.engine.generation.inference import Inference
from isthmus.engine.parallel.process_groups import agree, gather_objects
from isthmus.errors import CheckFailed, DataError, disk_errors, escaped
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.hf.tensors.safetensors_format import TensorInfo, TensorReader, read_header
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.model.adapter_export import export_adapter
from isthmus.recipes.model.hf_export import export_hf, iterate_full_weights
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.rollout.vllm_plugin.isthmus_vllm import tensor_hash
from isthmus.recipes.rollout.vllm_server import VllmServer

MODEL, _ADAPTER = "policy", "policy-adapter"
"""Names of the served model and of its adapter."""
_PROBE_TOKENS, _PROBES = 32, 2
_TOLERANCES = {"float32": 1e-3}
"""Largest mean difference between the log-probabilities of probe tokens, by the lower precision of both."""
_LOW_PRECISION_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWeights:
    """Weights for servers, and what shows that a server computes with them."""

    step: int
    folder: Path | None
    """The folder of the safetensors files; None: weights go through a process group."""
    is_adapter: bool
    hashes: Mapping[str, str]
    """SHA-256 by tensor."""
    probes: Sequence[Sequence[int]]
    logps: Sequence[Sequence[float]]
    """Log-probabilities of the probe tokens after the first, in training."""
    tolerance: float
    """Largest mean difference of log-probabilities."""

    @classmethod
    def export(
        cls, step: int, folder: Path, config: RunConfig, model: RankModel, tokenizer: Tokenizer, inference: Inference
    ) -> ServedWeights:
        """Write the present weights into a folder in ``folder``; a collective."""
        is_adapter = has_adapter(config, model)
        target = folder / f"{'adapter' if is_adapter else 'weights'}-{step:07d}"
        with disk_errors(target):
            folder.mkdir(exist_ok=True)
        if is_adapter:
            export_adapter(model, config, target)
        else:
            export_hf(model, target, tokenizer, dtype=model.dtype, replace=True)
        return cls.measured(step, model, inference, target, file_hashes(target), is_adapter=is_adapter)

    @classmethod
    def measured(
        cls,
        step: int,
        model: RankModel,
        inference: Inference,
        folder: Path | None,
        hashes: Mapping[str, str],
        *,
        is_adapter: bool = False,
    ) -> ServedWeights:
        """The present weights with their log-probabilities of probe tokens; a collective."""
        probes = probe_samples(model.plan.architecture.vocab_size)
        return cls(
            step=step,
            folder=folder,
            is_adapter=is_adapter,
            hashes=hashes,
            probes=[tokens for tokens, _ in probes],
            logps=[[-loss for loss in losses] for losses, _ in inference.score(probes)],
            tolerance=_TOLERANCES.get(str(model.dtype).removeprefix("torch."), _LOW_PRECISION_TOLERANCE),
        )

    @property
    def model(self) -> str:
        """The name for requests."""
        return _ADAPTER if self.is_adapter else MODEL

    @property
    def salt(self) -> str:
        return f"{'adapter' if self.is_adapter else 'weights'}-{self.step:07d}"

    def load(self, server: VllmServer, deadline: float) -> None:
        """Let a server read the files, and verify the weights; raises as :meth:`verify`."""
        if self.is_adapter:
            replies = server.rpc("isthmus_hashes", str(self.folder), deadline=deadline)
            body = {"lora_name": self.model, "lora_path": str(self.folder), "load_inplace": True}
            server.post("/v1/load_lora_adapter", body, deadline)
        else:
            replies = server.rpc("isthmus_reload", str(self.folder), deadline=deadline)
        self.verify(server, replies, deadline)

    def verify(self, server: VllmServer, replies: Sequence[Any], deadline: float) -> None:
        """Check what the workers of a server got.

        Raises:
            CheckFailed: the server has another tensor, or computes other log-probabilities.
            DataError: it returns something else than hashes and log-probabilities.
        """
        for reply in replies:
            check_hashes(server.name, reply, self.hashes)
        self._check_probes(server, deadline)

    def _check_probes(self, server: VllmServer, deadline: float) -> None:
        differences: list[tuple[float, int, int, float, float]] = []
        for number, (tokens, expected) in enumerate(zip(self.probes, self.logps, strict=True)):
            body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            reply = server.post("/v1/completions", body | {"cache_salt": self.salt}, deadline)
            try:
                entries = reply["choices"][0]["prompt_logprobs"][1:]
                logps = [float(entry[str(token)]["logprob"]) for token, entry in zip(tokens[1:], entries, strict=True)]
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"{server.name} returns no log-probabilities of a prompt: {escaped(repr(error))}."
                ) from None
            for place, (logp, other) in enumerate(zip(logps, expected, strict=True), start=1):
                differences.append((abs(logp - other), number, place, logp, other))
        mean, (_, number, place, logp, other) = sum(row[0] for row in differences) / len(differences), max(differences)
        if not mean <= self.tolerance:  # also NaN
            raise CheckFailed(
                f"{server.name} does not compute with the weights after step {self.step}: log-probabilities of "
                f"{len(differences)} probe tokens differ by {mean:.3g} on average, at most {self.tolerance:g} is "
                f"expected. The largest difference: token {self.probes[number][place]} at position {place} of probe "
                f"{number} has {logp:.5f}, in training {other:.5f}. Compare its model, its precision and its version "
                "of vLLM with the policy."
            )


def full_tensors(model: RankModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors that :func:`export_hf` writes, on rank 0; a collective: every rank iterates to the end."""
    yield from iterate_full_weights(model, dtype=model.dtype, rank0_only=True)
    if model.position.rank == 0:
        towers = Towers(model.plan.weights.source, model.plan.family)
        device = next(model.stages[0].parameters()).device
        for name in towers.tensors:
            yield name, towers.read(name).to(device)


def has_adapter(config: RunConfig, model: RankModel) -> bool:
    """Whether servers get the adapter and keep the base model; else they get all weights, with the adapter merged."""
    lora, plan = config.lora, model.plan
    if plan.adapters is None or plan.existing is not None or config.model.init != "hf":
        return False
    return not (lora.dora or lora.quantize or lora.modules_to_save) and plan.architecture.moe is None


def probe_samples(vocab_size: int) -> list[tuple[list[int], int]]:
    """Random tokens, and the number of last ones to score: all but the first; the same in every run."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (_PROBES, _PROBE_TOKENS), generator=random)
    return [(sample, _PROBE_TOKENS - 1) for sample in tokens.tolist()]


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor in the safetensors files of ``folder``, which are checked; a collective.

    The checksums of the files are those of the tensors in memory, so that a damage of the files is detected too. Each
    rank hashes a part of the tensors.
    """
    hashes: list[dict[str, str]] = []

    def hash_part() -> None:
        verifier = ChecksumVerifier()
        reader = TensorReader(verifier)
        tensors: dict[str, TensorInfo] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= read_header(path, verifier)
        names = sorted(tensors)[dist.get_rank() :: dist.get_world_size()]
        hashes.append({name: tensor_hash(reader.read(tensors[name], name=name)) for name in names})
        reader.close()

    agree(hash_part)
    return {name: value for part in gather_objects(hashes[0]) for name, value in part.items()}


def check_hashes(server: str, reply: Any, expected: Mapping[str, str]) -> None:
    """Compare the hashes of a worker with those of the tensors that it should have; CheckFailed names a tensor."""
    try:
        hashes, missing = dict(reply["hashes"]), list(reply["missing"])
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{server} returns no hashes of its tensors: {escaped(repr(error))}.") from None
    differing = sorted(name for name in expected if hashes.get(name) != expected[name])
    unknown = sorted(hashes.keys() - expected.keys())
    if differing or unknown:
        name, number = (differing or unknown)[0], len(differing) + len(unknown)
        state = "is missing" if name not in hashes else "differs" if differing else "is not a tensor of the policy"
        raise CheckFailed(
            f"{server} has other weights than the policy: the tensor {escaped(name)} {state} ({number} of "
            f"{len(expected)} tensors). If it reads files, check that they are the same: a network file system may "
            "return old ones."
        )
    if missing:
        raise CheckFailed(
            f"{server} has not loaded its parameter {escaped(str(missing[0]))} ({len(missing)} parameters): vLLM found "
            "no tensor for it in the weights. Use another version of vLLM, or rollout.engine=native."
        )
