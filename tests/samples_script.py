"""Ranks that tell each other of their responses, and fetch some; each writes what it got.

torchrun ... -m tests.samples_script FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from specactor import samples
from specactor.parallel.collective import Collective
from specactor.types import Problem, ScoredGroup, Trajectory

RESPONSES = 7


def response(i: int) -> Trajectory:
    """Number i: of a length of its own, one without tokens, one with ids that need four bytes, one with branches."""
    large = 1 << 16 if i == 3 else 0
    return Trajectory(
        request_id=f"0.{i}.0",
        group_id=i,
        prompt_ids=(i, i + 1),
        token_ids=tuple(large + 10 * i + k for k in range(i)),
        logprobs=tuple(-k / 4 for k in range(i)),
        finish_reason="stop",
        spans=(),
        routed_experts=bytes(range(0, 2 * i, 2)) if i % 2 == 0 else b"",
        loss_mask=(True, False) * (i // 2) if i == 4 else (),
        branches=tuple(response(k) for k in (2, 3)) if i == 5 else (),
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    collective = Collective()
    own = [samples.packed(response(i)) for i in range(RESPONSES) if i % world == rank]
    responses = sorted(samples.told(own, collective), key=lambda t: t.group_id)
    wanted = [i for i in range(RESPONSES) if (i // 2) % world == rank]
    tokens = samples.fetch(responses, wanted, ("token_ids",))
    everything = samples.fetch(tokens, wanted, samples.OF_RESPONSE)
    problem = Problem(index=0, prompt="", prompt_ids=(), answer="", verifier="exact", metadata={})
    group = ScoredGroup(problem=problem, trajectories=tuple(responses), scores=(0.0,) * RESPONSES, rewards=())
    [written] = samples.whole([group], wanted=rank == 0)
    found = {
        "told": [[len(getattr(t, name)) for name in samples.OF_RESPONSE] + [t.num_sampled] for t in responses],
        "here": [i for i, t in enumerate(responses) if samples.is_here(t)],
        "tokens": [i for i, t in enumerate(tokens) if samples.is_here(t)],
        "experts of tokens": [i for i in wanted if not isinstance(tokens[i].routed_experts, samples.Elsewhere)],
        "right": [i for i in range(RESPONSES) if everything[i] == samples.packed(response(i))],
        "written": [i for i, t in enumerate(written.trajectories) if t == samples.packed(response(i))],
        "again": samples.fetch(everything, wanted, samples.OF_RESPONSE) == everything,
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
