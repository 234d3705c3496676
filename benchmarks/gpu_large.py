"""The stage `large` of `benchmarks.gpu`: speeds at the shape of Qwen3-30B-A3B, with random weights.

Drafts of a known acceptance cost nothing. Beside them a draft model and an EAGLE-3 head of usual shapes, whose weights
are random as well, so that nearly all their drafts are wrong: what they give is the price of their rounds.

    python -m benchmarks.gpu_large SHAPE_AS_JSON FOLDER    writes the folders of the three, in a process of its own
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from benchmarks import dialled
from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.sglang.engine_client import running
from specactor.rollout.sglang.rank_calls import RANK_CALLS, RankContext
from specactor.types import RolloutRequest

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

RANDOMISE = "gpu_large.randomise"
DRAFTER = "benchmarks.gpu_large:InEngine"
MEMORY_BYTES = 135e9
MODELS = {"model": "draft model", "model:2": "head"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A mixture of experts, its draft model and its head."""

    vocab: int = 151_936
    layers: int = 48
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    experts_per_token: int = 8
    expert_size: int = 768
    draft_layers: int = 28
    draft_hidden: int = 1024
    draft_heads: int = 16
    draft_kv_heads: int = 8
    draft_size: int = 3072
    head_vocab: int = 32_000
    context: int = 8192
    memory_fraction: float = 0.85
    kv_tokens: int = 240_000
    prompt: int = 3000
    """Tokens of a long prompt."""
    long: int = 64
    """Requests with long prompts."""


SMALL = Shape(
    vocab=512, layers=3, hidden=128, heads=4, kv_heads=2, head_dim=32, experts=8, experts_per_token=2, expert_size=64,
    draft_layers=1, draft_hidden=64, draft_heads=2, draft_kv_heads=1, draft_size=128, head_vocab=256, context=512,
    memory_fraction=0.5, kv_tokens=4096, prompt=64, long=4,
)  # fmt: skip


def randomise(rank: RankContext, payload: bytes) -> bytes:
    """Rank call: give the model weights under which tokens depend on the text; SGLang's random ones are too small."""
    count, random = 0, {}
    for name, parameter in rank.model.named_parameters():
        device = parameter.device
        if device not in random:
            random[device] = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.06 if "lm_head" in name else 0.02, generator=random[device])
        count += parameter.numel()
    return str(count).encode()


class InEngine(dialled.InEngine):
    """The dialled drafter; its import makes the rank call known."""


RANK_CALLS[RANDOMISE] = randomise


