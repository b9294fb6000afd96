"""Settings that nothing honours yet."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError


def check_built(config: RunConfig) -> None:
    """Refuse them.

    Raises:
        UsageError: naming the first.
    """
    data = config.data
    unbuilt = {
        "data.sets": data.sets,
        "data.mock": data.mock,
        "data.columns": data.columns,
        "data.test_files": data.test_files,
        "data.test_fraction": data.test_fraction,
        "data.length_buckets": data.length_buckets,
    }
    for name, value in unbuilt.items():
        if value:
            raise UsageError(f"{name} is not built yet. Leave it out.")
