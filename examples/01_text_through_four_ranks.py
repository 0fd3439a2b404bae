"""A text goes through a mixture-of-experts layer on four ranks that pull each other's tokens.

    mpiexec -n 4 python examples/01_text_through_four_ranks.py [TEXT]     four processes
    python examples/01_text_through_four_ranks.py [TEXT]                  four threads

Every byte of the text is a token. Its vector is a fixed random embedding of the byte plus half of
the embedding of the byte before it; a router with fixed random weights sends it to two of eight
experts, two experts live on each rank. Both commands print the same digest, because the layer has
the same bits for any number of ranks (mpiexec -n 3 gives it too: eight experts on three ranks are
shared out as evenly as they go).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mok_ref.bench.entry import script_parser
from mok_ref.casefile import Case
from mok_ref.experts import ExpertWeights
from mok_ref.launch import end_with_error, one_line, start_job
from mok_ref.numerics import as_values, bf16_to_bits, mul, to_bf16
from mok_ref.plotting import check_picture_path, draw_routing
from mok_ref.routing import RoutingOptions
from mok_ref.runner import RunResult, Settings, make_plan, run_mpi, run_virtual, traffic_of
from mok_ref.testing import random_bf16

DEFAULT_TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
RANKS, EXPERTS, TOP_K = 4, 8, 2
HIDDEN, INTERMEDIATE, SHARED = 64, 96, 32


def embed(text: bytes) -> np.ndarray:
    """(N, H) bf16 bits: x[t] = bf16(table[byte t] + table[byte t-1] / 2)."""
    table = as_values(random_bf16(np.random.default_rng([1, 0]), (256, HIDDEN)))
    bytes_ = np.frombuffer(text, np.uint8)
    before = np.concatenate([np.zeros(1, np.uint8), bytes_[:-1]])
    return bf16_to_bits(to_bf16(table[bytes_] + mul(table[before], np.float32(0.5))))


def make_case(text: bytes) -> Case:
    """The layer's input: tokens from the text, fixed random weights, a softmax router."""
    rng = np.random.default_rng([1, 1])

    def weights(*shape: int) -> np.ndarray:
        return random_bf16(rng, shape, shape[-1] ** -0.5).view(np.uint16)

    return Case(
        x=embed(text),
        w_gate=weights(EXPERTS, INTERMEDIATE, HIDDEN),
        w_up=weights(EXPERTS, INTERMEDIATE, HIDDEN),
        w_down=weights(EXPERTS, HIDDEN, INTERMEDIATE),
        shared=ExpertWeights(
            weights(SHARED, HIDDEN), weights(SHARED, HIDDEN), weights(HIDDEN, SHARED)
        ),
        w_router=weights(EXPERTS, HIDDEN),
        routing=RoutingOptions(TOP_K, renormalize=True),
    )


def favourites(text: bytes, result: RunResult, expert: int, count: int = 6) -> str:
    """The characters that most often have `expert` as their first choice."""
    chosen = np.frombuffer(text, np.uint8)[result.topk_ids[:, 0] == expert]
    values, how_often = np.unique(chosen, return_counts=True)
    best = values[np.argsort(-how_often, kind="stable")[:count]]
    return " ".join(repr(chr(value)) if 32 <= value < 127 else f"{value:#04x}" for value in best)


def report(text: bytes, result: RunResult, picture: Path) -> None:
    """How many tokens each expert got, the picture, the digest."""
    rows = result.rows_per_expert()
    owners = result.plan.config.owner_of_expert
    print(f"{len(text)} bytes, {result.plan.config.ep_size} ranks, {EXPERTS} experts, K={TOP_K}")
    for expert, count in enumerate(rows):
        bar = "#" * round(40 * count / max(1, rows.max()))
        likes = favourites(text, result, expert)
        print(f"expert {expert} on rank {owners[expert]}: {count:5d} tokens {bar:40s} {likes}")
    print("rows that rank i (down) pulls from rank j (across):")
    traffic = traffic_of(result.plan, result.topk_ids)
    print("\n".join("  " + " ".join(f"{n:5d}" for n in row) for row in traffic))
    try:
        draw_routing(picture, "Experts of each byte", result.topk_ids, EXPERTS, traffic)
        print(f"picture {picture}")
    except RuntimeError as error:
        print(f"no picture: {error}")
    print(f"digest {result.digest}")


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument(
        "text", nargs="?", type=Path, default=DEFAULT_TEXT,
        help="any file; every byte is a token (default: the project's LICENSE)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=2048, help="bytes to take (default %(default)s)"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("text_routing.png"),
        help="picture of the routing, .png, .svg or .pdf; needs matplotlib (default %(default)s)",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    job = start_job()
    try:
        arguments = parse_arguments()
        check_picture_path(arguments.plot)
        text = arguments.text.read_bytes()[: max(0, arguments.max_tokens)]
        if not text:
            raise ValueError(f"text must hold at least one byte, got {arguments.text}")
        case = make_case(text)
        if job is None:
            result: RunResult | None = run_virtual(make_plan(case, Settings(ranks=RANKS)))
        else:
            result = run_mpi(make_plan(case, Settings(placement="even"), job.size), job.comm)
        if result is not None:
            report(text, result, arguments.plot)
        if job is not None:
            job.close()
    except (ValueError, OSError, RuntimeError) as error:
        end_with_error(job, f"error: {one_line(error)}")


if __name__ == "__main__":
    main()
