"""Draft models cut out of a target, against what the target itself computes; rollouts on disk; the command."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from specactor.cpu import torchvision_ops
from specactor.errors import ConfigError, DataError
from specactor.trainer.distillation import commands, start
from specactor.trainer.distillation.rollout_files import RolloutLine, read_rollouts, write_rollouts
from specactor.trainer.distillation.start import RandomStart, TargetStart, make_draft_model, picked_layers, read_model
from tests.trainer.distillation.cases import VOCAB

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "initializer_range": 0.4,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torchvision_ops.install()
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("targets")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {
            "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=False)),
            "dense": Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
            "tied": Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
        }
    for name, model in models.items():
        model.float().save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("stands for a tokenizer's file\n")
    return {name: folder / name for name in models}


def logits(model: Any, layers: list[int] | None = None) -> Tensor:
    """Of some text, by a model with all or some of its layers."""
    if layers is not None:
        model.model.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        model.config.num_hidden_layers = len(layers)
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = i
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 23)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", ["dense", "tied"])
@pytest.mark.parametrize(("layers", "num", "picked"), [("first", 2, [0, 1]), ("spread", 2, [0, 2]), ("first", 3, None)])
def test_a_dense_target_is_cut_to_some_of_its_layers(
    targets: dict[str, Path], tmp_path: Path, name: str, layers: start.Layers, num: int, picked: list[int] | None
) -> None:
    count = make_draft_model(targets[name], tmp_path / "draft", TargetStart(num_layers=num, layers=layers))
    draft = read_model(tmp_path / "draft")
    assert count == sum(p.numel() for p in draft.parameters())
    torch.testing.assert_close(logits(draft), logits(read_model(targets[name]), picked))
    assert (tmp_path / "draft" / "tokenizer.json").read_text() == "stands for a tokenizer's file\n"
    wrong = logits(read_model(targets[name]), [1])
    assert (logits(draft) - wrong).abs().max() > 0.01


def mlp_of(targets: dict[str, Path], folder: Path, **settings: Any) -> tuple[nn.Module, nn.Module, Any]:
    """(the draft model's first MLP, the target's, the draft model)"""
    make_draft_model(targets["moe"], folder, TargetStart(**settings))
    draft = read_model(folder)
    return draft.model.layers[0].mlp, read_model(targets["moe"]).model.layers[0].mlp, draft


def expert_outputs(experts: nn.Module, x: Tensor) -> Tensor:
    """[experts, ...], one expert at a time."""
    weights = {f"model.layers.0.mlp.{name}": value for name, value in experts.state_dict().items()}
    gate, up, down = (start.expert_weights(weights, 0, f"{p}_proj") for p in ("gate", "up", "down"))
    return torch.stack(
        [(nn.functional.silu(x @ g.T) * (x @ u.T)) @ d.T for g, u, d in zip(gate, up, down, strict=True)]
    )


def test_mixed_experts_answer_with_their_mean(targets: dict[str, Path], tmp_path: Path) -> None:
    mlp, experts, _ = mlp_of(targets, tmp_path / "all", mlp="mixed")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    outputs = expert_outputs(experts, x)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), outputs.mean(0), atol=1e-5, rtol=1e-4)
        two, _, _ = mlp_of(targets, tmp_path / "two", mlp="mixed", max_intermediate=24)
        torch.testing.assert_close(two(x), outputs[:2].mean(0), atol=1e-5, rtol=1e-4)
        mean, _, _ = mlp_of(targets, tmp_path / "mean", mlp="mean")
        assert (mean(x) - outputs.mean(0)).abs().max() > 0.1, "the mean of weights is not the mean of answers"


def test_the_experts_that_are_read_are_the_targets(targets: dict[str, Path]) -> None:
    """Their routed sum, by hand, is what the target's layer answers."""
    experts = read_model(targets["moe"]).model.layers[0].mlp
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        answer = experts(x[None])
        answer = answer[0] if isinstance(answer, tuple) else answer
        share = (x @ experts.gate.weight.T).softmax(-1).topk(2)
        weights = share.values / share.values.sum(-1, keepdim=True)
        outputs = expert_outputs(experts, x)
        by_hand = torch.stack(
            [
                sum(w * outputs[e, t] for w, e in zip(*row, strict=True))
                for t, row in enumerate(zip(weights, share.indices, strict=True))
            ]
        )
    torch.testing.assert_close(answer[0], by_hand, atol=1e-4, rtol=1e-4)


