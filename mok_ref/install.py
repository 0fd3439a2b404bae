"""How to install what an optional part needs."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from urllib.parse import unquote, urlparse


def install_hint(extra: str) -> str:
    """The command that installs an extra of this copy: of the checkout it runs or came from.

    The package is on no index, so its name alone would install nothing (or something else).
    """
    source = source_folder()
    if source is None:
        return f"""pip install ".[{extra}]" in a checkout of mok_ref"""
    place = "." if source == Path.cwd() else str(source)
    return f"""pip install "{place}[{extra}]\""""


def source_folder() -> Path | None:
    """The checkout this package runs from, or was installed from; None where it is gone."""
    beside = Path(__file__).resolve().parents[1]
    if (beside / "pyproject.toml").is_file():
        return beside
    try:
        text = importlib.metadata.distribution("mok_ref").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(text)["url"] if text else "")
    folder = Path(unquote(url.path))
    return folder if url.scheme == "file" and (folder / "pyproject.toml").is_file() else None
