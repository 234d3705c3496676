"""SGLang serves a head that was made and trained here, by its own EAGLE-3 worker, and accepts what our engine does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from specactor.config import DraftTrainingConfig, EngineConfig
from specactor.rollout import warm_starter
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.trainer.drafter import command, init
from specactor.trainer.drafter.buffer import RolloutLine, example_of
from specactor.trainer.drafter.head import Eagle3Start
from specactor.types import RolloutRequest
from tests.rollout.conftest import request
from tests.rollout.sglang import eagle3_server as server
from tests.rollout.sglang.test_heads import speculation
from tests.rollout.sglang.test_verify_worker import configure
from tests.trainer.drafter.cases import write_rollouts

pytestmark = pytest.mark.deep
WINDOW = 3


def batch(first: int = 0, count: int = 40) -> list[RolloutRequest]:
    """Likeliest tokens, after prompts of their own."""
    return [request(i, temperature=0.0, new=24 + i % 23, group_size=1) for i in range(first, first + count)]


@contextmanager
def started(spec: EngineSpec, **algorithm: object) -> Iterator[Engine]:
    environment = {server.ALGORITHM: json.dumps(algorithm)} if algorithm else {}
    with pytest.MonkeyPatch.context() as patch:
        if algorithm:
            patch.delenv(warm_starter.NAME)  # its kernels come before SGLang is imported
        engine = Engine(spec, run=f"{server.__name__}:run", **environment)
    try:
        engine.wait_ready(300)
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def head(engines: tuple[Engine, Engine], model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of 60 of 96 tokens; it learned what the mixture of experts says, not to the end."""
    folder = tmp_path_factory.mktemp("eagle3")
    said = engines[0].generate(batch(count=80))
    lines = [RolloutLine(prompt_ids=list(t.prompt_ids), token_ids=list(t.token_ids)) for t in said]
    write_rollouts(folder / "said.jsonl", lines)
    start = Eagle3Start(draft_vocab=60, rollouts=(folder / "said.jsonl",))
    init.make_draft_model(Path(model_dir), folder / "head", start)
    policy = init.read_model(Path(model_dir))
    model = init.read_draft(folder / "head", policy)
    settings = DraftTrainingConfig(learning_rate=3e-3, tokens_per_update=512)
    with torch.random.fork_rng(devices=[]):
        command.learn(policy, model, [example_of(line) for line in lines], settings, seed=0, limit_s=1e9, updates=300)
    init.write_model(model, folder / "trained", tokenizer=Path(model_dir))
    return str(folder / "trained")


def ends(engine: Engine, requests: list[RolloutRequest]) -> dict[str, tuple[list[int], list[int]]]:
    """Per request, its tokens and where in them its verifies ended; the first token is the prefill's.

    The last verify counts up to the response's end: SGLang counts what it accepted beyond, and we draft no further.
    """
    engine.flush()
    engine.rank_call(server.ACCEPTED, b"", timeout_s=60)
    responses = engine.generate(requests)
    [told] = engine.rank_call(server.ACCEPTED, b"", timeout_s=60)
    by_rid = msgspec.json.decode(told, type=dict[str, tuple[list[int], int]])
    by_place = {int(rid.split(".")[1]): found for rid, found in by_rid.items()}
    out = {}
    for i, response in enumerate(responses):
        accepted, verifies = by_place[i]
        assert len(accepted) == verifies
        place, places = 1, []
        for tokens in accepted:
            place = min(place + tokens + 1, len(response.token_ids))
            places.append(place)
        out[response.request_id] = (list(response.token_ids), places)
    return out


def test_sglangs_own_worker_accepts_what_ours_does(make_spec: Callable[..., EngineSpec], head: str) -> None:
    """Per verify of every response at temperature 0; a head that reads wrong states is noticed."""
    config = EngineConfig(max_running_requests=16, max_total_tokens=6144, extra_args={"disable_radix_cache": True})
    theirs = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": head,
        "speculative_num_steps": WINDOW,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": WINDOW + 1,
    }
    requests = batch()
    with started(make_spec(90, config=config), **theirs) as engine:
        assert engine.rank_call(server.WORKER, b"", timeout_s=60) == [
            b"sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
        ]
        expected = ends(engine, requests)
    with started(make_spec(91, config=config, speculation=speculation(head, WINDOW, "model"))) as engine:
        configure(engine, speculation(head, WINDOW, "model"))
        got = ends(engine, requests)
        configure(engine, speculation(head, WINDOW, "Shifted"))
        wrong = ends(engine, requests)
    verifies = sum(len(places) for _, places in expected.values())
    tokens = sum(len(ids) - 1 for ids, _ in expected.values())
    assert got == expected
    assert 1.3 * verifies < tokens < 0.9 * (WINDOW + 1) * verifies, (tokens, verifies)  # some right, some wrong
    assert wrong != expected
    assert {name: ids for name, (ids, _) in wrong.items()} == {name: ids for name, (ids, _) in expected.items()}
