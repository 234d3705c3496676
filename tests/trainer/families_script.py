"""One trainer rank with a tiny model of every family, one after the other, beside transformers.

torchrun ... -m tests.trainer.families_script FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from specactor.cpu import megatron

megatron.install()

import mbridge  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from specactor.config import TrainConfig  # noqa: E402
from specactor.errors import ConfigError  # noqa: E402
from specactor.parallel.collective import destroy_groups  # noqa: E402
from specactor.trainer import model  # noqa: E402
from specactor.trainer.drafter.init import the_transformers  # noqa: E402
from tests.trainer import layout_script as layouts  # noqa: E402
from tests.trainer import policy_cases as cases  # noqa: E402
from tests.trainer.shards_script import wrong_plans  # noqa: E402

SIZES = {
    **{"vocab_size": cases.VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2},
    **{"tie_word_embeddings": False},
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4Moe", EXPERTS | SHARED | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
}
"""Model type -> what transformers calls it, and sizes beside `SIZES`. MiMo, which it does not know, is in test_mtp."""


def judged(name: str, sizes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What differs from transformers: tensors of the export, and log-probabilities of responses. Beside the tensors,
    parameters whose elements a weight sync's plan would find elsewhere."""
    transformers = the_transformers()
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    theirs.save_pretrained(folder)
    trainer = layouts.make({"model": str(folder), "world": 1})
    wrong, gap = layouts.wrong_weights(trainer, folder) + wrong_plans(trainer.policy), 0.0
    try:
        computed = trainer.logprobs(cases.sequences())
    except NotImplementedError as error:
        return {"wrong": wrong, "not on a CPU": str(error)}
    finally:
        destroy_groups(keep_process_group=True)
    for sequence, own in zip(cases.sequences(), computed, strict=True):
        ids = torch.tensor(sequence.token_ids)
        with torch.no_grad():
            logits_TV = theirs(ids[None]).logits[0, :-1] / cases.TEMPERATURE
        logprobs_T = logits_TV.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        gap = max(gap, float((logprobs_T[sequence.prompt_len - 1 :] - torch.tensor(own)).abs().max()))
    return {"wrong": wrong, "gap": gap}


def refused(folder: Path) -> str:
    """What is said of DeepSeek V3, which mbridge knows and this Megatron cannot build."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    try:
        model.build(folder, dtype="float32", train=TrainConfig())
    except ConfigError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {kind: judged(*about, folder / kind) for kind, about in FAMILIES.items()}
    known = sorted(mbridge.AutoBridge.list_supported_models())
    (folder / "found.json").write_text(
        json.dumps({"families": found, "known": known, "refused": refused(folder / "deepseek_v3")})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
