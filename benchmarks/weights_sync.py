"""Weight sync: a 100 M-parameter model from trainer ranks into an engine, beside memcpy and SGLang's own load.

python -m benchmarks.weights_sync
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import weights_sync_checks
from benchmarks.recipes import HUNDRED_MILLION
from benchmarks.results import RESULTS, Result, markdown, publish, spread, stored, write_rows
from specactor.data.tiny_model import make_tiny_model
from specactor.planning.model_shapes import SHAPES
from specactor.planning.rooflines import DEVICES

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300
MIB = 2**20
AIM_ALONE, AIM = 0.4, 0.25  # of memcpy's rate, with one trainer rank and with several
LAYOUTS = {
    "1 rank": {"world": 1, "expert": 1, "tensor": 1, "bucket_bytes": 256 * MIB},
    "EP2": {"world": 2, "expert": 2, "tensor": 1, "bucket_bytes": 128 * MIB},
    "DP2": {"world": 2, "expert": 1, "tensor": 1, "bucket_bytes": 128 * MIB},
    "TP2": {"world": 2, "expert": 1, "tensor": 2, "bucket_bytes": 128 * MIB},
}
PREDICTED = (("Qwen3-30B-A3B", 4), ("Qwen3-235B-A22B", 8))
"""Models, with the tensor parallelism of their engines in the recipes' way."""
SLACK = 1.05  # of the model: the most that a host may receive (see two_hosts)
PCIE_BYTES_PER_S = 50e9  # of 63, generation 5 with 16 lanes; assumed, as in docs/gpu.md
LINKS = {"10 Gbit/s": 10e9 / 8, "400 Gbit/s": 400e9 / 8}
COLUMNS = (
    "Trainer",
    "engine TP",
    "bucket MiB x 2",
    "rounds",
    "first sync s",
    "sync s",
    "sync GB/s",
    "memcpy GB/s",
    "of memcpy",
    "processor s per GB",
    "SGLang load of tensors s",
    "SGLang load from disk s",
    "gather GB/s",
    "extra memory per bucket",
)


