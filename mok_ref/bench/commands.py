"""`mok-ref bench`."""

from __future__ import annotations

from pathlib import Path

from mok_ref.bench.cases import CASES, SMALL_CASES, TABLE_CASES, BenchCase
from mok_ref.bench.timing import Protocol


def parse_cases(text: str) -> list[BenchCase]:
    """Names of cases, "table", "small", "all", or TxHxIxExK. Raises: ValueError."""
    groups = {"table": TABLE_CASES, "small": SMALL_CASES, "all": TABLE_CASES + SMALL_CASES}
    cases: list[BenchCase] = []
    for word in text.split(","):
        sizes = word.split("x")
        if word in groups:
            cases += [CASES[name] for name in groups[word]]
        elif word in CASES:
            cases.append(CASES[word])
        elif len(sizes) == 5 and all(size.isdecimal() and int(size) > 0 for size in sizes):
            tokens, hidden, inner, experts, top_k = map(int, sizes)
            cases.append(BenchCase(word, tokens, hidden, inner, experts, top_k))
        else:
            known = ", ".join((*groups, *CASES))
            raise ValueError(f"cases must be of {known} or TxHxIxExK, got {word!r}")
    return cases


def parse_directions(text: str) -> tuple[str, ...]:
    """Of "forward,backward", in this order. Raises: ValueError."""
    words = text.split(",")
    if not set(words) <= {"forward", "backward"}:
        raise ValueError(f"directions must be of forward, backward, got {text!r}")
    return tuple(word for word in ("forward", "backward") if word in words)


def parse_peers(text: str) -> tuple[str, ...]:
    """Comma-separated peers; dense cuBLAS always takes part. Raises: ValueError."""
    from mok_ref.bench.peers import PEERS

    short = {name.lower().replace(" ", "-"): name for name in PEERS} | {"dense": "dense cuBLAS"}
    chosen = ["dense cuBLAS"]
    for word in filter(None, text.split(",")):
        if word not in short:
            raise ValueError(f"peers must be of {', '.join(short)}, got {word!r}")
        if short[word] not in chosen:
            chosen.append(short[word])
    return tuple(chosen)


def bench_on_cpu(
    sizes: str, ranks: str, directions: str, repeats: int, output: Path | None, as_json: bool
) -> None:
    """Run, print, write."""
    from mok_ref.bench.cpu import bench_cpu, bench_json, print_bench
    from mok_ref.verify import parse_ranks

    backward = "backward" in parse_directions(directions)
    timings = bench_cpu(sizes, parse_ranks(ranks), repeats, backward)
    if output is not None:
        write_whole(output, bench_json(timings))
    print_bench(timings, as_json)


def write_whole(path: Path, text: str) -> None:
    """Under a temporary name, then renamed."""
    partial = path.with_suffix(".part")
    partial.write_text(text)
    partial.replace(path)


def bench_cuda(
    cases: str = "table",
    directions: str = "forward,backward",
    peers: str = "dense,torch-eager",
    repeats: int | None = None,
    output: Path | None = None,
    as_json: bool = False,
    bursts: int = 5,
) -> bool:
    """Run, print, write; False when a bit differed."""
    from mok_ref.heap.cuda_device import import_cupy

    import_cupy()  # without a GPU that is what to say first
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            "bench --device cuda times torch beside this layer: pip install torch"
        ) from error
    from mok_ref.bench.gpu import BenchReport, bench_case, device_facts, print_report

    chosen, opponents, wanted = parse_cases(cases), parse_peers(peers), parse_directions(directions)
    torch.cuda.set_stream(torch.cuda.Stream())
    report = BenchReport(device_facts())
    protocol = Protocol(repeats=repeats or 20, bursts=bursts)
    for case in chosen:
        bench_case(case, wanted, opponents, report, protocol)
        if output is not None:
            write_whole(output, report.to_json())
    if as_json:
        print(report.to_json())
    else:
        print_report(report)
    return all(bits == "equal" for bits in report.bits.values())
