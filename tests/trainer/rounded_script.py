"""How far a trainer that computes in bfloat16 is from transformers in float32, of equal, rounded weights.

python -m tests.trainer.rounded_script transformers FOLDER; then, in a process of its own: ... trainer FOLDER RESULTS
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

EXPERTS = {"moe": 16, "dense": 2}
"""By model; where there are no more than compute each token, there are none to choose from."""


def sample(root: Path) -> None:
    """Stands for the engine: the models, and transformers' log-probabilities and experts of them."""
    import torch
    from safetensors.torch import save_file

    from tests.trainer import policy_cases as cases
    from tests.trainer import reference_script as reference

    torch.set_num_threads(1)
    for name, experts in EXPERTS.items():
        torch.manual_seed(0)
        config = reference.Qwen3MoeConfig(**reference.SHAPE, **reference.MOE | {"num_experts": experts})
        model = reference.Qwen3MoeForCausalLM(config)
        reference.save_model(model, root / name)
        with torch.no_grad():
            for of, weight in model.named_parameters():
                weight.mul_(3 if "experts" in of else 1)  # so that it matters which one computes a token
                weight.copy_(weight.bfloat16().float())
            model.save_pretrained(root / name)
            logprobs = [reference.logprobs_of(model, s).tolist() for s in cases.sequences()]
        save_file(reference.all_experts(root / name), root / f"{name}.experts")
        (root / f"{name}.json").write_text(json.dumps(logprobs))


def train(root: Path) -> dict[str, float]:
    """Mean |trainer - transformers| log-probability: without a choice, with a free one, with transformers'."""
    from tests.trainer import layout_script as layouts

    config_of = layouts.cases.config

    def in_bfloat16(*arguments: object) -> object:
        config = config_of(*arguments)  # type: ignore[arg-type]
        return replace(config, model=replace(config.model, dtype="bfloat16"))

    layouts.cases.config = in_bfloat16  # type: ignore[assignment]
    results = {}
    for name in EXPERTS:
        trainer = layouts.make({"model": str(root / name), "world": 1})
        sampled = json.loads((root / f"{name}.json").read_text())
        experts = layouts.load_file(root / f"{name}.experts")
        rows = [experts[str(i)].numpy().tobytes() for i in range(len(layouts.SEQUENCES))]
        given = [replace(s, routed_experts=ids) for s, ids in zip(layouts.SEQUENCES, rows, strict=True)]
        for kind, sequences in (("free", layouts.SEQUENCES), ("replayed", given)):
            if kind == "replayed":
                trainer._replay = layouts.RoutingReplay(trainer.policy)
            pairs = zip(sampled, trainer.logprobs(sequences), strict=True)
            gaps = [abs(a - b) for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True)]
            results[f"{name} {kind}"] = sum(gaps) / len(gaps)
        layouts.destroy_groups(keep_process_group=True)
    return results


if __name__ == "__main__":
    if sys.argv[1] == "transformers":
        sample(Path(sys.argv[2]))
    else:
        Path(sys.argv[3]).write_text(json.dumps(train(Path(sys.argv[2]))))
