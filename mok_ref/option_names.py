"""Errors of the Python interface in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def option_names(**options: str) -> Iterator[None]:
    """Inside, a ValueError names the option that was typed: with ep_size="--ep" the argument
    `ep_size` of a message becomes `--ep`. Whole words only."""
    try:
        yield
    except ValueError as error:
        raise ValueError(in_options(str(error), options)) from error


def in_options(message: str, options: dict[str, str]) -> str:
    """`message` with every argument's name replaced by its option."""
    if not options:
        return message
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({names})(?![\w./-])", lambda m: options[m[1]], message)
