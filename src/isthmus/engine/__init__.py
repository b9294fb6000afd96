"""Code that imports megatron.core; other packages import it through this package."""

import sys

from isthmus.engine.upstream.compat import PatchedImports, quiet_missing_extensions

quiet_missing_extensions()
sys.meta_path.insert(0, PatchedImports)
