"""The startup hook: two files in site-packages, with which every Python of the environment fixes Megatron-LM's saver.

Python imports the module at each start. It only waits for the import of the saver, and then runs checkpoint_saver.py.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from isthmus.engine.upstream.checkpoint_saver import MODULE
from isthmus.files.atomic_write import write_atomic

NAME = "isthmus_megatron_patch"
_HOOK = f'''"""`isthmus patch runtime --install` wrote this file and {NAME}.pth; --remove deletes both.

It fixes the async saver of Megatron-LM when Python imports it.
"""

import sys


class PatchOnImport:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "{MODULE}":
            return None
        import importlib.util
        import os
        from importlib.machinery import PathFinder

        isthmus = importlib.util.find_spec("isthmus")
        # Only this file: a program with Megatron-LM must not change because Isthmus is installed.
        file = isthmus and os.path.join(os.path.dirname(isthmus.origin), "engine", "upstream", "checkpoint_saver.py")
        if not file or not os.path.exists(file):
            sys.stderr.write("{NAME}: Isthmus is not installed, so Megatron-LM is not patched. "
                             "Install it, or delete " + __file__ + " and the .pth file beside it.\\n")
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        patch_spec = importlib.util.spec_from_file_location("{NAME}_checkpoint_saver", file)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            patch = importlib.util.module_from_spec(patch_spec)
            patch_spec.loader.exec_module(patch)
            patch.patch_module(module)

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, PatchOnImport)
'''


def hook_files(site_packages: Path | None = None) -> dict[Path, str]:
    """Paths and contents of the two files, by default in the site-packages of this Python."""
    folder = site_packages or Path(sysconfig.get_path("purelib"))
    return {folder / f"{NAME}.py": _HOOK, folder / f"{NAME}.pth": f"import {NAME}\n"}


def installed(files: dict[Path, str]) -> bool:
    """Both files exist. Their content may be that of another version, whose hook works as well."""
    return all(path.exists() for path in files)


def install(files: dict[Path, str]) -> None:
    """Write the files; those of another version are replaced. Raises IOFailure if the folder is read-only."""
    for path, content in files.items():
        write_atomic(path, content)


def remove(files: dict[Path, str]) -> None:
    """Delete the files, the one that Python reads at its start first."""
    for path in reversed(files):
        path.unlink(missing_ok=True)