def test_a_fresh_mlp_answers_nothing_yet(targets: dict[str, Path], tmp_path: Path) -> None:
    mlp, _, draft = mlp_of(targets, tmp_path / "fresh", mlp="fresh")
    assert not mlp(torch.ones(1, 32)).any()
    assert mlp.gate_proj.weight.any()
    assert torch.equal(draft.lm_head.weight, read_model(targets["moe"]).lm_head.weight)


@pytest.mark.parametrize(
    "how", [TargetStart(mlp="fresh"), RandomStart(hidden_size=16, head_dim=8, intermediate_size=8)]
)
def test_the_same_bytes_whatever_the_process_drew_before(
    targets: dict[str, Path], tmp_path: Path, how: start.Start
) -> None:
    for name in ("a", "b"):
        torch.manual_seed(len(name) + ord(name))
        before = torch.get_rng_state()
        make_draft_model(targets["moe"], tmp_path / name, how)
        assert torch.equal(torch.get_rng_state(), before)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b


def test_what_cannot_be_made_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_layers: got 4, expected 1\.\.3"):
        make_draft_model(targets["moe"], tmp_path / "x", TargetStart(num_layers=4))
    with pytest.raises(ConfigError, match="expected a path that does not exist"):
        make_draft_model(targets["moe"], targets["dense"], TargetStart())
    with pytest.raises(ConfigError, match="expected a folder with a model"):
        make_draft_model(tmp_path / "nowhere", tmp_path / "x", TargetStart())
    assert list(tmp_path.iterdir()) == []
    assert picked_layers(9, 3, "spread") == [0, 4, 8]


# ------------------------------------------------------------------------------------------------------ rollouts


def test_rollouts_come_back_and_evaluations_are_rollouts(tmp_path: Path) -> None:
    lines = [RolloutLine(prompt_ids=[1, i], token_ids=[3] * i, version=i, reward=0.5, temperature=0.7) for i in (2, 3)]
    write_rollouts(tmp_path / "rollouts" / "step-000001.jsonl", lines[:1])
    write_rollouts(tmp_path / "rollouts" / "step-000001.jsonl", lines[1:])
    assert read_rollouts([tmp_path / "rollouts"]) == lines
    evaluation = {"problem": 1, "prompt": "x", "prompt_ids": [1], "answer": "y", "token_ids": [2, 3], "score": 1.0}
    (tmp_path / "e.jsonl").write_text(json.dumps(evaluation) + "\n" + json.dumps(evaluation | {"token_ids": []}) + "\n")
    assert read_rollouts([tmp_path / "e.jsonl"]) == [RolloutLine(prompt_ids=[1], token_ids=[2, 3])]


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"prompt_ids": [1]}', "x.jsonl:1: got .*token_ids"), ("{", "x.jsonl:1: got"), ("", "got no response")],
)
def test_files_that_are_no_rollouts_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_rollouts([tmp_path / "x.jsonl"])
    with pytest.raises(DataError, match="cannot be read"):
        read_rollouts([tmp_path / "y.jsonl"])


# ----------------------------------------------------------------------------------------------------- the command


def sampled(target: Path, count: int) -> list[RolloutLine]:
    """Responses at temperature 1, one token at a time."""
    model, chance = read_model(target), torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (count, 4), generator=chance)
    with torch.no_grad():
        for _ in range(12):
            law = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(law, 1, generator=chance)], dim=1)
    return [RolloutLine(prompt_ids=row[:4], token_ids=row[4:]) for row in ids.tolist()]


