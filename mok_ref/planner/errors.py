"""One way to refuse an argument, and one way to ask for a missing extra."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def optional_module(name: str, extra: str = "planner") -> ModuleType:
    """Import `name`, or say which command installs it.

    Raises: ModuleNotFoundError naming the module and `pip install "mok_ref[extra]"`.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{name} is needed here and not installed: pip install "mok_ref[{extra}]"'
        ) from error
