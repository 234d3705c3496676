"""Trainer ranks of a policy with an MTP layer: what its training changes, and what it leaves alone.

torchrun ... -m tests.trainer.mtp_script FOLDER LAYOUTS.json RESULTS.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from specactor.cpu import megatron
from specactor.parallel.collective import destroy_groups

megatron.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from specactor.trainer import checkpoint  # noqa: E402
from specactor.trainer.losses import token_weights  # noqa: E402
from specactor.trainer.policy import PolicyTrainer  # noqa: E402
from specactor.trainer.shards import RankShards  # noqa: E402
from specactor.weights_sync.digest import digest  # noqa: E402
from tests.trainer import layout_script as layouts  # noqa: E402
from tests.trainer import policy_cases as cases  # noqa: E402
from tests.trainer.reference_mimo import ReferenceMimo  # noqa: E402

SEQUENCES = cases.sequences()
MTP = "model.mtp_layers."
STEPS = 3


def digests(trainer: PolicyTrainer, *, mtp: bool) -> dict[str, int]:
    return {name: digest(t.contiguous()) for name, t in trainer.named_weights() if name.startswith(MTP) == mtp}


def train(trainer: PolicyTrainer) -> dict[str, Any]:
    """A few steps; what they left, and the MTP layer's losses."""
    layouts.use(trainer, cases.CASES["grpo"])
    losses: list[float] = []
    if trainer._mtp is not None:
        own = trainer._mtp.loss

        def watched(batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
            added = own(batch)
            losses.append(float(added[0].detach()))
            return added

        trainer._mtp.loss = watched  # type: ignore[method-assign]
    steps, sums, told = [], [], []
    for _ in range(STEPS):
        losses.clear()
        steps.append(layouts.step(trainer, cases.LEARNING_RATE))
        told.append(steps[-1].pop("mtp_loss", None))
        total = torch.tensor([sum(losses)])
        dist.all_reduce(total)
        sums.append(float(total) / trainer.layout.tensor)  # whose ranks have the same tokens
    return {
        "steps": steps,
        "mtp_losses": sums,
        "told": told,
        "policy": digests(trainer, mtp=False),
        "mtp": digests(trainer, mtp=True),
        "mtp_weights": {n: t.flatten()[:64].tolist() for n, t in trainer.named_weights() if n.startswith(MTP)},
    }


def without_training(entry: dict[str, Any]) -> dict[str, Any]:
    trainer = layouts.make(entry)
    trainer._mtp = None
    return train(trainer)


def wrong(entry: dict[str, Any], mistake: str) -> dict[str, Any]:
    """The policy trained beside a layer that has an influence on it."""
    if mistake == "counted":  # in the gradient norm
        original = layouts.model.mtp.set_apart

        def counting(policy: Any) -> None:
            original(policy)
            for parameter in policy.chunks[0].parameters():
                vars(parameter).pop("shared", None)

        layouts.model.mtp.set_apart = counting
        try:
            return train(layouts.make(entry))
        finally:
            layouts.model.mtp.set_apart = original
    trainer = layouts.make(entry)
    own = trainer._mtp
    assert own is not None

    def attached(_: Any, __: Any, given: dict[str, Any], hidden: Tensor) -> None:
        if torch.is_grad_enabled():
            own._hidden_T1H = hidden

    own._module.decoder.register_forward_hook(attached, with_kwargs=True)
    return train(trainer)


def reference_losses(folder: Path) -> tuple[float, float]:
    """Of the MTP layer before the first step, from its definition: what is added to the policy's, and per token."""
    model, total, told, tokens = ReferenceMimo.read(folder), 0.0, 0.0, 0
    weights = token_weights([s.num_learned for s in SEQUENCES], cases.CASES["grpo"].algorithm.aggregation, 32)
    for s, weight in zip(SEQUENCES, weights, strict=True):
        ids = list(s.token_ids)
        out = model.mtp(model.hidden(ids)[:-2], ids[1:-1])  # at token t + 1, of token t + 2
        logprobs = (model.logits(out) / cases.TEMPERATURE).log_softmax(-1)
        own = [float(logprobs[t - 2, ids[t]]) for t in range(max(2, s.prompt_len), len(ids))]
        total, told, tokens = total - weight * sum(own), told - sum(own), tokens + len(own)
    return 0.1 * total, told / tokens


def resumed(entry: dict[str, Any], root: Path) -> dict[str, Any]:
    """As many steps, with a checkpoint before the last, from which another trainer goes on."""
    trainer = layouts.make(entry)
    layouts.use(trainer, cases.CASES["grpo"])
    for _ in range(STEPS - 1):
        layouts.step(trainer, cases.LEARNING_RATE)
    saved = checkpoint.write(trainer, root, 2, {})()
    fresh = PolicyTrainer(trainer.config, trainer.layout, Path(entry["model"]))
    layouts.use(fresh, cases.CASES["grpo"])
    checkpoint.load(fresh, saved)
    layouts.step(fresh, cases.LEARNING_RATE)
    return {"policy": digests(fresh, mtp=False), "mtp": digests(fresh, mtp=True)}


def handed_over(entry: dict[str, Any]) -> list[str]:
    """Names of weights that a sync would give otherwise than the export, or not at all, after training."""
    trainer = layouts.make(entry)
    layouts.use(trainer, cases.CASES["grpo"])
    layouts.step(trainer, cases.LEARNING_RATE)
    shards = RankShards(trainer.policy, trainer.shared_parameters)
    mine = {name: digest(t.contiguous()) for part in shards.rounds(2**14) for name, t in part}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {name: value for part in everyone for name, value in part.items()}
    exported = digests(trainer, mtp=False) | digests(trainer, mtp=True)
    return [name for name in {*found, *exported} if found.get(name) != exported.get(name)]


def main() -> None:
    torch.set_num_threads(1)
    folder, results = Path(sys.argv[1]), dict[str, Any]()
    for name, parallel in json.loads(sys.argv[2]).items():
        entry = {"model": str(folder), "parallel": parallel, "world": os.environ["WORLD_SIZE"]}
        result: dict[str, Any] = {"wrong_weights": layouts.wrong_weights(layouts.make(entry), folder)}
        destroy_groups(keep_process_group=True)
        cases_of: dict[str, Any] = {
            "trained": lambda entry=entry: train(layouts.make(entry)),
            "untrained": lambda entry=entry: without_training(entry),
            "attached": lambda entry=entry: wrong(entry, "attached"),
            "counted": lambda entry=entry: wrong(entry, "counted"),
            "resumed": lambda entry=entry, name=name: resumed(entry, Path(sys.argv[3]).parent / name),
            "handed_over": lambda entry=entry: handed_over(entry),
        }
        for case, run in cases_of.items():
            result[case] = run()
            destroy_groups(keep_process_group=True)
        results[name] = result
    results["reference_losses"] = reference_losses(folder)
    if dist.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
