"""What only a GPU can show: whether tokens there are equal, and what rounds, weights and a whole job take.

    python -m benchmarks.gpu [--out FOLDER] [--stages STAGE ...] [--device cpu]

probe   versions, memory, speed of copies
kernels our own kernels beside the CPU's tokens, and a row's bits alone and in company
exact   the same requests alone, in batches, in CUDA graphs and without, with drafts: tokens and log-probabilities
rows    seconds of a round by requests and draft tokens
speed   tokens/s with drafts of a known acceptance over plain ones, in turns
large   the same at the shape of Qwen3-30B-A3B, long prompts and drafts of models too; needs 135 GB
sync    pushes of weights for a minute, beside memcpy; seconds and bytes of an engine's memory that is handed over
job     a short quickstart with and without speculation: the same metrics

Each stage leaves FOLDER/STAGE.json, and is not run again while that is there. On a CPU the same is done in small.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import dialled, gpu_large, gpu_speed, gpu_sync
from benchmarks.disturbed_run import compared
from benchmarks.results import machine
from specactor.config import EngineConfig, RolloutConfig, SpeculationConfig, TinyModelConfig
from specactor.data.stream import request_seed
from specactor.data.tiny_model import make_tiny_model
from specactor.data.tokenizer import VOCAB_SIZE
from specactor.parallel.devices import gpu_uuid, gpus
from specactor.planning.profile_command import Sizes, measure_once
from specactor.planning.profile_grid import Cell
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.run_folder import RunFolder
from specactor.types import RolloutRequest, SamplingParams, Trajectory

ROOT = Path(__file__).resolve().parent.parent
MIB, GB = 2**20, 1e9
JOB_S = 900.0
Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    model: TinyModelConfig
    dtype: str
    batches: tuple[int, ...]
    """Requests that are generated together."""
    windows: tuple[int, ...]
    acceptances: tuple[float, ...]
    tokens: int
    """Of a response."""
    copied_bytes: int
    synced: TinyModelConfig
    """The model whose weights are pushed."""
    pushes: int
    """At most."""
    job: tuple[str, ...]
    """Settings of the job, beside the quickstart's."""
    job_dtypes: tuple[str, ...] = ("float32",)


SMALL_JOB = ("--warmup.steps", "3", "2", "--rollout.prompts-per-step", "2", "--rollout.group-size", "4")
SIZES = {
    "cpu": Size(
        model=TinyModelConfig(),
        dtype="float32",
        batches=(1, 3, 8),
        windows=(1, 4),
        acceptances=(0.9, 0.0),
        tokens=24,
        copied_bytes=64 * MIB,
        synced=TinyModelConfig(),
        pushes=2,
        job=("--train.steps", "2", "--rollout.max-new-tokens", "16", *SMALL_JOB),
    ),
    "cuda": Size(
        model=TinyModelConfig(num_layers=8, hidden_size=2048, head_dim=128, num_experts=32, expert_size=768),
        dtype="bfloat16",
        batches=(1, 3, 16, 64, 256),
        windows=(1, 2, 4, 8),
        acceptances=(0.9, 0.5, 0.0),
        tokens=256,
        copied_bytes=1024 * MIB,
        synced=TinyModelConfig(num_layers=2, hidden_size=2048, head_dim=128, num_experts=32, expert_size=768),
        pushes=500,
        job_dtypes=("bfloat16",),
        job=(
            *("--train.steps", "5", "--rollout.engine.memory-fraction", "0.3"),
            *("--warmup.steps", "300", "100"),
        ),
    ),
}


