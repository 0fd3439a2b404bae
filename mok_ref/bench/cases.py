"""The shapes that are timed, and routings for them.

FLOPs: forward 6 * rows * H * I, backward twice that; rows = T * K routed rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

MAX_NUMBER = 10**9 - 1
MAX_TOP_K = 64


@dataclass(frozen=True)
class BenchCase:
    """One layer shape on one rank.

    routing   "uniform", "zipf" (an expert's popularity is 1 / rank^s), or "one": all routes to
              expert 0
    dtype     "bf16" or "mxfp8": how the routed experts multiply
    """

    name: str
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    routing: str = "uniform"
    zipf_exponent: float = 1.0
    dtype: str = "bf16"

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k

    def flops(self, direction: str) -> float:
        """Floating-point operations of "forward" or "backward"."""
        forward = 6.0 * self.num_rows * self.hidden_size * self.intermediate_size
        return forward if direction == "forward" else 2 * forward

    def as_mxfp8(self) -> BenchCase:
        """The same shape with MXFP8 experts."""
        return replace(self, name=f"{self.name}:mxfp8", dtype="mxfp8")


CASES = {
    case.name: case
    for case in (
        BenchCase("dsv3-rank", 4096, 7168, 2048, 4, 8),
        BenchCase("kimi-16", 8192, 7168, 2048, 16, 8),
        BenchCase("mixtral", 8192, 4096, 14336, 8, 2),
        BenchCase("qwen3", 8192, 2048, 768, 128, 8),
        BenchCase("qwen3-zipf", 8192, 2048, 768, 128, 8, "zipf"),
        BenchCase("sonic", 32768, 4096, 1024, 128, 8),
        BenchCase("small-16", 16, 2048, 768, 128, 8),
        BenchCase("small-128", 128, 2048, 768, 128, 8),
        BenchCase("small-512", 512, 2048, 768, 128, 8),
    )
}
TABLE_CASES = ("dsv3-rank", "kimi-16", "mixtral", "qwen3", "qwen3-zipf", "sonic")
SMALL_CASES = ("small-16", "small-128", "small-512")


def parse_shape(word: str) -> tuple[int, int, int, int, int] | None:
    """(T, H, I, E, K) of "TxHxIxExK"; None for a word of another form.

    K may exceed E: routes repeat then.
    Raises: ValueError for numbers that are out of range.
    """
    if not re.fullmatch(r"(0|[1-9][0-9]*)(x(0|[1-9][0-9]*)){4}", word):
        return None
    texts = word.split("x")
    # by their lengths: int() refuses thousands of digits
    if "0" in texts or any(len(text) > len(str(MAX_NUMBER)) for text in texts):
        raise ValueError(f"sizes must be numbers in 1..{MAX_NUMBER}, got {word[:40]!r}")
    tokens, hidden, inner, experts, top_k = map(int, texts)
    if top_k > MAX_TOP_K:
        raise ValueError(f"sizes must have K in 1..{MAX_TOP_K}, got {word!r}")
    return tokens, hidden, inner, experts, top_k


def routes(case: BenchCase, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(topk_ids (T, K) int32, topk_weights (T, K) float32 that sum to 1).

    Distinct experts per token where E >= K, else drawn with replacement; distinct ones by the
    Gumbel trick.
    """
    rng = np.random.default_rng(seed)
    shape = (case.num_tokens, case.num_experts)
    if case.routing == "one":
        ids = np.zeros((case.num_tokens, case.top_k), np.int64)
    elif case.num_experts < case.top_k:
        ids = rng.integers(0, case.num_experts, (case.num_tokens, case.top_k))
    else:
        popularity = np.zeros(case.num_experts)
        if case.routing == "zipf":
            place = rng.permutation(case.num_experts) + 1.0
            popularity = -case.zipf_exponent * np.log(place)
        score = popularity + rng.gumbel(size=shape)
        ids = np.argpartition(-score, case.top_k - 1, axis=1)[:, : case.top_k]
    weights = rng.random((case.num_tokens, case.top_k)) + 0.1
    weights /= weights.sum(axis=1, keepdims=True)
    return ids.astype(np.int32), weights.astype(np.float32)
