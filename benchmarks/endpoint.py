"""What the endpoint for agents costs beside conversations in process: processor time of the trainer rank per request.

python -m benchmarks.endpoint
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from transformers import PreTrainedTokenizerBase

from benchmarks.results import Result, publish, spread
from specactor.config import EngineConfig, SpeculationConfig, TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.conversations import Conversations
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import EngineSpec
from specactor.types import Problem, RolloutRequest, SamplingParams

SESSIONS, CONCURRENCY, CALLS, TOKENS, TURNS = 1000, 64, 2, 24, 3
"""TOKENS: of a response at most. TURNS: of each contestant; the first of all is not counted."""
AIM_MS = 2.0
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}assistant:"
CLIENTS = "SPECACTOR_BENCHMARK_CLIENTS"
"""Environment variable: the socket of the process that the agents' clients are in."""
COLUMNS = ("contestant", "requests", "processor ms per request", "wall s")


class InProcess:
    """An environment that says what the agent says."""

    async def start(self, problem: Problem) -> list[dict[str, str]]:
        self.calls = 0
        return [{"role": "user", "content": problem.prompt}]

    async def step(self, response: str) -> list[dict[str, str]] | float:
        self.calls += 1
        return [{"role": "user", "content": "go on"}] if self.calls < CALLS else 1.0


class OverHttp:
    """An agent whose client is in another process, so that its processor time is not counted."""

    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        reader, writer = await asyncio.open_unix_connection(os.environ[CLIENTS])
        writer.write(json.dumps([base_url, api_key, problem.prompt]).encode() + b"\n")
        reward = float(await reader.readline())
        writer.close()
        return reward


def clients(path: str) -> None:
    """The other process: sessions of the openai client, so many at a time."""
    from openai import AsyncOpenAI

    free = asyncio.Semaphore(CONCURRENCY)
    shared = AsyncOpenAI(base_url="http://127.0.0.1", api_key="x", timeout=600)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        base_url, api_key, prompt = json.loads(await reader.readline())
        own = shared.with_options(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": prompt}]
        async with free:
            for _ in range(CALLS):
                answer = await own.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
                text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        writer.write(b"1.0\n")
        writer.close()

    async def main() -> None:
        async with await asyncio.start_unix_server(serve, path, backlog=4096) as server:
            await server.serve_forever()

    asyncio.run(main())


@dataclass(frozen=True, kw_only=True)
class Run:
    """One turn of a contestant."""

    cpu_s: float
    wall_s: float
    tokens: int


def rollout(pool: EnginePool, tokenizer: PreTrainedTokenizerBase, kind: type, sessions: int) -> Run:
    """All sessions with one kind of them."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=CALLS * (TOKENS + 40), stop=tuple("abcdefghijklmnopqrst"))
    verifier = f"benchmarks.endpoint:{kind.__name__}"
    numbers = range(sessions)
    requests = [
        RolloutRequest(request_id=f"0.{i}.0", prompt_ids=(1,), sampling=sampling, seed=i, group_id=i) for i in numbers
    ]
    problems = [
        Problem(index=i, prompt=f"Problem {i}", prompt_ids=(1,), answer="", verifier=verifier, metadata={})
        for i in numbers
    ]
    pool.flush()
    with Conversations(requests, problems, tokenizer, timeout_s=600, max_prompt_tokens=100) as conversations:
        cpu, wall = time.process_time(), time.perf_counter()
        outcome = pool.generate(requests, conversations=conversations)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    failed = [t.failure for t in outcome.finished if t.failure]
    assert (failed, len(outcome.finished)) == ([], sessions)
    return Run(cpu_s=cpu, wall_s=wall, tokens=sum(t.num_sampled for t in outcome.finished))


@contextmanager
def engine(folder: Path) -> Iterator[EnginePool]:
    """One engine of a small model, which takes little of the machine."""
    spec = EngineSpec(
        index=0,
        model_dir=str(folder),
        dtype="float32",
        devices=(0,),
        config=EngineConfig(max_running_requests=CONCURRENCY, max_total_tokens=32_768),
        speculation=SpeculationConfig(),
        context_length=512,
        log_file=str(folder / "engine.log"),
    )
    with EnginePool([spec]) as pool:
        pool.wait_ready()
        yield pool


def table(runs: Mapping[str, Sequence[Run]], sessions: int) -> Result:
    """Return the page; the first turn of each contestant is not counted."""
    requests = sessions * CALLS
    own = {name: [run.cpu_s / requests * 1e3 for run in of[1:]] for name, of in runs.items()}
    walls = {name: [run.wall_s for run in of[1:]] for name, of in runs.items()}
    extra = [b - a for a, b in zip(*own.values(), strict=True)]
    share = median(extra) / 1e3 * requests / median(list(walls.values())[1])
    met = "meets" if median(extra) <= AIM_MS else "MISSES"
    return Result(
        title="The endpoint for agents",
        verdict=f"Over HTTP a request takes {spread(extra)} ms of processor time more in the trainer rank than in a "
        f"conversation in process, which {met} the aim of {AIM_MS:g} ms: {share:.0%} of the sessions' wall time.",
        intro=f"{sessions:,} sessions of {CALLS} calls, {CONCURRENCY} at a time, one engine of a tiny model; in turns. "
        "The agents' clients (openai) run in another process, and are not counted; their relay is.",
        columns=COLUMNS,
        rows=[[name, f"{requests:,}", spread(own[name]), spread(walls[name])] for name in runs],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--dry", action="store_true", help="print the page, and write nothing")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as ranks do: each session has an event loop
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        make_tiny_model(TinyModelConfig(num_layers=1, hidden_size=32, num_experts=2, expert_size=32), 0, folder)
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = TEMPLATE
        os.environ[CLIENTS] = str(Path(name, "clients"))
        other = multiprocessing.get_context("spawn").Process(target=clients, args=(os.environ[CLIENTS],), daemon=True)
        other.start()
        with engine(folder) as pool:
            while not Path(os.environ[CLIENTS]).exists():
                time.sleep(0.1)
            runs: dict[str, list[Run]] = {"in process": [], "over HTTP": []}
            for _ in range(options.turns + 1):
                for own, kind in zip(runs.values(), (InProcess, OverHttp), strict=True):
                    own.append(rollout(pool, tokenizer, kind, options.sessions))
                    print(own[-1], flush=True)
        other.terminate()
        other.join()
    result = table(runs, options.sessions)
    if options.dry:
        print(result.verdict, *result.rows, sep="\n")
    else:
        publish("endpoint", result)


if __name__ == "__main__":
    main()