class Bench:
    """A machine, and what stages share on it."""

    def __init__(self, device: str, folder: Path, stack: ExitStack, attention: str = "") -> None:
        self.size, self.on_gpu, self.folder = SIZES[device], device == "cuda", folder
        self.extra_args: dict[str, Any] = {"attention_backend": attention} if attention else {}
        self._stack = stack

    @cached_property
    def model_dir(self) -> Path:
        made = self.folder / "model"
        if not made.exists():
            make_tiny_model(self.size.model, 0, made)
        return made

    def spec(self, speculation: SpeculationConfig, **extra: bool) -> EngineSpec:
        """Of an engine on the first device."""
        most = max(self.size.batches)
        config = EngineConfig(
            max_running_requests=most,
            max_total_tokens=None if self.on_gpu else most * 160,
            extra_args=self.extra_args | extra,
        )
        return EngineSpec(
            index=0,
            model_dir=str(self.model_dir),
            dtype=self.size.dtype,
            devices=(gpu_uuid(0) if self.on_gpu else 0,),
            config=config,
            speculation=speculation,
            context_length=self.size.model.max_position,
            log_file=str(self.folder / "engine.log"),
        )

    @cached_property
    def speculating(self) -> Engine:
        """An engine whose speculation can be set; its dialled drafter reads what is right from a file."""
        speculation = SpeculationConfig(mode="coupled", max_window=max(self.size.windows))
        return self._stack.enter_context(
            running(self.spec(speculation), **{dialled.SCRIPT: str(self.folder / "script.json")})
        )

    def job_arguments(self) -> tuple[str, ...]:
        pairs = [f"{name}={value}" for name, value in self.extra_args.items()]
        return ("--rollout.engine.extra-args", *pairs) if pairs else ()

    def job_model(self, dtype: str) -> tuple[str, ...]:
        """Settings of a job's model: in bfloat16 one whose heads a GPU's kernels know."""
        if dtype == "float32":
            return ()
        made = self.folder / "job-model"
        if not made.exists():
            shape = TinyModelConfig(num_layers=8, hidden_size=1024, head_dim=128, num_experts=16, expert_size=512)
            make_tiny_model(shape, 0, made)
        return ("--model.path", str(made), "--model.dtype", dtype)

    def close(self) -> None:
        """Give the device back."""
        self._stack.close()
        vars(self).pop("speculating", None)

    def requests(self, count: int) -> list[RolloutRequest]:
        """Of several temperatures and kinds of sampling."""
        kinds: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 7}, {"temperature": 0.0})
        return [
            RolloutRequest(
                request_id=str(i),
                prompt_ids=tuple(3 + (7 * i + j) % 64 for j in range(16 + i % 5)),
                sampling=SamplingParams(
                    **{"temperature": 1.0, **kinds[i % len(kinds)]},
                    max_new_tokens=self.size.tokens - i % 7,
                    ignore_eos=True,
                ),
                seed=request_seed(0, 1, i, 0),
                group_id=i,
            )
            for i in range(count)
        ]


def probe(bench: Bench) -> Found:
    """Return versions, memory, and GB/s of copies."""
    count = bench.size.copied_bytes
    host = torch.ones(count, dtype=torch.uint8, pin_memory=bench.on_gpu)
    found: Found = {"machine": machine(), "host to host GB/s": _rate(lambda: host.clone(), count)}
    if bench.on_gpu:
        there = host.cuda()
        pageable = torch.ones(count, dtype=torch.uint8)
        found |= {
            "free GB": torch.cuda.mem_get_info()[0] / GB,
            "host to device GB/s": _rate(lambda: there.copy_(host), count),
            "device to host GB/s": _rate(lambda: host.copy_(there), count),
            "pageable to device GB/s": _rate(lambda: there.copy_(pageable), count),
            "device to device GB/s": _rate(lambda: there.clone(), count),
        }
        del there
        torch.cuda.empty_cache()
    return found


def _rate(copy: Callable[[], object], num_bytes: int) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        copy()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return num_bytes / median(seconds) / GB


INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
"""NumPy multiplies for Triton's interpreter. Of OpenBLAS's kernels for newer cores not all give a row of a product the
same bits in every place."""


