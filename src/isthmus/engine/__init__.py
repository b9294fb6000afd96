"""The one door to megatron.core: everything that knows Megatron lives here and nothing outside imports it."""

from isthmus.engine.upstream.compat import quiet_missing_extensions

quiet_missing_extensions()
