"""A batch script of Slurm: one task per rank, queued again after a preemption."""

from __future__ import annotations

import shlex

from isthmus.errors import DataError, Diverged, MissingInput, OutputError, Preempted, UnsafeInput, UsageError
from isthmus.launch.engines.job import Job, check_secrets, run_program
from isthmus.platforms.rank_env import RUN_TOKEN

_FINAL_CODES = (
    0,
    *(e.exit_code for e in (UsageError, DataError, MissingInput, OutputError, Preempted, UnsafeInput, Diverged)),
)
"""Exit codes that the loss of a machine does not cause."""
_TEXT = """\
#!/bin/bash
# Written by isthmus launch slurm.
{options}

# Slurm sends SIGTERM to the ranks {stop_s} s before the time limit, and when it preempts the job. They save and exit
# with code {preempted}; then the job is queued again, and the same command resumes from the checkpoint.
export {token}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')  # no other process takes part
{environment}
{secrets}
# One task per rank; ranks read the variables of srun.
for attempt in {attempts}; do
  srun {srun}
  status=$?
  case "$status" in {final}) break ;; esac  # no lost machine
done
if [ "$status" -eq {preempted} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def render(job: Job) -> str:
    """The batch script."""
    machines = job.machines
    job.config.parallel.check_world_size(machines.nodes * job.ranks_per_node)
    gpus = {} if job.platform.device_type == "cpu" else {"gpus-per-node": str(job.ranks_per_node)}
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks_per_node),
        **gpus,
        **({"partition": machines.queue} if machines.queue else {}),
        **({"no-kill": ""} if machines.spares else {}),
        "chdir": job.workdir,
        "signal": f"TERM@{job.stop_s}",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    if fixed := [name for name in machines.options if name in ("nodes", "ntasks-per-node", "gpus-per-node", "chdir")]:
        raise UsageError(f"launch.options has {fixed[0]}, which launch.nodes, --nproc, --gpus or launch.workdir sets.")
    srun = [f"--nodes={machines.nodes}", f"--ntasks={machines.nodes * job.ranks_per_node}", "--kill-on-bad-exit=1"]
    if machines.spares:  # the step of a lost machine keeps its cores on the others
        srun.append("--overlap")
    if cores := machines.options.get("cpus-per-task"):  # which srun does not inherit since Slurm 22.05
        srun.append(f"--cpus-per-task={cores}")
    if machines.image:
        mounts = ",".join(f"{folder}:{path}" for folder, path in machines.volumes.items())
        srun += [f"--container-image={machines.image}", f"--container-workdir={job.workdir}"]
        srun += [f"--container-mounts={mounts}"] if mounts else []
    return _TEXT.format(
        options="\n".join(_option(name, value) for name, value in (options | machines.options).items()),
        stop_s=job.stop_s,
        token=RUN_TOKEN,
        environment="\n".join(f"export {k}={shlex.quote(v)}  # {why}" for k, (v, why) in job.environment.items()),
        secrets="".join(f': "${{{name}:?of launch.secrets is not set}}"\n' for name in machines.secrets),
        attempts=" ".join(map(str, range(machines.spares + 1))),
        srun=shlex.join([*srun, job.python, "-m", "isthmus", *job.command]),
        final="|".join(map(str, _FINAL_CODES)),
        preempted=Preempted.exit_code,
    )


def submit(job: Job) -> int:
    """Submit the batch script with ``sbatch``, which reads it from its input."""
    check_secrets(job)
    return run_program(["sbatch"], render(job), "Use a login node of the cluster, or copy the file of --dry-run there.")


def _option(name: str, value: str) -> str:
    return f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