def kernels(bench: Bench) -> Found:
    """Return by kernel how many rows have another token or value, and other bits in company."""
    interpreted = {} if bench.on_gpu else INTERPRETED
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_kernels", "cuda" if bench.on_gpu else "cpu"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **interpreted}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def exact(bench: Bench) -> Found:
    """Return how many tokens and log-probabilities differ from those of one batch of all requests, decoded plainly."""
    size, every = bench.size, max(bench.size.batches)
    requests = bench.requests(every)
    found: Found = {}
    with running(bench.spec(SpeculationConfig(mode="off"))) as engine:
        plain = engine.generate(requests)
        for batch in size.batches[:-1]:
            engine.flush()
            first = requests[: 4 * batch]
            parts = [engine.generate(first[i : i + batch]) for i in range(0, len(first), batch)]
            found[f"batches of {batch}"] = differences([t for part in parts for t in part], plain)
    if bench.on_gpu:
        with running(bench.spec(SpeculationConfig(mode="off"), disable_cuda_graph=True)) as engine:
            found["without graphs"] = differences(engine.generate(requests), plain)
    outputs = {str(r.seed): list(t.token_ids) for r, t in zip(requests, plain, strict=True)}
    configure(bench.speculating, SpeculationConfig(mode="off", max_window=max(size.windows)))
    found["speculation off"] = differences(_anew(bench.speculating, requests), plain)
    for acceptance in size.acceptances:
        script = dialled.Script(acceptance=acceptance, step_s=[0.0], outputs=outputs)
        (bench.folder / "script.json").write_bytes(msgspec.json.encode(script))
        for window in size.windows:
            configure(bench.speculating, drafting(window, max(size.windows)))
            case = f"acceptance {acceptance:g}, window {window}"
            found[case] = differences(_anew(bench.speculating, requests), plain)
            found[case]["accepted"] = _counts(bench.speculating).accepted
    return found


def drafting(window: int, largest: int) -> SpeculationConfig:
    """With the dialled drafter."""
    return SpeculationConfig(mode="coupled", drafters=(dialled.IN_ENGINE,), window=window, max_window=largest)


def differences(some: Sequence[Trajectory], plain: Sequence[Trajectory]) -> Found:
    """How responses differ from the plain ones of the same requests."""
    pairs = list(zip(some, plain[: len(some)], strict=True))
    tokens = sum(x != y for a, b in pairs for x, y in zip(a.token_ids, b.token_ids, strict=False)) + sum(
        abs(len(a.token_ids) - len(b.token_ids)) for a, b in pairs
    )
    bits = sum(x != y for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=False))
    return {"responses": len(pairs), "tokens": sum(len(a.token_ids) for a, _ in pairs), "differ": tokens, "bits": bits}


def configure(engine: Engine, config: SpeculationConfig) -> None:
    engine.rank_call(CONFIGURE, msgspec.json.encode(config), timeout_s=60)


