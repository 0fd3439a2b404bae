"""A process that stays behind each MPI rank and sees how it ends.

Launchers believe the exit status of what they started: a rank that leaves a step with status 0 is
"success" to them, and their cleanup kills the other ranks before these can say whom they waited
for. So the launcher starts the watcher, the rank is its child, and the watcher's end is held back
until the others have spoken.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from typing import NoReturn

_GRACE_S = 3.0  # how long the other ranks may take to notice and to end the job themselves
_PR_SET_PDEATHSIG = 1  # Linux prctl: the signal for a child whose parent is gone
_ORDERLY = b"."
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def watch_over(rank: int, num_ranks: int) -> None:
    """Go on as a child of this process, which waits for its end; returns in the child alone.

    The watcher ends as the rank did, except where that one was killed or left without running its
    exit handlers: then it waits for the others to end the job, says so itself if they do not, and
    its status is 2. Both are one process group, and a rank dies with its watcher, so that what
    ends the one ends the other. Where MPI runs already nothing is done: it cannot be forked.
    """
    if "mpi4py.MPI" in sys.modules or not hasattr(os, "fork"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    reader, writer = os.pipe()
    watcher = os.getpid()
    with warnings.catch_warnings():  # BLAS's idle threads, which it restarts by itself
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        os.close(writer)
        _watch(child, reader, rank, num_ranks)
    os.close(reader)
    _die_with(watcher)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    atexit.register(os.write, writer, _ORDERLY)


def _watch(child: int, reader: int, rank: int, num_ranks: int) -> NoReturn:
    """Wait for the rank and end as it did; see `watch_over`."""
    asked_to_end: list[int] = []  # signals that the rank, of the same group, gets as well
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: asked_to_end.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(reader, False)  # children of the rank may still hold the pipe
    orderly = b""
    with suppress(BlockingIOError):
        orderly = os.read(reader, 1)
    if status > 0 or orderly:
        os._exit(max(status, 0))
    if asked_to_end and status < 0:
        os._exit(128 - status)
    if num_ranks > 1:
        time.sleep(_GRACE_S)
    how = f"was killed by signal {-status}" if status < 0 else "left with status 0"
    with suppress(OSError):
        os.write(2, f"error: rank {rank} {how} before the end of the run\n".encode())
    time.sleep(0.05)  # let the launcher read the line before it ends the job
    os._exit(2)


def _die_with(watcher: int) -> None:
    """Have the system end this process with its watcher, whoever kills that one."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != watcher:
        os._exit(2)
