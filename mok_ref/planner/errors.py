"""One way to refuse an argument, an output path, and a missing extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from mok_ref.casefile import check_writable
from mok_ref.install import install_hint


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_outputs(*outputs: tuple[str, Path | None, tuple[str, ...]]) -> None:
    """Refuse, before any work is done, files that cannot be written: (option, path, suffixes).

    Raises: ValueError naming the option: another suffix, no such folder, one file for two outputs.
    """
    seen: dict[Path, str] = {}
    for name, path, suffixes in outputs:
        if path is None:
            continue
        allowed = " or ".join(suffixes)
        require(path.suffix in suffixes, f"{name} must end in {allowed}, got {str(path)!r}")
        try:
            check_writable(path)
        except ValueError as error:
            raise ValueError(str(error).replace("output", name, 1)) from None
        other = seen.setdefault(path.resolve(), name)
        require(other == name, f"{other} and {name} must be different files, got {str(path)!r}")


def optional_module(name: str, extra: str = "planner") -> ModuleType:
    """Import `name`, or say which command installs it.

    Raises: RuntimeError naming the module and the command.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{name} is needed here and not installed: {install_hint(extra)}"
        ) from error