def _anew(engine: Engine, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    engine.flush()
    return engine.generate(requests)


def _counts(engine: Engine) -> Counts:
    found = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    return found.get("dialled", Counts())


def rows(bench: Bench) -> Found:
    """Return milliseconds of rounds, by requests and draft tokens of each; 0: on the plain path."""
    size = bench.size
    config = RolloutConfig(
        prompts_per_step=max(size.batches),
        group_size=1,
        max_new_tokens=size.tokens,
        engine=bench.speculating.spec.config,
        speculation=bench.speculating.spec.speculation,
    )
    context = size.model.max_position
    cells = [Cell(drafter="", window=w, requests=n) for n in size.batches for w in (0, *size.windows)]
    sizes = Sizes.of(config, vocab=VOCAB_SIZE, context=context)
    found = measure_once(bench.speculating, config, cells, sizes)
    assert found is not None
    return {f"{cell.requests} x {cell.window}": 1e3 * median(seconds) for cell, seconds in found.items() if seconds}


JOBS = {
    "off": ("quickstart_plain",),
    "head": ("quickstart",),
    "draft model": ("quickstart", "--rollout.speculation.draft-model", "warm-up"),
}


def job(bench: Bench) -> Found:
    """Return seconds and rollout speed of a job without speculation and with what its warm-up makes, and the steps
    whose metrics differ."""
    bench.close()
    found: Found = {}
    for dtype in bench.size.job_dtypes:
        more = (*bench.size.job, *bench.job_arguments(), *bench.job_model(dtype))
        lines: dict[str, list[dict[str, Any]]] = {}
        one: Found = {"seconds": {}, "tokens/s": {}, "accept_length": {}}
        for name, of in JOBS.items():
            start = time.monotonic()
            folder = RunFolder(root=bench.folder / f"job-{dtype}-{name.replace(' ', '-')}")
            _launch(folder.root, [*of, *more])
            one["seconds"][name] = time.monotonic() - start
            lines[name] = compared(folder)
            steps = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
            one["tokens/s"][name] = [of["rollout/tokens_per_s"] for of in steps if "rollout/tokens_per_s" in of]
            one["accept_length"][name] = [of.get("speculation/model/accept_length", 1.0) for of in steps]
        differ = sum(any(step != plain for step in others) for plain, *others in zip(*lines.values(), strict=True))
        found[dtype] = one | {"steps": len(lines["off"]), "differ": differ, "bits": 0}
    return found


def _launch(root: Path, settings: Sequence[str]) -> None:
    recipe, *more = settings
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *(str(ROOT / "launch" / "train_moe.py"), recipe, "--name", root.name, "--output-dir", str(root.parent)),
        *("--parallel.expert", "1", "--tracking.wandb", "off", "--eval.problems", "0", "--checkpoint.export", "False"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=JOB_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


STAGES: dict[str, Callable[[Bench], Found]] = {
    "probe": probe,
    "kernels": kernels,
    "exact": exact,
    "rows": rows,
    "speed": gpu_speed.speed,
    "large": gpu_large.large,
    "sync": gpu_sync.sync,
    "job": job,
}


def run(device: str, folder: Path, stages: Sequence[str], attention: str = "") -> dict[str, Found]:
    """Run what has no result yet. A stage that fails leaves its error, is run again next time, and stops no other."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Found] = {}
    with ExitStack() as stack:
        bench = Bench(device, folder, stack, attention)
        for name in stages:
            file = folder / f"{name}.json"
            if file.exists():
                found[name] = json.loads(file.read_text())
                continue
            with _told(name):
                try:
                    found[name] = STAGES[name](bench)
                    file.write_text(json.dumps(found[name], indent=1))
                except Exception as error:  # whatever a stage meets: the others may work
                    traceback.print_exc()
                    found[name] = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    return found


@contextmanager
def _told(name: str) -> Iterator[None]:
    start = time.monotonic()
    print(f"== {name}", flush=True)
    yield
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)


def verdict(found: dict[str, Found]) -> list[tuple[str, str]]:
    """One line per stage."""
    lines = []
    for name, of in found.items():
        if "error" in of:
            text = f"FAILED: {of['error']}"
        elif name == "job":
            text = "; ".join(
                f"{dtype}: {one['differ']} of {one['steps']} steps differ; "
                + ", ".join(f"{way} {s:.0f} s, {median(one['tokens/s'][way]):.0f} tokens/s" for way, s in spent.items())
                for dtype, one in of.items()
                for spent in [one["seconds"]]
            )
        elif name in ("exact", "kernels"):
            wrong = {case: one for case, one in of.items() if one["differ"] or one["bits"]}
            text = "; ".join(f"{case}: {one['differ']} values, {one['bits']} bits" for case, one in wrong.items())
            text = f"DIFFERENT: {text}" if wrong else f"{len(of)} cases equal, bit for bit"
        elif name == "rows":
            text = ", ".join(f"{case}: {ms:.2f} ms" for case, ms in of.items())
        elif name == "speed":
            text = gpu_speed.told(of["rates"], "0")
        elif name == "large" and "rates" in of:
            text = gpu_speed.told(of["rates"], "plain")
        elif name == "sync":
            text = gpu_sync.told(of)
        else:
            text = ", ".join(f"{key} {value:.1f}" if isinstance(value, float) else value for key, value in of.items())
        lines.append((name, text))
    return lines


def is_right(found: dict[str, Found]) -> bool:
    """Whether all stages went through, and nothing differed."""
    cases = [found.get(name, {}).values() for name in ("exact", "kernels", "job")]
    wrong = any(case["differ"] or case["bits"] for part in cases for case in part if isinstance(case, dict))
    wrong |= any(found.get(name, {}).get("differ", 0) for name in ("speed", "large"))
    return not wrong and not any("error" in of for of in found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all is equal, 1 when not, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--device", choices=list(SIZES), default="cuda", help="cpu: the same in small")
    parser.add_argument("--attention", default="", help="SGLang's attention_backend, or tiles; default: triton")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not gpus():
        print("no GPU was found; --device cpu does the same in small. `specactor doctor` says more.", file=sys.stderr)
        return 2
    found = run(options.device, options.out.resolve(), options.stages, options.attention)
    table = Table("stage", "found", title=machine())
    for name, text in verdict(found):
        table.add_row(name, text)
    Console(width=160).print(table)
    return 0 if is_right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
