"""Wall time per stage of the layer on one rank; costs nothing unless somebody asked for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

_thread = threading.local()  # virtual ranks are threads: each has its own clock


class StageClock:
    """Seconds and calls per stage, and a callback for progress after each call."""

    def __init__(self, after: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._after = after

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.calls[name] = self.calls.get(name, 0) + 1
        if self._after is not None:
            self._after(name)

    @contextmanager
    def running(self) -> Iterator[StageClock]:
        """Collect the stages that this thread enters inside the `with` block."""
        _thread.clock = self
        try:
            yield self
        finally:
            _thread.clock = None


@contextmanager
def stage_time(name: str) -> Iterator[None]:
    """Count the block as stage `name` if this thread runs a clock."""
    clock: StageClock | None = getattr(_thread, "clock", None)
    start = time.perf_counter()
    try:
        yield
    finally:
        if clock is not None:
            clock.add(name, time.perf_counter() - start)


def stage(name: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorator: every call of the function counts as stage `name`."""

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> Result:
            with stage_time(name):
                return function(*args, **kwargs)

        return timed

    return decorate
