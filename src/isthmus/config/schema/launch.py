"""The machines on which ``isthmus launch`` starts a run."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from isthmus.config.schema.section import Count, Section, listed, refuse

_SECRET_WORDS = frozenset("TOKEN SECRET PASSWORD PASSWD KEY APIKEY CREDENTIALS".split())
"""Words of a variable's name whose value nobody may read in a file."""
_SECRET_VALUE = re.compile(r"^(hf_|sk-|gh[pousr]_|glpat-|AKIA|eyJ|-----BEGIN )\S{8}|://[^/@\s]*:[^/@\s]+@")
"""Tokens and keys of well-known services, and URLs with a password."""
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_PRINTED = r"[^\x00-\x1f\x7f]*"
_Variable = Annotated[str, StringConstraints(pattern=rf"^{_VARIABLE}$")]
_Text = Annotated[str, StringConstraints(pattern=rf"^{_PRINTED}$", max_length=4096)]
_Word = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f\x7f]+$", max_length=1024)]
_PLAIN = (int, float, type(None))


def _texts(value: object) -> object:
    """Numbers are text, as in a shell, and null is empty."""
    if not isinstance(value, dict):
        return value
    return value | {name: "" if item is None else str(item) for name, item in value.items() if type(item) in _PLAIN}


_Mapped = BeforeValidator(_texts)


class LaunchConfig(Section):
    """Machines of `isthmus launch`; a run itself does not use these settings."""

    nodes: Count = 1
    """Number of machines."""
    spares: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Machines that are requested in addition, for a restart after a machine is lost. slurm: they are idle until then;
    others: torchrun trains on all machines that have joined, at least nodes, and restarts at most this often."""
    name: Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")] | None = None
    """Name of the job: lower case letters, digits and hyphens; null: made of the name of the run folder."""
    workdir: _Text | None = None
    """Working folder on the machines, to which paths of the run are relative; null: the current folder, in a container
    the first one of launch.volumes."""
    python: _Text | None = None
    """Python interpreter on the machines; null: that of this command, in a container python."""
    image: _Word | None = None
    """Container image with isthmus. kubernetes needs it; slurm uses it through the plugin Pyxis."""
    volumes: Annotated[dict[_Word, _Text], _Mapped] = Field(default_factory=dict)
    """What containers mount, with the path in the container. kubernetes: names of PersistentVolumeClaims; slurm:
    folders of the machines."""
    env: Annotated[dict[_Variable, _Text], _Mapped] = Field(default_factory=dict)
    """Environment variables of the ranks, besides those of the platform. They are written into files that others can
    read, so secrets are refused."""
    secrets: Annotated[tuple[_Variable, ...], BeforeValidator(listed), Field(strict=False)] = ()
    """Names of environment variables with secrets, such as HF_TOKEN. slurm and ssh: values of the shell of this
    command; kubernetes: keys of launch.secret; ray: values of the shells that started the cluster."""
    secret: _Word | None = None
    """kubernetes: the Secret that has launch.secrets as keys."""
    queue: _Word | None = None
    """slurm: the partition; kubernetes: the LocalQueue of Kueue."""
    options: Annotated[dict[_Word, _Text], _Mapped] = Field(default_factory=dict)
    """Further options by name. slurm: of sbatch, such as time and account, with no value for those that take
    none; ssh: of ssh -o, such as Port."""
    hosts: Annotated[tuple[_Word, ...], BeforeValidator(listed), Field(strict=False)] = ()
    """ssh: the machines, [USER@]HOST, as many as nodes and spares; the others connect to the first one."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """A free port of the first machine for the rendezvous of torchrun; slurm: a port is made of the number of the job.
    """
    manifest: Literal["TrainJob", "JobSet"] = "TrainJob"
    """kubernetes: a TrainJob of Kubeflow Trainer 2.3 or newer, or a JobSet."""

    @model_validator(mode="after")
    def _no_secrets_in_files(self) -> LaunchConfig:
        for name, value in self.env.items():
            if not _SECRET_WORDS.isdisjoint(name.upper().split("_")) or _SECRET_VALUE.search(value):
                reason = f"{name} looks like a secret, and launch.env is written into files that others can read"
                refuse("env", f"{reason}; export {name} in your shell and list it as launch.secrets={name}")
        return self

    @model_validator(mode="after")
    def _secrets_have_one_source(self) -> LaunchConfig:
        if both := sorted(set(self.secrets) & set(self.env)):
            refuse("secrets", f"{both[0]} is in launch.secrets and in launch.env; leave it out of launch.env")
        return self
