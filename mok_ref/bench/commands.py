"""`mok-ref bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mok_ref.bench.cases import CASES, SMALL_CASES, TABLE_CASES, BenchCase, parse_shape
from mok_ref.bench.entry import require_gpu
from mok_ref.bench.timing import Protocol
from mok_ref.casefile import check_writable, write_whole
from mok_ref.option_names import option_names

if TYPE_CHECKING:
    from mok_ref.bench.cpu import CpuTiming

EXPERIMENTS = ("save", "ranks", "around", "growth", "energy", "traffic")
"""Words of --sizes beside cases: save modes, virtual ranks, kernels around the products, growth of
the cost, joules per call, bytes and instructions per call."""
MAX_COUNT = 10_000  # of repeats, bursts, rounds


def check_counts(**counts: int) -> None:
    """Raises: ValueError naming the first number of repetitions that is out of range."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be >= 1, got {count}")
        if count > MAX_COUNT:
            raise ValueError(f"{name} must be at most {MAX_COUNT}, got {str(count)[:40]}")


def words_of(name: str, text: str) -> list[str]:
    """Comma-separated words. Raises: ValueError naming one that is there twice."""
    words = text.split(",")
    for index, word in enumerate(words):
        if word and word in words[:index]:
            raise ValueError(f"{name} must not name a thing twice, got {word[:40]!r} twice")
    return words


def parse_sizes(text: str) -> list[BenchCase | str]:
    """Cases and experiments in the order of comma-separated words: names of cases, "table",
    "small", "all", TxHxIxExK, any of them with ":bf16" or ":mxfp8"; "mxfp8" (the table's cases);
    EXPERIMENTS. A case that two words name comes once.

    Raises: ValueError.
    """
    chosen: list[BenchCase | str] = []
    for word in words_of("sizes", text):
        if word in EXPERIMENTS:
            chosen.append(word)
            continue
        name, colon, dtype = ("table", ":", "mxfp8") if word == "mxfp8" else word.partition(":")
        found = _parse_case(name)
        if not found or (colon and dtype not in ("bf16", "mxfp8")):
            known = ", ".join((*_GROUPS, "mxfp8", *CASES, *EXPERIMENTS))
            raise ValueError(f"sizes must be of {known} or TxHxIxExK[:mxfp8], got {word[:40]!r}")
        chosen += [case.as_mxfp8() for case in found] if dtype == "mxfp8" else found
    return list(dict.fromkeys(chosen))


_GROUPS = {"table": TABLE_CASES, "small": SMALL_CASES, "all": TABLE_CASES + SMALL_CASES}


def _parse_case(word: str) -> list[BenchCase]:
    """Cases of one word; none if it says nothing. Raises: ValueError for numbers out of range."""
    if word in _GROUPS:
        return [CASES[name] for name in _GROUPS[word]]
    if word in CASES:
        return [CASES[word]]
    shape = parse_shape(word)
    return [] if shape is None else [BenchCase(word, *shape)]


def parse_directions(text: str) -> tuple[str, ...]:
    """ "forward" or "forward,backward": backward needs what forward keeps. Raises: ValueError."""
    words = tuple(words_of("directions", text))
    if words not in (("forward",), ("forward", "backward")):
        raise ValueError(f"directions must be forward or forward,backward, got {text[:40]!r}")
    return words


def parse_peers(text: str) -> tuple[str, ...]:
    """Comma-separated peers; dense cuBLAS always takes part. Raises: ValueError."""
    from mok_ref.bench.peers import PEERS

    short = {name.lower().replace(" ", "-"): name for name in PEERS} | {"dense": "dense cuBLAS"}
    chosen = ["dense cuBLAS"]
    for word in words_of("peers", text):
        if word not in short:
            raise ValueError(f"peers must be of {', '.join(short)}, got {word[:40]!r}")
        if short[word] not in chosen:
            chosen.append(short[word])
    return tuple(chosen)


def bench_on_cpu(
    sizes: str = "small,medium",
    ranks: str = "1,2,4",
    directions: str = "forward,backward",
    repeats: int = 2,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Run, print, write. Each row that is finished is named on stderr at once."""
    from mok_ref.bench.cpu import bench_cpu, bench_json, print_bench
    from mok_ref.verify import parse_ranks

    backward = "backward" in parse_directions(directions)
    check_counts(repeats=repeats)
    _refuse_sizes_of_cuda(words_of("sizes", sizes))
    if output is not None:
        check_writable(output)
    timings = bench_cpu(sizes, parse_ranks(ranks), repeats, backward, _say_finished)
    if output is not None:
        write_whole(output, bench_json(timings))
    print_bench(timings, as_json)


def _refuse_sizes_of_cuda(words: Sequence[str]) -> None:
    """Raises: ValueError naming a word that only the benchmark of a GPU knows."""
    from mok_ref.bench.cpu import SIZES

    for word in words:
        if word not in SIZES and word.split(":")[0] in (*_GROUPS, *CASES, "mxfp8", *EXPERIMENTS):
            raise ValueError(
                f"sizes must be {', '.join(SIZES)} or NxHxIxExK, "
                f"got {word[:40]!r} (which --device cuda knows)"
            )


def _say_finished(timing: CpuTiming) -> None:
    ms = timing.forward_ms + timing.backward_ms
    print(f"{timing.name}, R = {timing.ranks}: {ms:.0f} ms", file=sys.stderr, flush=True)


def bench_cuda(
    sizes: str = "table",
    directions: str = "forward,backward",
    peers: str = "dense,torch-eager",
    repeats: int = Protocol.repeats,
    output: Path | None = None,
    as_json: bool = False,
    bursts: int = Protocol.bursts,
    rounds: int = Protocol.rounds,
) -> bool:
    """Run, print, write; False when a bit differed."""
    chosen, opponents, wanted = parse_sizes(sizes), parse_peers(peers), parse_directions(directions)
    check_counts(repeats=repeats, bursts=bursts, rounds=rounds)
    if output is not None:
        check_writable(output)
    require_gpu("bench --device cuda")
    import torch

    from mok_ref.bench.gpu import BenchReport, bench_case, device_facts, print_report
    from mok_ref.bench.memory import check_memory
    from mok_ref.bench.variants import Instruments, run_experiment

    with option_names(cases="sizes"):
        check_memory([c for c in chosen if isinstance(c, BenchCase)], torch.cuda.mem_get_info()[0])
    instruments = Instruments.of(chosen)  # refuses before anything is measured
    torch.cuda.set_stream(torch.cuda.Stream())
    report = BenchReport(device_facts())

    def keep() -> None:
        if output is not None:
            write_whole(output, report.to_json())

    protocol = Protocol(repeats=repeats, rounds=rounds, bursts=bursts)
    for what in chosen:
        if isinstance(what, str):
            run_experiment(what, report, opponents, instruments, keep)
        else:
            bench_case(what, wanted, opponents, report, protocol)
        keep()
    if as_json:
        print(report.to_json())
    else:
        print_report(report)
    return all(bits == "equal" for bits in report.bits.values())
