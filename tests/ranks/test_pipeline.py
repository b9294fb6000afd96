"""Pipelines with virtual and uneven stages, also with latent attention, train like one process.

MTP layers with virtual stages are in test_mtp.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from ranks.rank_pool import RankPool
from ranks.tasks import TOTAL_STEPS
from ranks.test_layouts import CURVES, TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder

YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("qwen2", {"tie_word_embeddings": False}),
    "five": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "eight": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 8}),
    "latent-v2": ("deepseek_v2", {"q_lora_rank": None, "num_hidden_layers": 3, **YARN}),
    "latent-v3": ("deepseek_v3", YARN),
}
STEPS = 4
LOAD_BALANCING = {"aux_loss": 0.01, "seq_aux_loss": 0.01, "z_loss": 0.001, "expert_bias_update_rate": 0.05}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stages")
    return {name: build_model_folder(root / name, family, **settings) for name, (family, settings) in MODELS.items()}


class SingleProcessRuns:
    """Single-process results by model and number of steps, each computed once."""

    def __init__(self, one_rank: RankPool, folders: dict[str, Path], samples: Path) -> None:
        self._one_rank, self._folders, self._samples = one_rank, folders, samples
        self._results: dict[tuple[str, int], dict[str, Any]] = {}

    def of(self, name: str, steps: int) -> dict[str, Any]:
        if (name, steps) not in self._results:
            self._results[name, steps] = self._one_rank.run(
                "ranks.tasks.train",
                model=self._folders[name],
                samples=self._samples,
                micro_batch_size=2,
                steps=steps,
                evaluate=True,
            )
        return self._results[name, steps]


@pytest.fixture(scope="module")
def single_process(one_rank: RankPool, folders: dict[str, Path], samples: Path) -> SingleProcessRuns:
    return SingleProcessRuns(one_rank, folders, samples)


@pytest.mark.thorough_cases(
    "five-layers-pp4",
    "latent-v2-tp2",
    "latent-v3-tp2-sp-pp2-vpp2",
    "tied-pp2-vpp2-dp2-slow-rank",
    "tied-pp4-vpp2-recomputed",
    "untied-tp2-pp2-vpp2",
)
@pytest.mark.parametrize(
    ("name", "ranks", "steps", "layout"),
    [
        pytest.param("tied", 2, TOTAL_STEPS, {"pp": 2, "vpp": 2, "micro_batch_size": 1}, id="tied-pp2-vpp2"),
        pytest.param(
            "tied",
            4,
            STEPS,
            {"pp": 2, "vpp": 2, "micro_batch_size": 1, "slow_rank": 0},
            id="tied-pp2-vpp2-dp2-slow-rank",
        ),
        pytest.param("untied", 4, STEPS, {"tp": 2, "pp": 2, "vpp": 2}, id="untied-tp2-pp2-vpp2"),
        pytest.param("eight", 4, STEPS, {"pp": 4, "vpp": 2, "recompute": "full"}, id="tied-pp4-vpp2-recomputed"),
        pytest.param("five", 4, STEPS, {"pp": 4}, id="five-layers-pp4"),
        pytest.param("latent-v2", 2, STEPS, {"tp": 2, "sp": False}, id="latent-v2-tp2"),
        pytest.param("latent-v2", 2, STEPS, {"pp": 2, "recompute": "selective"}, id="latent-v2-three-layers-pp2"),
        pytest.param("latent-v3", 4, STEPS, {"tp": 2, "pp": 2, "vpp": 2}, id="latent-v3-tp2-sp-pp2-vpp2"),
    ],
)
def test_pipeline_trains_as_single_process(
    name: str,
    ranks: int,
    steps: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    folders: dict[str, Path],
    samples: Path,
    single_process: SingleProcessRuns,
) -> None:
    """Packed sequences of all lengths; the last evaluation batches do not fill the virtual pipeline."""
    settings = {"micro_batch_size": 2, "steps": steps, "evaluate": True, **layout}
    run = worlds[ranks].run("ranks.tasks.train", model=folders[name], samples=samples, **settings)
    truth = single_process.of(name, steps)
    assert run["loss_tokens"] == truth["loss_tokens"]
    differences = {curve: max_relative_difference(run[curve], truth[curve]) for curve in CURVES}
    assert max(differences.values()) < TOLERANCE
    for key in ("valid_before", "valid_after"):
        assert run[key] == pytest.approx(truth[key], rel=TOLERANCE)


@pytest.mark.thorough_cases("virtual-with-experts")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("tied", {"pp": 2, "more": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}, id="dropout"),
        pytest.param("latent-v3", {"pp": 2, "vpp": 2, "moe": LOAD_BALANCING}, id="virtual-with-experts"),
    ],
)
def test_equal_lengths_change_no_result(
    name: str, layout: dict[str, Any], two_ranks: RankPool, folders: dict[str, Path], samples: Path
) -> None:
    """As in pipelines on GPUs: padded micro batches, no exchange of shapes."""
    settings = {"model": folders[name], "samples": samples, "micro_batch_size": 2, "steps": STEPS, "evaluate": True}
    plain, padded = (
        two_ranks.run("ranks.tasks.train_counting_shapes", equal_lengths=equal, **settings, **layout)
        for equal in (False, True)
    )
    assert plain["shapes"] > 0 and padded["shapes"] == 0
    assert padded["tokens"] > plain["tokens"] and padded["loss_tokens"] == plain["loss_tokens"]
    differences = {curve: max_relative_difference(padded[curve], plain[curve]) for curve in CURVES}
    assert max(differences.values()) < TOLERANCE
    for without, with_padding in zip(plain["load"], padded["load"], strict=True):
        assert (without or {}) == pytest.approx(with_padding or {}, rel=TOLERANCE)
    for key in ("valid_before", "valid_after"):
        assert padded[key] == pytest.approx(plain[key], rel=TOLERANCE)


@pytest.mark.thorough_cases("uneven")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("tied", {"pp": 2, "vpp": 2}, id="virtual"),
        pytest.param("five", {"pp": 2}, id="uneven"),
    ],
)
def test_checkpoints_are_independent_of_stages(
    name: str,
    layout: dict[str, Any],
    one_rank: RankPool,
    two_ranks: RankPool,
    folders: dict[str, Path],
    samples: Path,
    tmp_path: Path,
) -> None:
    """Bitwise with the same stages, within tolerance with other stages, in both directions."""
    settings = {"model": folders[name], "samples": samples, "micro_batch_size": 2, "steps": STEPS}
    saves = {"save_at": [2], "root": tmp_path / "staged"}
    full = two_ranks.run("ranks.tasks.train", **settings, **layout, **saves)
    saved = tmp_path / "staged" / "iter_0000002"
    same = two_ranks.run("ranks.tasks.train", **settings, **layout, resume=saved)
    assert same["loss"] == full["loss"][2:] and same["digest"] == full["digest"]
    plain = one_rank.run("ranks.tasks.train", **settings, resume=saved, save_at=[3], root=tmp_path / "plain")
    assert max(max_relative_difference(plain[curve], full[curve][2:]) for curve in CURVES) < TOLERANCE
    back = two_ranks.run("ranks.tasks.train", **settings, **layout, resume=tmp_path / "plain" / "iter_0000003")
    assert max(max_relative_difference(back[curve], full[curve][3:]) for curve in CURVES) < TOLERANCE


@pytest.mark.thorough_cases("virtual-with-experts")
@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        pytest.param("tied", 2, {"pp": 2, "vpp": 2}, id="virtual"),
        pytest.param("latent-v3", 4, {"tp": 2, "pp": 2, "vpp": 2}, id="virtual-with-experts"),
    ],
)
def test_pipeline_export_equals_checkpoint(
    name: str,
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    folders: dict[str, Path],
    samples: Path,
    tmp_path: Path,
) -> None:
    settings = {"model": folders[name], "samples": samples, "micro_batch_size": 2, **layout}
    places = {"root": tmp_path / "checkpoints", "destination": tmp_path / "export"}
    worlds[ranks].run("ranks.tasks.save_and_export", **settings, **places)
    convert(tmp_path / "checkpoints", tmp_path / "converted", hf_like=folders[name])
    compare_models(tmp_path / "export", tmp_path / "converted")
