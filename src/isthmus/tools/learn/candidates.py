"""Candidate families of an unsupported decoder: all combinations of the open choices, the likeliest first.

With the output of attention, or of both blocks of a layer, set to zero, the logits depend on few choices. So the
choices are searched in stages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.families.inferred.json_family import FORMAT
from isthmus.tools.learn.candidate_rules import ALTERNATING, FEED_FORWARD, QKV, candidate_rules, has_biases
from isthmus.tools.learn.config_inference import ConfigInference
from isthmus.tools.learn.matrix_matching import ExpertTensors, MatrixRoles, Role
from isthmus.tools.learn.tensor_matching import DecoderStructure, NormPlacement

Choices = Mapping[str, Any]
EPSILONS = (1e-6, 1e-5, 1e-8)
"""Epsilon of norms, if no setting has it."""
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh"}
_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class SearchStage:
    """Choices that are tested on one variant of the probe model."""

    name: str
    zeroed: tuple[Role, ...]
    """Roles of the matrices that are zero in this variant."""
    options: Callable[[Choices], Iterator[Choices]]
    """All combinations of this stage's choices, given those of earlier stages."""


class Candidates:
    def __init__(
        self, settings: ConfigInference, structure: DecoderStructure, live: Container[str], architecture: str
    ) -> None:
        """``live``: numeric settings that change the logits. ``architecture``: class name in transformers."""
        self.settings = settings
        self.structure = structure
        self.live = live
        self.architecture = architecture
        self.stages: tuple[SearchStage, SearchStage, SearchStage] = (
            SearchStage("embedding, last norm and output layer", ("o", "fc2"), self._ends),
            SearchStage("feed-forward block", ("o",), self._feed_forward),
            SearchStage("attention", (), self._attention),
        )

    def is_zeroed(self, stage: SearchStage) -> Callable[[str], bool]:
        experts = self.structure.experts
        seen = [self.structure.matrices, *((experts.matrices, experts.shared) if experts else ())]
        modules = [ways[0].modules[role] for ways in seen for role in stage.zeroed if ways and role in ways[0].modules]
        names = "|".join(re.escape(module).replace(r"\{expert\}", r"\d+") for module in modules)
        pattern = re.compile(rf"{re.escape(self.structure.layers)}\d+\.({names})(\.weight|\.bias)?")
        return lambda name: pattern.fullmatch(name) is not None

    def family_data(self, picks: Choices) -> dict[str, Any]:
        """The contents of a family file; open choices have the likeliest value."""
        chosen = {**self._likeliest(), **picks}
        keys = self.settings.keys(self.live)
        traits = self._traits(chosen)
        if isinstance(chosen["epsilon"], float):
            keys.pop("norm_epsilon", None)
            traits["norm_epsilon"] = chosen["epsilon"]
        derived = self.settings.derived()
        if chosen["embedding scale"] is not None and "embedding_multiplier" not in keys:
            derived["embedding_multiplier"] = chosen["embedding scale"]
        window = self.settings.window(chosen["window"])
        if chosen["unrotated"]:
            window["unrotated"] = chosen["unrotated"]
        return {
            "format": FORMAT,
            "name": self.settings.effective["model_type"],
            "hf_architecture": self.architecture,
            "keys": keys,
            "derived": derived,
            "traits": traits,
            "fixed": self.settings.fixed(self.live),
            "without_bearing": self.settings.irrelevant_numbers(self.live),
            "window": window,
            "rope": {"defaults": {} if self.structure.positions else self.settings.rope_defaults(), "names": {}},
            "rules": candidate_rules(self.structure, chosen),
        }

    def describe(self, picks: Choices) -> list[str]:
        lines = []
        for name, value in picks.items():
            if isinstance(value, NormPlacement):
                value = f"{value.form}: " + ", ".join(f"{norm} = {module}" for norm, module in value.modules.items())
            elif isinstance(value, MatrixRoles):
                value = ", ".join(f"{role} = {module}" for role, module in value.modules.items())
                value += " as [in, out]" if picks[name].transposed else ""
            elif value is None:
                continue
            lines.append(value if name in ("attention", "feed-forward") else f"{name}: {value}")
        return lines

    def _likeliest(self) -> dict[str, Any]:
        choices: dict[str, Any] = {}
        for options in (self._ends, self._feed_forward, self._attention):
            choices |= next(options(choices))
        return choices

    def _ends(self, _picks: Choices) -> Iterator[Choices]:
        kinds = ["LayerNorm", "LayerNorm of one plus its weight"]
        if not self.structure.norm_bias:
            kinds = ["RMSNorm", "RMSNorm of one plus its weight", *kinds]
        epsilons: list[Any] = [self.settings.epsilon] if self.settings.epsilon in self.live else [*EPSILONS]
        scales = [None, f"{self.settings.sizes['hidden_size']}**0.5"]
        if "embedding_multiplier" in self.live:
            scales = ["embedding_multiplier"]
        yield from _product({"norm": kinds, "epsilon": epsilons, "embedding scale": scales})

    def _feed_forward(self, _picks: Choices) -> Iterator[Choices]:
        configured = self.settings.effective.get(self.settings.activation or "")
        activations = list(dict.fromkeys([_ACTIVATIONS.get(str(configured), "silu"), "silu", "gelu", "gelu_tanh"]))
        for matrices in _with_roles(self.structure.matrices, FEED_FORWARD):
            choices = {"norms": self.structure.norms, "activation": activations, "gate and up": _orders(matrices)}
            if self.structure.experts is not None:
                choices = self._expert_choices(self.structure.experts) | choices
            for picks in _product(choices):
                yield {"feed-forward": matrices, **picks}

    def _expert_choices(self, experts: ExpertTensors) -> dict[str, Sequence[Any]]:
        scores = ["softmax", "sigmoid", "softmax_of_chosen"]
        if experts.expert_bias is not None:
            scores = ["sigmoid", "softmax"]
        normalized = bool(self.settings.effective.get("norm_topk_prob"))
        return {
            "groups of experts": ["top2", "max"] if "moe.num_groups" in self.settings.sizes else [None],
            "scores of experts": scores,
            "weights are normalized": [normalized, not normalized],
            "experts": experts.matrices,
            "experts' gate and up": _orders(experts.matrices[0]),
            "shared experts": experts.shared or [None],
        }

    def _attention(self, picks: Choices) -> Iterator[Choices]:
        chosen: MatrixRoles = picks["feed-forward"]
        for matrices in _with_roles(self.structure.matrices, (*QKV, "o")):
            if matrices.transposed != chosen.transposed or {*matrices.modules.values()} & {*chosen.modules.values()}:
                continue
            fused = "qkv" in matrices.modules
            rotary = [None] if self.structure.positions else ["halves", "neighbours"]
            choices = {
                "queries, keys and values": ["by group", "concatenated"] if fused else [None],
                "rotary pairs": rotary,
                "scale of scores": [None] if "attention_scale" in self.settings.keys(self.live) else [None, 1.0],
                "window": [self._window()],
                "unrotated": [None, "full_attention"] if len(set(self.settings.layer_types)) > 1 else [None],
            }
            for picked in _product(choices):
                yield {"attention": matrices, **picked}

    def _window(self) -> str:
        if "sliding_window" not in self.live:
            return "never"
        return "pattern" if "sliding_attention" in self.settings.layer_types else "always"

    def _traits(self, chosen: Choices) -> dict[str, Any]:
        structure, norms = self.structure, chosen["norms"]
        attention, feed_forward = chosen["attention"].modules, chosen["feed-forward"].modules
        layer_norm = chosen["norm"].startswith("LayerNorm")
        traits: dict[str, Any] = {
            "normalization": "LayerNorm" if layer_norm else "RMSNorm",
            "norm_zero_centered": chosen["norm"].endswith("plus its weight"),
            "form": norms.form,
            "activation": chosen["activation"],
            "gated": "fc1" not in feed_forward,
            "qkv_bias": has_biases(structure, attention, QKV),
            "proj_bias": has_biases(structure, attention, ("o",)),
            "mlp_bias": has_biases(structure, feed_forward, FEED_FORWARD),
            "tie_embeddings": structure.head is None,
        }
        if layer_norm:
            traits["norm_bias"] = structure.norm_bias
        if structure.qk_norms:
            over = "head" if structure.qk_norms[0][1] == "D" else "projection"
            traits |= {"qk_norm": True, "qk_norm_over": over}
        if structure.sinks is not None:
            traits["attention_sinks"] = True
        if structure.experts is not None:
            traits |= {"moe.score": chosen["scores of experts"], "moe.normalize": chosen["weights are normalized"]}
            for name in ("expert_bias", "router_bias", "shared_gate"):
                traits[f"moe.{name}"] = getattr(structure.experts, name) is not None
            if chosen["groups of experts"] is not None:
                traits["moe.group_score"] = chosen["groups of experts"]
        if structure.positions is not None:
            traits["position"] = "learned"
        else:
            traits["rotary_interleaved"] = chosen["rotary pairs"] == "neighbours"
        if chosen["scale of scores"] is not None:
            traits["attention_scale"] = chosen["scale of scores"]
        return traits


def _orders(matrices: MatrixRoles) -> list[str | None]:
    return ["concatenated", ALTERNATING] if "gate_up" in matrices.modules else [None]


def _with_roles(assignments: Sequence[MatrixRoles], roles: Sequence[str]) -> Iterator[MatrixRoles]:
    """Distinct assignments of the given roles."""
    seen: list[MatrixRoles] = []
    for matrices in assignments:
        part = MatrixRoles(
            {role: name for role, name in matrices.modules.items() if role in roles}, matrices.transposed
        )
        if part not in seen:
            seen.append(part)
            yield part


def _product(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))
