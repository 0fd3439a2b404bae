"""Hardware as data: rates, sizes and topology, each figure with its source.

Figures live in `data/hardware/*.toml` and in files a user writes in the same form. Nothing in the
planner knows a machine by name: what is not in the file cannot influence a prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mok_ref.config import is_real, shown

from .errors import parse_toml, read_text, require

DATA = Path(__file__).parent / "data" / "hardware"


@dataclass(frozen=True)
class Hardware:
    """GPUs in domains of equal size; inside a domain every GPU reads every other's memory.

    Rates are per GPU, in bytes or floating-point operations per second. `link_bytes_per_s` is one
    direction of the domain's network (NVLink), `network_bytes_per_s` one direction of the slower
    network that joins domains; both are nominal and are multiplied by the measured efficiencies.
    `sustained_*` is what power allows for seconds, `burst_bf16_flops` what the clock allows.
    """

    name: str
    title: str
    arch: str
    gpus_per_domain: int
    num_domains: int
    num_sms: int
    memory_bytes: float
    peak_bf16_flops: float
    peak_fp8_flops: float
    sustained_bf16_flops: float
    sustained_fp8_flops: float
    burst_bf16_flops: float
    native_mxfp8: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    combine_bytes_per_s: float
    gather_bytes_per_s: float
    link_bytes_per_s: float
    pull_efficiency: float
    push_efficiency: float
    sm_link_bytes_per_s: float
    network_bytes_per_s: float
    network_efficiency: float
    barrier_us: float
    link_latency_us: float
    network_latency_us: float
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_domain * self.num_domains

    @property
    def link_rate(self) -> float:
        """Bytes per second and direction that rows reach in practice inside a domain."""
        return self.link_bytes_per_s * min(self.pull_efficiency, self.push_efficiency)

    @property
    def network_rate(self) -> float:
        """Bytes per second and direction that rows reach in practice between domains."""
        return self.network_bytes_per_s * self.network_efficiency

    def with_gpus(self, num_gpus: int) -> Hardware:
        """The same machine with `num_gpus` in equal domains, each as large as they divide.

        Raises: ValueError if no domain size of at least half the full one divides num_gpus.
        """
        full = self.gpus_per_domain
        require(num_gpus >= 1, f"num_gpus must be at least 1, got {num_gpus=}")
        if num_gpus <= full:
            return replace(self, gpus_per_domain=num_gpus, num_domains=1)
        sizes = [size for size in range(full, full // 2, -1) if num_gpus % size == 0]
        require(
            bool(sizes),
            f"num_gpus must divide into equal domains of {full // 2 + 1}..{full}, got {num_gpus=}",
        )
        require(
            self.network_bytes_per_s > 0,
            f"num_gpus must be at most {full} without a network between domains, got {num_gpus=}",
        )
        return replace(self, gpus_per_domain=sizes[0], num_domains=num_gpus // sizes[0])

    def scaled(self, tensor: float, link: float) -> Hardware:
        """The same machine with its tensor rates and its link efficiencies multiplied."""
        return replace(
            self,
            sustained_bf16_flops=self.sustained_bf16_flops * tensor,
            sustained_fp8_flops=self.sustained_fp8_flops * tensor,
            burst_bf16_flops=self.burst_bf16_flops * tensor,
            pull_efficiency=self.pull_efficiency * link,
            push_efficiency=self.push_efficiency * link,
        )


TEXT_FIELDS = ("name", "title", "arch")
COUNT_FIELDS = ("gpus_per_domain", "num_domains")
FIGURES = tuple(
    f.name for f in fields(Hardware) if f.name not in (*TEXT_FIELDS, *COUNT_FIELDS, "sources")
)
MAY_BE_ZERO = ("network_bytes_per_s", "native_mxfp8")
MOST_GPUS = 1 << 20
# (names end with, least, most): what lies outside is a figure in another unit
PLAUSIBLE = (
    ("_flops", 1e9, 1e20),
    ("_bytes_per_s", 1e6, 1e17),
    ("memory_bytes", 1e6, 1e17),
    ("_efficiency", 1e-3, 1.0),
    ("_us", 0.0, 1e6),
    ("num_sms", 1, 65536),
    ("native_mxfp8", 0, 1),
)


def parse_hardware(text: str, where: str) -> Hardware:
    """Read one hardware description.

    Raises: ValueError naming the file and the figure that is missing, extra or out of range.
    """
    table = parse_toml(text, where)
    figures = table.pop("figures", {})
    require(
        isinstance(figures, dict),
        f"{where}: figures must be a table [figures], got {shown(figures)}",
    )
    missing = [key for key in (*TEXT_FIELDS, *COUNT_FIELDS) if key not in table]
    missing += [key for key in FIGURES if key not in figures]
    extra = [*(set(table) - {*TEXT_FIELDS, *COUNT_FIELDS}), *(set(figures) - set(FIGURES))]
    require(not missing, f"{where}: missing {', '.join(missing)}")
    known = ", ".join((*TEXT_FIELDS, *COUNT_FIELDS, *FIGURES))
    words = [key if key.isprintable() else shown(key) for key in sorted(extra)]
    require(not extra, f"{where}: unknown {', '.join(words)}; known are {known}")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key in FIGURES:
        values[key], sources[key] = parse_figure(figures[key], key, where)
    check_topology(table, values, where)
    check_peaks(values, where)
    values["num_sms"] = int(values["num_sms"])
    return Hardware(**table, **values, sources=sources)


def check_topology(table: dict[str, Any], figures: dict[str, float], where: str) -> None:
    """Names are lines of text, counts are counts, domains are joined by something."""
    for key in TEXT_FIELDS:
        text = table[key]
        is_line = isinstance(text, str) and bool(text.strip()) and text.isprintable()
        require(is_line, f"{where}: {key} must be one line of text, got {shown(text)}")
    for key in COUNT_FIELDS:
        count = table[key]
        require(
            isinstance(count, int) and not isinstance(count, bool) and count >= 1,
            f"{where}: {key} must be an integer >= 1, got {shown(count)}",
        )
    per_domain, domains = table["gpus_per_domain"], table["num_domains"]
    require(
        per_domain * domains <= MOST_GPUS,
        f"{where}: gpus_per_domain * num_domains must be at most {MOST_GPUS}, "
        f"got {shown(per_domain)} * {shown(domains)}",
    )
    require(
        domains == 1 or figures["network_bytes_per_s"] > 0,
        f"{where}: network_bytes_per_s must be above 0 with num_domains={domains}",
    )


def check_peaks(figures: dict[str, float], where: str) -> None:
    """Nothing runs faster than the vendor's dense peak."""
    for name in ("sustained_bf16", "burst_bf16", "sustained_fp8"):
        peak_name = f"peak_{name.partition('_')[2]}_flops"
        rate, peak = figures[f"{name}_flops"], figures[peak_name]
        require(
            rate <= peak,
            f"{where}: {name}_flops.value must be at most {peak_name} = {peak:g}, got {rate:g}",
        )