def measure(model_dir: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of a run saw."""
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = ["-m", "benchmarks.weights_sync_rank", str(model_dir), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, *torchrun, "--nproc-per-node", str(options["world"]), *script],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            seen: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return seen
    raise RuntimeError(f"the run of {options} gave no result. Its end:\n{done.stderr[-3000:]}")


def row(name: str, options: dict[str, Any], seen: dict[str, Any]) -> tuple[str, ...]:
    bucket = options["bucket_bytes"]
    return (
        name,
        str(options["engine_tensor"]),
        str(bucket // MIB),
        str(seen["num_rounds"]),
        f"{seen['first_s']:.2f}",
        spread(seen["seconds"]),
        spread(seen["gb_per_s"]),
        spread(seen["memcpy_gb_per_s"]),
        f"{median(seen['gb_per_s']) / median(seen['memcpy_gb_per_s']):.0%}",
        f"{seen['processor_s_per_gb']:.2f}",
        spread(seen["tensor_load_s"]),
        spread(seen["disk_load_s"]),
        spread(seen["gather_gb_per_s"]),
        f"{max(seen['extra_bytes']) / bucket:.2f}",
    )


INTRO = """\
Trainer ranks push their weights into one running engine; median (minimum-maximum) of 7 pushes, each followed by a \
memcpy of the same bytes in rank 0. The first sync goes through buckets and SGLang's loader, and gives the plan by \
which engine ranks then copy their parts out of the trainer's memory; the digests of all that their parameters hold \
are compared with the trainer's. `SGLang load of tensors` is the model's `load_weights` from tensors in the engine's \
own memory, without any check. The file also has loading from disk, gathering, and the growth of a rank's memory in \
buckets (at most 2)."""
HOW = """\
The trainer reads the bytes once, to digest them; the engine copies them in pieces of 1 MiB, and digests each piece \
where it has arrived, while it is in the cache. memcpy only copies."""
SHOWN = (
    "Trainer",
    "engine TP",
    "first sync s",
    "sync s",
    "sync GB/s",
    "memcpy GB/s",
    "of memcpy",
    "processor s per GB",
    "SGLang load of tensors s",
)
"""What the page shows; the file has the rest."""


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """How far the aim is."""
    share, seconds = COLUMNS.index("of memcpy"), COLUMNS.index("sync s")
    aims = [AIM_ALONE if row[0] == "1 rank" else AIM for row in rows]
    shares = [float(row[share].rstrip("%")) / 100 for row in rows]
    slowest = max(rows, key=lambda row: float(row[seconds].split()[0]))
    met = sum(map(float.__ge__, shares, aims))
    return (
        f"A push reaches {min(shares):.0%} to {max(shares):.0%} of memcpy's rate; the aim ({AIM_ALONE:.0%} of a rank, "
        f"{AIM:.0%} of several) is met in {met} of {len(rows)} rows. The slowest, {slowest[0]} to an engine of TP "
        f"{slowest[1]}, takes {slowest[seconds]} s."
    )


def measured() -> list[tuple[str, ...]]:
    """Run all layouts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "model"
        make_tiny_model(HUNDRED_MILLION, 0, model_dir)
        for engine_tensor in (1, 2):
            for name, layout in LAYOUTS.items():
                if engine_tensor > layout["world"]:
                    continue  # engines run on the trainer's own cores
                options = {**layout, "engine_tensor": engine_tensor, "repetitions": 7}
                rows.append(row(name, options, measure(model_dir, options)))
    return rows


def predicted(rows: Sequence[Sequence[str]]) -> str:
    """What the parts say of larger models: a table, and how it comes about."""
    shares = [float(row[COLUMNS.index("of memcpy")].rstrip("%")) / 100 for row in rows]
    memcpy = median(float(row[COLUMNS.index("memcpy GB/s")].split()[0]) for row in rows) * 1e9
    h100 = DEVICES["H100"]
    lines = []
    for name, engine_tensor in PREDICTED:
        whole = SHAPES[name].weights_bytes
        own = whole / engine_tensor
        ways = (own / memcpy, own * 2 / h100.memory_bytes_per_s)
        cells = [f"{least / max(shares):.2g}-{least / min(shares):.2g}" for least in ways]
        cells.append(f"{2 * own / PCIE_BYTES_PER_S:.2g}")
        links = [f"{SLACK * whole / rate:.1f}" for rate in LINKS.values()]
        lines.append([name, f"{whole / 1e9:.0f}", str(engine_tensor), f"{own / 1e9:.1f}", *cells, *links])
    columns = ("Model", "GB", "engine TP", "GB per engine rank", "this memory s", "own H100 s", "host memory s")
    return (
        "What follows for larger models in bfloat16, from parts: an engine rank copies the bytes that it holds, at the "
        f"share of a plain copy that was measured here ({min(shares):.0%}-{max(shares):.0%}). `this memory`: of this "
        "machine, for one rank. "
        "`own H100`: all of it lies on the rank's own device, and each byte is read and written; `host memory`: none "
        f"of it, and each byte crosses PCIe once to the host and once back, at {PCIE_BYTES_PER_S / 1e9:g} GB/s. "
        f"A host receives at most {SLACK} of the model over its link, whatever its engines. None of it was measured, "
        "and digests on GPUs are not counted.\n\n"
        + markdown([*columns, *(f"host link {link} s" for link in LINKS)], lines)
    )


def checked(rows: Sequence[Sequence[str]]) -> str:
    """What each check costs: a table, if it was measured."""
    if not rows:
        return ""
    return (
        "Each check by itself, of as many bytes, on one core; [as CSV](weights_sync_checks.csv). Measured: "
        f"{rows[0][-1]}.\n\n" + markdown(weights_sync_checks.COLUMNS[:-1], [row[:-1] for row in rows])
    )


def main() -> None:
    """Measure and write the page; `--stored` writes it again from the rows that are there, `--checks` measures what
    checks cost besides."""
    is_stored = "--stored" in sys.argv or "--checks" in sys.argv
    rows = [tuple(of.values()) for of in stored("weights_sync", RESULTS)] if is_stored else measured()
    if "--stored" in sys.argv:
        there = (RESULTS / "weights_sync_checks.csv").exists()
        checks = [tuple(of.values()) for of in stored("weights_sync_checks", RESULTS)] if there else []
    else:
        checks = weights_sync_checks.measured()
        write_rows("weights_sync_checks", weights_sync_checks.COLUMNS, checks)
    publish(
        "weights_sync",
        Result(
            title="Weight sync of a 100 M-parameter model in float32",
            verdict=verdict(rows),
            intro=INTRO,
            columns=COLUMNS,
            rows=rows,
            summary=(SHOWN, [[of[COLUMNS.index(name)] for name in SHOWN] for of in rows]),
            source=(RESULTS / "weights_sync.md").read_text().splitlines()[-1] if is_stored else "",
            notes="\n\n".join(filter(None, (HOW, checked(checks), predicted(rows)))),
        ),
    )


if __name__ == "__main__":
    main()
