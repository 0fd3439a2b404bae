"""`mok-ref bench --device cuda`."""

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
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            "bench --device cuda times torch beside this layer: pip install torch"
        ) from error
    from mok_ref.bench.gpu import BenchReport, bench_case, device_facts, print_report

    chosen, opponents = parse_cases(cases), parse_peers(peers)
    wanted = tuple(word for word in ("forward", "backward") if word in directions.split(","))
    if not wanted:
        raise ValueError(f"directions must be of forward, backward, got {directions!r}")
    torch.cuda.set_stream(torch.cuda.Stream())
    report = BenchReport(device_facts())
    protocol = Protocol(repeats=repeats or 20, bursts=bursts)
    for case in chosen:
        bench_case(case, wanted, opponents, report, protocol)
        if output is not None:
            partial = output.with_suffix(".part")
            partial.write_text(report.to_json())
            partial.replace(output)
    if as_json:
        print(report.to_json())
    else:
        print_report(report)
    return all(bits == "equal" for bits in report.bits.values())
