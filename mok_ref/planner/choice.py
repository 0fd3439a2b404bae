"""One configuration that the planner may choose, and its way of splitting the machine."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import require
from .stages import TILE_ROWS

SHARDINGS = ("none", "optimizer", "gradients")
SAVES = ("all", "ring", "none")


@dataclass(frozen=True)
class Choice:
    """EP x TP x DP and the kernel's batches.

    ep_size             ranks over which the experts are spread; each is a group of tp_size GPUs
    tp_size             GPUs that share an expert's columns (no sum is ever cut)
    dp_size             copies of the expert set, each on ep_size * tp_size GPUs
    sharding            what data-parallel copies share: nothing, optimizer states, gradients too
    minibatch           rows of one hand-over; macrobatch: rows of the ring token buffer
    communication_sms   SMs that only move rows; 0: helper warps of every SM move them
    save                what forward keeps for backward: "all", "ring" or "none"
    """

    ep_size: int
    tp_size: int = 1
    dp_size: int = 1
    sharding: str = "optimizer"
    minibatch: int = 2048
    macrobatch: int = 8192
    communication_sms: int = 0
    save: str = "all"
    dtype: str = "bf16"
    native_fp8: bool = False

    def __post_init__(self) -> None:
        for name in ("ep_size", "tp_size", "dp_size", "minibatch", "macrobatch"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value >= 1,
                f"{name} must be an integer >= 1, got {value!r}",
            )
        require(
            self.sharding in SHARDINGS,
            f"sharding must be one of {', '.join(SHARDINGS)}, got {self.sharding!r}",
        )
        require(self.save in SAVES, f"save must be one of {', '.join(SAVES)}, got {self.save!r}")
        require(
            self.minibatch % TILE_ROWS == 0,
            f"minibatch must be a multiple of {TILE_ROWS}, got minibatch={self.minibatch}",
        )
        require(
            self.macrobatch % self.minibatch == 0,
            "macrobatch must be a multiple of minibatch, got "
            f"macrobatch={self.macrobatch}, minibatch={self.minibatch}",
        )

    @property
    def num_gpus(self) -> int:
        return self.ep_size * self.tp_size * self.dp_size

    @property
    def ring_slots(self) -> int:
        return self.macrobatch // self.minibatch

    def __str__(self) -> str:
        share = f"{self.communication_sms} SMs" if self.communication_sms else "helper warps"
        return (
            f"EP {self.ep_size} x TP {self.tp_size} x DP {self.dp_size}, {self.dtype}, "
            f"sharding {self.sharding}, minibatch {self.minibatch}, macrobatch {self.macrobatch}, "
            f"{share}, save {self.save}"
        )