def parse_figure(entry: object, key: str, where: str) -> tuple[float, str]:
    """One `{ value = number, source = "text" }`: the number in range, the source not empty."""
    require(
        isinstance(entry, dict) and set(entry) == {"value", "source"},
        f"{where}: {key} must be {{ value = number, source = text }}, got {shown(entry)}",
    )
    assert isinstance(entry, dict)
    value, source = entry["value"], entry["source"]
    require(
        is_real(value) and 0 <= value < math.inf,
        f"{where}: {key}.value must be a number >= 0, got {shown(value)}",
    )
    require(value > 0 or key in MAY_BE_ZERO, f"{where}: {key}.value must be above 0, got {value!r}")
    least, most = next((low, high) for end, low, high in PLAUSIBLE if key.endswith(end))
    require(
        value == 0 or least <= value <= most,
        f"{where}: {key}.value must lie in {least:g}..{most:g}, got {shown(value)}",
    )
    require(
        key != "num_sms" or value == int(value),
        f"{where}: num_sms.value must be a whole number, got {value!r}",
    )
    require(
        isinstance(source, str) and bool(source.strip()),
        f"{where}: {key}.source must say where the figure is from, got {shown(source)}",
    )
    return float(value), source


def known_hardware() -> list[str]:
    """Names that `load_hardware` accepts besides paths."""
    return sorted(path.stem for path in DATA.glob("*.toml"))


def load_hardware(name_or_path: str | Path | Hardware) -> Hardware:
    """A machine by its name, or from a TOML file of the user's.

    Raises: ValueError if it is neither, or if the file is wrong.
    """
    if isinstance(name_or_path, Hardware):
        return name_or_path
    is_name = isinstance(name_or_path, (str, Path))
    require(is_name, f"hardware must be a name or a .toml file, got {shown(name_or_path)}")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        require(
            str(name_or_path) in known_hardware(),
            f"hardware must be one of {', '.join(known_hardware())} or a .toml file, "
            f"got {str(name_or_path)!r}",
        )
        path = DATA / f"{name_or_path}.toml"
    require(path.is_file(), f"hardware file must exist, got {str(path)!r}")
    return parse_hardware(read_text(path), path.name)
