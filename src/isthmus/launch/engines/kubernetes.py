"""A TrainJob of Kubeflow Trainer, or a JobSet: an agent of torchrun in a pod of each machine."""

from __future__ import annotations

from typing import Any

from isthmus.config.yaml_text import write_mapping
from isthmus.errors import UsageError
from isthmus.launch.engines.job import Job, run_program, torchrun_environment, torchrun_words

_CONTAINER = "node"
"""Name of the replicated job and of its container, as in the runtime torch-distributed of Kubeflow Trainer."""
_RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu", "cpu": "cpu"}
_QUEUE = "kueue.x-k8s.io/queue-name"


def render(job: Job) -> str:
    """The manifest as YAML."""
    machines = job.machines
    if not machines.image:
        raise UsageError("kubernetes needs a container image with isthmus. Set launch.image.")
    if not machines.volumes:
        raise UsageError(
            "kubernetes needs a volume that all pods share, for the run folder. Set launch.volumes.CLAIM=/PATH, with "
            "the name of a PersistentVolumeClaim."
        )
    if machines.secrets and not machines.secret:
        raise UsageError(
            f"launch.secrets names {machines.secrets[0]}, and launch.secret names no Secret with it. Set it."
        )
    return write_mapping(_train_job(job) if machines.manifest == "TrainJob" else _job_set(job))


def submit(job: Job) -> int:
    """Submit the manifest with ``kubectl``, to the cluster and namespace of its context."""
    return run_program(["kubectl", "apply", "-f", "-"], render(job), "Install it, or apply the manifest of --dry-run.")


def _train_job(job: Job) -> dict[str, Any]:
    """The runtime of the cluster has the policy for failures, and adds a service that names the pods."""
    patch = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": _pod(job)}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": job.machines.image,
                "command": _command(job),
                "env": _environment(job),
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                "resourcesPerNode": _resources(job),
            },
            "runtimePatches": [
                {"manager": "isthmus", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}}}
            ],
        },
    }


def _job_set(job: Job) -> dict[str, Any]:
    """The JobSet: with spares, a pod that is lost is replaced, and torchrun restarts the ranks.

    All pods are started again if the others cannot continue: as often as there are spares, and after a disruption, such
    as a preemption, without a limit.
    """
    spares = job.machines.spares
    pod = _pod(job)
    pod["containers"][0] |= {
        "image": job.machines.image,
        "command": _command(job),
        "env": _environment(job),
        "resources": _resources(job),
    }
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    batch_job = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": spares,
        "podFailurePolicy": {"rules": [{"action": "Ignore" if spares else "FailJob", "onPodConditions": [disrupted]}]},
        "template": {"spec": {**pod, "restartPolicy": "Never"}},
    }
    restart = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": spares, "rules": [restart]},
            "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": {"spec": batch_job}}],
        },
    }


def _metadata(job: Job) -> dict[str, Any]:
    labels = {"labels": {_QUEUE: job.machines.queue}} if job.machines.queue else {}
    return {"name": job.name, **labels}


def _command(job: Job) -> list[str]:
    """The service of a JobSet is named like it, and its first pod is the host of the rendezvous."""
    words = torchrun_words(job, f"{job.name}-{_CONTAINER}-0-0.{job.name}")
    # Kubernetes replaces $(NAME) in a command.
    return [word.replace("$(", "$$(") for word in ("env", f"--chdir={job.workdir}", *words)]


def _environment(job: Job) -> list[dict[str, Any]]:
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": job.machines.secret, "key": name}}}
        for name in job.machines.secrets
    ]
    values = {name: value.replace("$(", "$$(") for name, (value, _) in torchrun_environment(job).items()}
    return [*({"name": name, "value": value} for name, value in values.items()), *secrets]


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {_RESOURCES[job.platform.name]: job.ranks_per_node}}


def _pod(job: Job) -> dict[str, Any]:
    """Volumes, and memory in /dev/shm, of which a container has 64 MiB otherwise."""
    claims = {f"volume-{number}": claim for number, claim in enumerate(job.machines.volumes)}
    mounts = dict(zip(claims, job.machines.volumes.values(), strict=True)) | {"memory": "/dev/shm"}
    return {
        "terminationGracePeriodSeconds": job.stop_s,
        "volumes": [
            *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim in claims.items()),
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [
            {"name": _CONTAINER, "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()]}
        ],
    }
