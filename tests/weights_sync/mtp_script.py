"""A trainer rank whose policy's MTP layer learns, and an engine that drafts with it; results as JSON.

torchrun ... -m tests.weights_sync.mtp_script MODEL_DIR FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from specactor.cpu import megatron
from specactor.parallel.collective import destroy_groups

megatron.install()

import msgspec  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from specactor.config import EngineConfig, SpeculationConfig, WeightsSyncConfig  # noqa: E402
from specactor.parallel.collective import Collective  # noqa: E402
from specactor.rollout.pool import EnginePool  # noqa: E402
from specactor.rollout.sglang.engine_client import Engine, EngineSpec  # noqa: E402
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT  # noqa: E402
from specactor.rollout.speculation.counters import Counts  # noqa: E402
from specactor.trainer.shards import RankShards  # noqa: E402
from specactor.types import RolloutRequest, SamplingParams, TrainSequence, Trajectory  # noqa: E402
from specactor.weights_sync.sender import WeightSender  # noqa: E402
from tests.trainer import layout_script  # noqa: E402

WRONG = "tests.rollout.sglang.wrong_mtp"
INSPECTION = "tests.weights_sync.engine_digests"
STEPS = 20


def request(i: int, new: int = 24) -> RolloutRequest:
    prompt = tuple(3 + (7 * i + 5 * j * j) % 93 for j in range(4 + i % 5))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new, ignore_eos=True)
    return RolloutRequest(request_id=str(i), prompt_ids=prompt, sampling=sampling, seed=i, group_id=i)


def configure(engine: Engine, drafter: str, window: int = 3) -> None:
    config = SpeculationConfig(mode="coupled", drafters=(drafter,), window=window)
    if not drafter:
        config = SpeculationConfig()
    engine.rank_call(CONFIGURE, msgspec.json.encode(config), timeout_s=60)


def generate(engine: Engine, drafter: str, requests: list[RolloutRequest]) -> tuple[list[Trajectory], float]:
    """Answers, and which share of the drafts was accepted."""
    configure(engine, drafter)
    engine.flush()
    answers = engine.generate(requests)
    if not drafter:
        return answers, 0.0
    counts = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])["mtp"]
    assert counts.failures == 0
    return answers, counts.accepted / counts.drafted


def wrong(engine: Engine, folder: Path) -> list[str]:
    """Parameters of the engine that are not what SGLang's own loader makes of an exported policy."""
    found = json.loads(engine.rank_call(f"{INSPECTION}:digests", b"", timeout_s=60)[0])
    wanted = json.loads(engine.rank_call(f"{INSPECTION}:digests_of_folder", str(folder).encode(), timeout_s=60)[0])
    assert any(name.startswith("mtp.") for name in found)
    return [name for name in {*found, *wanted} if found.get(name) != wanted.get(name)]


def learn_from(answers: list[Trajectory], requests: list[RolloutRequest]) -> list[TrainSequence]:
    """What the policy said, with no advantage: it stays as it is."""
    return [
        TrainSequence(
            token_ids=(*asked.prompt_ids, *said.token_ids),
            prompt_len=len(asked.prompt_ids),
            advantage=0.0,
            rollout_logprobs=tuple(said.logprobs),
            group_id=i // 4,
        )
        for i, (asked, said) in enumerate(zip(requests, answers, strict=True))
    ]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model_dir, folder = Path(sys.argv[1]), Path(sys.argv[2])
    spec = EngineSpec(
        index=0,
        model_dir=str(model_dir),
        dtype="float32",
        devices=(0,),
        config=EngineConfig(max_running_requests=32, max_total_tokens=4096),
        context_length=128,
        log_file=str(folder / "engine.log"),
        speculation=SpeculationConfig(mode="coupled", drafters=("mtp",), window=3),
    )
    results: dict[str, Any] = {}
    with EnginePool([spec]) as pool:
        pool.wait_ready()
        [engine] = pool.engines
        trainer = layout_script.make({"model": str(model_dir), "train": {"tokens_per_microbatch": 4096}})
        asked, taught = [request(i) for i in range(32)], [request(1000 + i, 60) for i in range(48)]
        plain, _ = generate(engine, "", asked)
        drafted, results["before"] = generate(engine, f"{WRONG}:Shared", asked)
        results["same"] = [facts(drafted) == facts(plain)]
        sequences = learn_from(generate(engine, "", taught)[0], taught)
        for _ in range(STEPS):
            trainer.train_step(sequences, learning_rate=4e-3)
        sender = WeightSender(WeightsSyncConfig(), Collective())
        source, rounds, bad = RankShards(trainer.policy, trainer.shared_parameters), [], []
        for version in (1, 2):  # by buckets, then by the plan
            rounds.append(sender.push(source, pool.engines, version=version).num_rounds)
            trainer.export_hf(folder / "exported")
            bad += wrong(engine, folder / "exported")
            drafted, results["after"] = generate(engine, f"{WRONG}:Shared", asked)
            results["same"].append(facts(drafted) == facts(generate(engine, "", asked)[0]))
            results["stays"] = facts(drafted) == facts(plain)
            if version == 1:
                trainer.train_step(sequences, learning_rate=1e-3)
        results |= {"rounds": rounds, "wrong": bad}
        sender.close()
    destroy_groups()
    (folder / "results.json").write_text(json.dumps(results))


def facts(answers: list[Trajectory]) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for answer in answers]


if __name__ == "__main__":
    main()
