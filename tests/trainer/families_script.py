"""One trainer rank with a tiny model of every family, one after the other, beside transformers; two with a tied one.

torchrun ... -m tests.trainer.families_script FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specactor.cpu import megatron

megatron.install()

import mbridge  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from specactor import run  # noqa: E402
from specactor.errors import ConfigError  # noqa: E402
from specactor.parallel.collective import destroy_groups  # noqa: E402
from specactor.trainer import checkpoint, model  # noqa: E402
from specactor.trainer.drafter.head import the_transformers  # noqa: E402
from tests.trainer import layout_script as layouts  # noqa: E402
from tests.trainer import policy_cases as cases  # noqa: E402
from tests.trainer.shards_script import wrong_plans  # noqa: E402

SIZES = {
    **{"vocab_size": cases.VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2},
    **{"tie_word_embeddings": False},
}
CHOSEN = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
EXPERTS = CHOSEN | {"num_experts": 4}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4Moe", CHOSEN | SHARED | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
}
"""Model type -> what transformers calls it, and sizes beside `SIZES`. MiMo, which it does not know, is in test_mtp."""
OTHER_SUMS = {
    "qwen2_moe": ("Qwen2Moe", FAMILIES["qwen2_moe"][1] | {"norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3Moe", FAMILIES["qwen3_moe"][1] | {"norm_topk_prob": False}),
}
"""The chosen experts' weights add up to 1, or do not, as in no published model of that type."""
TIED = ("Llama", {"tie_word_embeddings": True})
SLIDING = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {"hidden_act": "gelu"}, "hidden_act gelu") for kind in FAMILIES),
    *((kind, {"attention_bias": True}, "attention_bias True") for kind in ("llama", "qwen3", "qwen3_moe")),
    ("llama", {"mlp_bias": True}, "mlp_bias True"),
    ("qwen3_moe", {"quantization_config": {"bits": 8}}, "quantization_config {'bits': 8}"),
    ("qwen3", {"enable_lm_head_fp32": True}, "enable_lm_head_fp32 True"),
    ("glm4_moe", {"enable_lm_head_output_fp32": True}, "enable_lm_head_output_fp32 True"),
    ("qwen2_moe", {"qkv_bias": False}, "qkv_bias False"),
    *((kind, {"decoder_sparse_step": 2}, "decoder_sparse_step 2") for kind in OTHER_SUMS),
    *((kind, {"mlp_only_layers": [0]}, "mlp_only_layers [0]") for kind in OTHER_SUMS),
    *((kind, SLIDING, "sliding_window 64") for kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral")),
    *(
        (kind, {"tie_word_embeddings": True}, "tie_word_embeddings True")
        for kind in (*OTHER_SUMS, "mixtral", "glm4_moe")
    ),
    ("glm4_moe", {"attention_bias": False}, "attention_bias False"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
    ("glm4_moe", {"n_group": 2, "topk_group": 1}, "n_group 2"),
    ("glm4_moe", {"n_shared_experts": 2}, "n_shared_experts 2"),
]
"""(model type, what is changed, what is named)."""
ALIKE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "swish"}),
    ("qwen2", SLIDING | {"max_window_layers": 2}),  # no layer is behind these
    ("qwen3", SLIDING | {"use_sliding_window": False}),
    ("mixtral", {"sliding_window": 256}),  # as long as a sequence may be
]


def judged(name: str, sizes: dict[str, Any], folder: Path, **parallel: int) -> dict[str, Any]:
    """What differs from transformers: tensors of the export, and log-probabilities of responses. Beside the tensors,
    parameters whose elements a weight sync's plan would find elsewhere."""
    transformers = the_transformers()
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    folder /= os.environ["RANK"]
    theirs.save_pretrained(folder)
    trainer = layouts.make({"model": str(folder), "world": os.environ["WORLD_SIZE"], "parallel": parallel})
    experts = checkpoint._identity(trainer)["model"]["num_experts"]
    wrong, gap = layouts.wrong_weights(trainer, folder) + wrong_plans(trainer.policy), 0.0
    try:
        computed = trainer.logprobs(cases.sequences())
    except NotImplementedError as error:
        return {"wrong": wrong, "experts": experts, "not on a CPU": str(error)}
    finally:
        destroy_groups(keep_process_group=True)
    for sequence, own in zip(cases.sequences(), computed, strict=True):
        ids = torch.tensor(sequence.token_ids)
        with torch.no_grad():
            logits_TV = theirs(ids[None]).logits[0, :-1] / cases.TEMPERATURE
        logprobs_T = logits_TV.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        gap = max(gap, float((logprobs_T[sequence.prompt_len - 1 :] - torch.tensor(own)).abs().max()))
    return {"wrong": wrong, "experts": experts, "gap": gap}


def said_of(config: dict[str, Any], folder: Path, check: Callable[[Path], object] = model.read_hf_config) -> str:
    """Return what is said of a model that is refused."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        check(folder)
    except ConfigError as error:
        return str(error)
    return ""


def before_all(folder: Path) -> None:
    """Check as a run does before it starts anything."""
    run._checked(cases.config(str(folder), {}), 1)


def changed(kind: str, change: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": kind} | SIZES | FAMILIES[kind][1] | change


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] == "2":
        tied = judged(*TIED, folder / "tied", pipeline=2)
        (folder / f"tied-{dist.get_rank()}.json").write_text(json.dumps(tied))
        dist.destroy_process_group()
        return
    found = {kind: judged(*about, folder / kind) for kind, about in FAMILIES.items()}
    known = sorted(mbridge.AutoBridge.list_supported_models())
    about = {
        "families": found,
        "sums": {kind: judged(*about, folder / f"{kind}-sums") for kind, about in OTHER_SUMS.items()},
        "known": known,
        "checked": {kind: [*built] for kind, built in model.BUILT.items()},
        "deepseek": said_of({"model_type": "deepseek_v3"}, folder / "other"),
        "refused": [said_of(changed(kind, change), folder / "other") for kind, change, _ in REFUSED],
        "early": said_of(changed("llama", {"mlp_bias": True}), folder / "other", before_all),
        "alike": [said_of(changed(kind, change), folder / "other") for kind, change in ALIKE],
    }
    (folder / "found.json").write_text(json.dumps(about))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
