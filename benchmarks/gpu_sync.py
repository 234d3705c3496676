"""The stage `sync` of `benchmarks.gpu`: pushes of weights, beside memcpy, and the device's memory handed over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.weights_sync import MIB, measure
from specactor.data.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

LIMIT_S = 60.0
"""Of the pushes: starting takes as long again. A push of the whole bench's model, loads of it for comparison, and all
of that seven times were cut after 100 s on an H100."""
FIGURES = (
    *("num_bytes", "seconds", "gb_per_s", "memcpy_gb_per_s"),
    *("first_s", "extra_bytes", "through_host", "handed_over"),
)


def turns(repetitions: int, limit_s: float, is_over: Callable[[bool], bool]) -> Iterator[int]:
    """Yield numbers while the seconds last, by the clock of any rank that `is_over` asks; the first in any case."""
    began_s = time.monotonic()
    for number in range(repetitions):
        if number and is_over(time.monotonic() - began_s >= limit_s):
            return
        yield number


def sync(bench: Bench) -> dict[str, Any]:
    """Return seconds and GB/s of pushes from one trainer rank into one engine, beside memcpy, the growth of the rank,
    and seconds and GB of the engine's memory by hand-over."""
    bench.close()
    model_dir = bench.folder / "sync-model"
    if not model_dir.exists():
        make_tiny_model(bench.size.synced, 0, model_dir)
    options = {"world": 1, "expert": 1, "tensor": 1, "engine_tensor": 1, "bucket_bytes": 256 * MIB}
    more = {"repetitions": bench.size.pushes, "extra_args": bench.extra_args, "pushes_alone": True, "limit_s": LIMIT_S}
    seen = measure(model_dir, options | more)
    return {name: seen[name] for name in FIGURES}


def told(found: dict[str, Any]) -> str:
    """Return its line of the table."""
    handed = ", ".join(f"{name} {of['seconds']:.2f} s {of['gb']:+.1f} GB" for name, of in found["handed_over"].items())
    rates, memcpy = median(found["gb_per_s"]), median(found["memcpy_gb_per_s"])
    through = f" through host memory ({found['through_host']})" if found["through_host"] else ""
    return (
        f"{len(found['seconds'])} pushes: {rates:.2f} GB/s{through}, memcpy {memcpy:.2f}, first "
        f"{found['first_s']:.2f} s, {found['extra_bytes'][0] / MIB:.0f} MiB more; {handed}"
    )
