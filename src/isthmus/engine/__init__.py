"""Code that imports megatron.core; other packages import it through this package."""

from isthmus.engine.upstream.compat import quiet_missing_extensions

quiet_missing_extensions()
