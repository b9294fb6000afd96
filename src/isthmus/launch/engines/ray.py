"""A job on a running Ray cluster, whose driver starts an agent of torchrun on each machine."""

from __future__ import annotations

import json
import shlex

from isthmus.extras import install_command
from isthmus.launch.engines.job import Job, run_program, torchrun_environment, torchrun_words

FIRST_MACHINE, THIS_MACHINE = "{first}", "{machine}"
"""Replaced by the driver with addresses: of the first machine of the job, and of that of the agent."""


def render(job: Job) -> str:
    """The command that submits the job."""
    return shlex.join(_words(job))


def submit(job: Job) -> int:
    """Submit the job to the cluster at RAY_API_SERVER_ADDRESS; default: that of this machine."""
    return run_program(_words(job), "", f"Run {install_command('ray')}.")


def _words(job: Job) -> list[str]:
    request = {
        "machines": job.nodes,
        "resources": {"CPU" if job.platform.device_type == "cpu" else "GPU": job.ranks_per_node},
        "workdir": job.workdir,
        "environment": {name: value for name, (value, _) in torchrun_environment(job).items()},
        "secrets": job.machines.secrets,
        "words": [torchrun_words(job, FIRST_MACHINE, local_address=name) for name in (FIRST_MACHINE, THIS_MACHINE)],
        "spares": job.machines.spares,
    }
    driver = [job.python, "-m", "isthmus.launch.engines.ray_driver", json.dumps(request)]
    # Ray kills the driver 3 s after a stop request otherwise.
    runtime = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(job.stop_s)}}
    return ["ray", "job", "submit", "--no-wait", f"--runtime-env-json={json.dumps(runtime)}", "--", *driver]
