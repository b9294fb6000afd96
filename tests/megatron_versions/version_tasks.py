"""Run by test_versions.py in a process with one version of megatron-core: writes checkpoints, reads those of others.

``python version_tasks.py write|read SETTINGS`` prints a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import isthmus.engine  # noqa: F401  # first: imports megatron-core 0.18 and newer without Triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.core
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import load_file

from isthmus.config.schema import ParallelConfig
from isthmus.convert.transfer import convert
from isthmus.engine.parallel.process_groups import open_groups
from isthmus.platforms.detect import detect
from ranks import megatron_core_model
from ranks.pool_worker import leave_groups
from ranks.tasks import train

HALF = 10


def write(*, models: dict[str, str], samples: str, root: str) -> dict[str, Any]:
    """For each model a run with a checkpoint, a converted checkpoint, and one that megatron-core itself saves."""
    runs = {}
    for family, model in models.items():
        folder = Path(root, family)
        run = in_new_groups(
            train, model=model, samples=samples, micro_batch_size=4, save_at=[HALF], root=str(folder / "run")
        )
        runs[family] = {"loss": run["loss"], "digest": run["digest"]}
        convert(Path(model), folder / "converted")
        in_new_groups(save_with_megatron_core, str(folder / "converted" / "release"), folder / "saved")
    return {"version": megatron.core.__version__, "runs": runs}


def read(*, models: dict[str, str], samples: str, written: dict[str, str], out: str) -> dict[str, Any]:
    """What each checkpoint in ``written``, by the version that wrote it, is for this version."""
    values: dict[str, Any] = {}
    for version, root in written.items():
        values[version] = {}
        for family, model in models.items():
            folder, to = Path(root, family), Path(out, version, family)
            saved = folder / "run" / f"iter_{HALF:07d}"
            run = in_new_groups(train, model=model, samples=samples, micro_batch_size=4, resume=str(saved))
            convert(folder / "run", to / "run", "hf", hf_like=Path(model))
            loaded = in_new_groups(
                megatron_core_model.load_into_megatron_model,
                model=model,
                checkpoint_folder=str(folder / "converted" / "release"),
                strict="raise_unexpected",
            )
            values[version][family] = {
                "loss": run["loss"],
                "digest": run["digest"],
                "exported": content(to / "run").keys() == content(Path(model)).keys(),
                "max_difference": loaded["max_difference"],
                "converted": equal_after_conversion(folder / "converted", to / "converted", Path(model)),
                "saved": equal_after_conversion(folder / "saved", to / "saved", Path(model)),
            }
    return {"version": megatron.core.__version__, "values": values}


def save_with_megatron_core(converted: str, folder: Path) -> None:
    """Load a converted checkpoint into its GPTModel, and save that with ``dist_checkpointing.save``."""
    open_groups(ParallelConfig(), detect("cpu"), seed=0)
    args = dist_checkpointing.load_common_state_dict(converted)["args"]
    model = megatron_core_model.build_megatron_model(args, 1, 1)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, converted)
    model.load_state_dict(state["model"])
    (release := folder / "iter_0000007").mkdir(parents=True)
    saved = {"model": model.sharded_state_dict(), "args": args, "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save(saved, str(release))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def equal_after_conversion(source: Path, destination: Path, model: Path) -> bool:
    """Whether it has the same bytes as the model; only with the arguments in the checkpoint."""
    convert(source, destination, "hf")
    before, after = content(model), content(destination)
    return before.keys() == after.keys() and all(tensor.equal(after[name]) for name, tensor in before.items())


def content(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def in_new_groups(task: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return task(*args, **kwargs)
    finally:
        parallel_state.destroy_model_parallel()
        leave_groups()


if __name__ == "__main__":
    print(json.dumps({"write": write, "read": read}[sys.argv[1]](**json.loads(sys.argv[2]))))
