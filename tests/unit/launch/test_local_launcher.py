from __future__ import annotations

import inspect

from torch.distributed.elastic.multiprocessing import PContext


def test_torch_elastic_has_the_default_that_the_launcher_sets() -> None:
    parameters = inspect.signature(PContext.close).parameters
    assert list(parameters) == ["self", "death_sig", "timeout"]
    assert [parameters[name].default is not inspect.Parameter.empty for name in ("death_sig", "timeout")] == [
        True,
        True,
    ]
