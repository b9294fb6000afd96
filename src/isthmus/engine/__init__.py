"""Code that imports megatron.core; other packages import it through this package."""

from isthmus.engine.upstream.compat import compile_on_first_call, quiet_missing_extensions

quiet_missing_extensions()
with compile_on_first_call():
    import megatron.core.jit  # noqa: F401  its jit_fuser is torch.compile
