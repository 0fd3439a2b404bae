"""Running under mpiexec: which rank this is, and how one rank's error ends the job exactly once."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any, NoReturn

import numpy as np

from mok_ref.heap.mpi import import_mpi
from mok_ref.heap.protocol import HeapError
from mok_ref.watcher import watch_over

_LAUNCHER_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_ABORT_WAIT_S = 20.0  # how long a rank whose error is not the first waits to be ended


def under_mpiexec() -> bool:
    """Whether a launcher of MPI processes started this one (also with -n 1)."""
    return any(variable in os.environ for variable in _LAUNCHER_VARIABLES)


def _from_launcher(variables: tuple[str, ...], default: int) -> int:
    """A number that the launcher left in the environment, before MPI has started."""
    return next((int(os.environ[name]) for name in variables if name in os.environ), default)


def start_job() -> MpiJob | None:
    """This process's part in an MPI job, None outside one; without mpi4py the job ends here."""
    if not under_mpiexec():
        return None
    watch_over(_from_launcher(_RANK_VARIABLES, 0), _from_launcher(_SIZE_VARIABLES, 2))
    try:
        return MpiJob()
    except HeapError as error:
        end_with_error(None, f"error: {error}")


def end_with_error(job: MpiJob | None, message: str, status: int = 2) -> NoReturn:
    """`message` on stderr once, however many processes there are, and their end with `status`."""
    if job is not None:
        job.fail(message, status)
    if _from_launcher(_RANK_VARIABLES, 0) == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # a launcher may end the job with its first process: rank 0 speaks first
    sys.exit(status)


def one_line(error: Any) -> str:
    """What an error says, in one line; with MOK_REF_DEBUG set its whole traceback."""
    if os.environ.get("MOK_REF_DEBUG") and isinstance(error, BaseException):
        return "".join(traceback.format_exception(error))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


class MpiJob:
    """This process's part in an MPI job.

    All ranks make it at the same point. The first rank that calls `fail` prints its message and
    ends every process; later ones stay silent. Which rank is first is settled by a compare-and-swap
    on one shared integer, because a rank that fails cannot count on hearing from the others.
    """

    def __init__(self) -> None:
        mpi = import_mpi()
        self.comm: Any = mpi.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        here = self.comm.Split_type(mpi.COMM_TYPE_SHARED)
        num_bytes = 8 if here.rank == 0 else 0
        self._claim = mpi.Win.Allocate_shared(num_bytes, 1, comm=here)
        if here.rank == 0:
            np.frombuffer(self._claim.Shared_query(0)[0], np.int64, 1)[0] = 0
        self._claim.Lock_all()
        self.comm.Barrier()

    def fail(self, message: str, status: int = 2) -> NoReturn:
        """Print `message` on stderr, once in the whole job, and end all processes with `status`."""
        if self._is_first():
            print(message, file=sys.stderr, flush=True)
            # The library's own word about the abort would be a second line of error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            time.sleep(0.05)  # let the launcher read the line before it ends this process
            self.comm.Abort(status)
        time.sleep(_ABORT_WAIT_S)
        os._exit(status)

    def _is_first(self) -> bool:
        one, zero, before = (np.full(1, value, np.int64) for value in (1, 0, -1))
        self._claim.Compare_and_swap(one, zero, before, 0, 0)
        self._claim.Flush(0)
        return int(before[0]) == 0

    def close(self) -> None:
        """Leave together: an error of any rank before this point still ends the job."""
        self._claim.Unlock_all()
        self._claim.Free()