def write(shape: Shape, folder: Path) -> None:
    """Write the configuration of the policy, and draft model and head with random weights."""
    from specactor.data.tokenizer import make_char_tokenizer
    from specactor.trainer.drafter.head import Eagle3Start, make_head, the_transformers

    transformers = the_transformers()

    common: dict[str, Any] = {"vocab_size": shape.vocab, "max_position_embeddings": shape.context, "rms_norm_eps": 1e-6}
    common |= {"dtype": "bfloat16", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": shape.head_dim}
    policy = transformers.Qwen3MoeConfig(
        **common,
        hidden_size=shape.hidden,
        intermediate_size=shape.expert_size * shape.experts_per_token,
        moe_intermediate_size=shape.expert_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,
        rope_theta=1e6,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    draft = transformers.Qwen3Config(
        **common,
        hidden_size=shape.draft_hidden,
        intermediate_size=shape.draft_size,
        num_hidden_layers=shape.draft_layers,
        num_attention_heads=shape.draft_heads,
        num_key_value_heads=shape.draft_kv_heads,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    same = transformers.Qwen3Config(
        **{**policy.to_dict(), "num_hidden_layers": 2, "layer_types": None, "architectures": None}
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    policy.save_pretrained(folder / "policy")
    transformers.Qwen3ForCausalLM(draft).save_pretrained(folder / "draft")
    target = transformers.Qwen3ForCausalLM(same)
    target.config.num_hidden_layers = shape.layers
    (folder / "seen.jsonl").write_text(json.dumps({"prompt_ids": [3], "token_ids": [4, 5]}) + "\n")
    head = make_head(target, Eagle3Start(draft_vocab=shape.head_vocab, rollouts=(folder / "seen.jsonl",)))
    torch.set_default_device("cpu")
    head.cpu().config.dtype = "bfloat16"
    (folder / "head").mkdir()
    head.save_pretrained(str(folder / "head"))
    for name in ("policy", "draft", "head"):
        make_char_tokenizer(folder / name)


def folders(shape: Shape, root: Path) -> Path:
    """Return the folder with the three."""
    folder = root / "large"
    if not folder.exists():
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "benchmarks.gpu_large", msgspec.json.encode(shape).decode(), str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(min(8, os.cpu_count() or 1))}
        subprocess.run(command, check=True, env=environment)
    return folder


def large(bench: Bench) -> dict[str, Any]:
    """Return tokens/s by requests and way, in turns; milliseconds of a round with drafts of models; how many tokens
    and log-probabilities differ from plain ones."""
    from benchmarks import gpu, gpu_speed  # which import this module

    bench.close()
    shape = Shape() if bench.on_gpu else SMALL
    if bench.on_gpu and torch.cuda.mem_get_info()[1] < MEMORY_BYTES:
        return {"left out": f"left out: the device has less than {MEMORY_BYTES / 1e9:.0f} GB"}
    folder, largest = folders(shape, bench.folder), max(bench.size.windows)
    models = (str(folder / "draft"), str(folder / "head"))
    most = max(bench.size.batches)
    spec = replace(
        bench.spec(SpeculationConfig(mode="coupled", max_window=largest, drafters=(*MODELS,), draft_model=models)),
        model_dir=str(folder / "policy"),
        awaits_weights=True,
        context_length=shape.context,
        config=EngineConfig(
            max_running_requests=most,
            memory_fraction=shape.memory_fraction,
            max_total_tokens=shape.kv_tokens,
            extra_args=bench.extra_args,
        ),
        log_file=str(bench.folder / "large-engine.log"),
    )
    off = SpeculationConfig(mode="off", max_window=largest)
    ways = {"plain": off, **gpu_speed.dialled_ways(bench.size.windows, "window {}", DRAFTER)}
    for drafter, name in MODELS.items():
        ways[name] = replace(off, mode="coupled", drafters=(drafter,), window=4, draft_model=models)
    script = bench.folder / "script.json"
    script.write_bytes(msgspec.json.encode(dialled.Script(acceptance=0.0, step_s=[0.0], outputs={})))
    began = time.perf_counter()
    with running(spec, **{dialled.SCRIPT: str(script)}) as engine:
        start_s = time.perf_counter() - began
        gpu.configure(engine, ways[f"window {largest}"])
        parameters = int(engine.rank_call(RANDOMISE, b"", timeout_s=300)[0])
        short = gpu_speed.as_in_training(bench.requests(most))
        long = [_longer(request, shape) for request in short[: shape.long]]
        cases = {str(n): short[:n] for n in bench.size.batches if n != 3}
        found = gpu_speed.in_turns(bench, engine, ways, cases, repetitions=2)
        of_long = gpu_speed.in_turns(
            bench, engine, ways, {f"{shape.long} long": long}, repetitions=2, keep_prompts=True
        )
    return {
        "attention": bench.extra_args.get("attention_backend", ""),
        "start_s": start_s,
        "parameters": parameters,
        "rates": found["rates"] | of_long["rates"],
        "differ": found["differ"] + of_long["differ"],
    }


def _longer(request: RolloutRequest, shape: Shape) -> RolloutRequest:
    prompt = tuple(3 + (request.seed + 31 * i + i * i) % (shape.vocab - 3) for i in range(shape.prompt))
    sampling = replace(request.sampling, max_new_tokens=min(request.sampling.max_new_tokens, 128))
    return replace(request, prompt_ids=prompt, sampling=sampling)


if __name__ == "__main__":
    write(msgspec.json.decode(sys.argv[1], type=Shape), Path(sys.argv[2]))
