"""One way to refuse an argument, an output path, and a missing extra."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mok_ref.casefile import check_distinct, check_writable
from mok_ref.install import install_hint


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_outputs(
    *outputs: tuple[str, Path | None, tuple[str, ...]],
    inputs: Mapping[str, str | Path | None] | None = None,
) -> None:
    """Refuse, before any work is done, files that cannot be written: (option, path, suffixes).

    inputs  files that are read, by option: no output may replace one of them
    Raises: ValueError naming the option: another suffix, no such folder, one file for two purposes.
    """
    for name, path, suffixes in outputs:
        if path is None:
            continue
        allowed = " or ".join(suffixes)
        require(path.suffix in suffixes, f"{name} must end in {allowed}, got {str(path)!r}")
        check_writable(path, name)
    read = {name: path for name, path in (inputs or {}).items() if path and Path(path).is_file()}
    check_distinct(**read, **{name: path for name, path, _ in outputs})


def read_text(path: Path) -> str:
    """Text of a file. Raises: ValueError naming the file if it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: not a text file: {error}") from None


def parse_json(text: str, where: str, what: str = "JSON") -> Any:
    """What a JSON text holds; `what` the file should have been.

    Raises: ValueError naming the file: no JSON, nested too deeply, an integer of too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: not a {what} file: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: not a {what} file: {error}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table that a TOML text holds.

    Raises: ValueError naming the file: no TOML, nested too deeply, an integer of too many digits.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: not a TOML file: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: not a TOML file: {error}") from None


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