def said(words: list[str]) -> str:
    out = io.StringIO()
    commands.run(words, Console(file=out, width=200))
    return out.getvalue()


def test_init_train_eval(targets: dict[str, Path], tmp_path: Path) -> None:
    target, rollouts = str(targets["moe"]), tmp_path / "r.jsonl"
    write_rollouts(rollouts, sampled(targets["moe"], 96))
    first, then = str(tmp_path / "first"), str(tmp_path / "then")
    both = ["--target", target, "--rollouts", str(rollouts)]
    assert "a draft model of 0.0" in said(["init", "--target", target, "--out", first])
    train = [
        *both,
        "--updates",
        "40",
        "--distillation.learning-rate",
        "3e-3",
        "--distillation.tokens-per-update",
        "512",
    ]
    for out in (then, str(tmp_path / "again")):
        assert "40 updates on" in said(["train", *train, "--draft", first, "--out", out])
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in ("then", "again")}) == 1
    options = commands.parse(["eval", *both, "--draft", then, "--all"])
    assert isinstance(options, commands.EvalOptions)
    after = commands.evaluate(options)
    words = said(["eval", *both, "--draft", then, "--all"])
    assert f"accept_length {after.accept_length:.2f} with shared noise" in words
    assert f"at most {after.overlap:.3f} (1 - TV)" in words
    before = commands.evaluate(commands.parse(["eval", *both, "--draft", first, "--all"]))  # type: ignore[arg-type]
    assert after.overlap > before.overlap + 0.02
    assert commands.evaluate(commands.parse(["eval", *both, "--draft", target, "--all"])).shared == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected init, train or eval"),
        (["init"], "--target"),
        (["init", "--target", "a", "--out", "b", "--wrong", "1"], "unknown setting --wrong"),
        (["eval", "--draft", "a", "--target", "b", "--rollouts", "c", "--window", "x"], "--window"),
        (["eval", "--draft", "a", "--target", "b", "--rollouts", "c", "--window", "0"], "expected >= 1"),
        (["train", "--draft", "a", "--target", "b", "--rollouts", "c", "--out", "d", "--minutes", "0"], "minutes > 0"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        commands.parse(words)
    assert "\n" not in str(caught.value)


def test_models_of_other_vocabularies_are_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", [RolloutLine(prompt_ids=[1], token_ids=[2, 3])])
    wide = tmp_path / "wide"
    model = read_model(targets["dense"])
    model.resize_token_embeddings(VOCAB + 8)
    start.write_model(model, wide, tokenizer=targets["dense"])
    words = ["eval", "--draft", str(wide), "--target", str(targets["moe"]), "--rollouts", str(tmp_path / "r.jsonl")]
    with pytest.raises(ConfigError, match=f"draft: got '{VOCAB + 8} tokens', expected the target's {VOCAB} tokens"):
        commands.evaluate(commands.parse(words))  # type: ignore[arg-type]


IN_A_TRAINER = """
import sys
from pathlib import Path
from specactor.cpu import megatron
megatron.install()
import torch
from specactor.trainer.distillation import start
if sys.argv[2] == "wrong":
    start.fill_buffers = lambda model: None
with torch.no_grad():
    logits = start.read_model(Path(sys.argv[1]))(input_ids=torch.arange(24)[None]).logits
print("LOGITS", logits.double().abs().sum().item())
"""


@pytest.mark.parametrize("version", ["right", "wrong"])
def test_a_model_that_a_trainer_reads_is_the_same_model(targets: dict[str, Path], version: str) -> None:
    """transformers leaves rotary frequencies unset there, if nobody computes them."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TRAINER, str(targets["dense"]), version],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    [said] = [line for line in done.stdout.splitlines() if line.startswith("LOGITS ")]
    with torch.no_grad():
        logits = start.read_model(targets["dense"])(input_ids=torch.arange(24)[None]).logits
    here = logits.double().abs().sum().item()
    assert (float(said.split()[1]) == pytest.approx(here, rel=1e-9)) == (version == "right")
