"""Everything that imports megatron.core; other packages use it through this one."""

from isthmus.engine.upstream.compat import quiet_missing_extensions

quiet_missing_extensions()
