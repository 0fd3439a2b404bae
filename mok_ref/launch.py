"""Running under mpiexec: which rank this is, and how one rank's error ends the job exactly once."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NoReturn

import numpy as np

from mok_ref.heap.mpi import import_mpi

_LAUNCHER_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")
_ABORT_WAIT_S = 20.0  # how long a rank whose error is not the first waits to be ended


def under_mpiexec() -> bool:
    """Whether a launcher of MPI processes started this one (also with -n 1)."""
    return any(variable in os.environ for variable in _LAUNCHER_VARIABLES)


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
