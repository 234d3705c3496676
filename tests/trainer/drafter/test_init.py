"""Draft models cut out of a target, against what the target itself computes; rollouts on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specactor.errors import ConfigError, DataError
from specactor.replay import records
from specactor.trainer.drafter import init
from specactor.trainer.drafter.buffer import RolloutLine, read_rollouts
from specactor.trainer.drafter.init import RandomStart, TargetStart, make_draft_model, read_model
from tests.trainer.drafter.cases import write_rollouts


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
@pytest.mark.parametrize(("num", "picked"), [(2, [0, 1]), (3, None)])
def test_a_dense_target_is_cut_to_its_first_layers(
    targets: dict[str, Path], tmp_path: Path, name: str, num: int, picked: list[int] | None
) -> None:
    count = make_draft_model(targets[name], tmp_path / "draft", TargetStart(num_layers=num))
    draft = read_model(tmp_path / "draft")
    assert count == sum(p.numel() for p in draft.parameters())
    torch.testing.assert_close(logits(draft), logits(read_model(targets[name]), picked))
    assert (tmp_path / "draft" / "tokenizer.json").read_text() == "stands for a tokenizer's file\n"
    wrong = logits(read_model(targets[name]), [1])
    assert (logits(draft) - wrong).abs().max() > 0.01


def mlp_of(targets: dict[str, Path], folder: Path) -> tuple[nn.Module, nn.Module]:
    """(the draft model's first MLP, the target's)"""
    make_draft_model(targets["moe"], folder, TargetStart())
    return read_model(folder).model.layers[0].mlp, read_model(targets["moe"]).model.layers[0].mlp


def expert_outputs(experts: nn.Module, x: Tensor) -> Tensor:
    """[experts, ...], one expert at a time."""
    weights = {f"model.layers.0.mlp.{name}": value for name, value in experts.state_dict().items()}
    gate, up, down = (init.expert_weights(weights, 0, f"{p}_proj") for p in ("gate", "up", "down"))
    return torch.stack(
        [(nn.functional.silu(x @ g.T) * (x @ u.T)) @ d.T for g, u, d in zip(gate, up, down, strict=True)]
    )


def test_as_many_experts_as_a_token_activates_answer_with_their_mean(targets: dict[str, Path], tmp_path: Path) -> None:
    mlp, experts = mlp_of(targets, tmp_path / "all")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    outputs = expert_outputs(experts, x)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), outputs[:2].mean(0), atol=1e-5, rtol=1e-4)
        assert (mlp(x) - outputs.mean(0)).abs().max() > 0.01, "of the first two alone"


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


@pytest.mark.parametrize("how", [TargetStart(), RandomStart(hidden_size=16, head_dim=8, intermediate_size=8)])
def test_the_same_bytes_whatever_the_process_drew_before(
    targets: dict[str, Path], tmp_path: Path, how: init.Start
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
    with pytest.raises(ConfigError, match="expected a path that does not exist or an empty folder"):
        make_draft_model(targets["moe"], targets["dense"], TargetStart())
    with pytest.raises(ConfigError, match="expected a folder with a model"):
        make_draft_model(tmp_path / "nowhere", tmp_path / "x", TargetStart())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TargetStart(num_layers=0), "start.num_layers: got 0, expected > 0"),
        (lambda: RandomStart(hidden_size=0), "start.hidden_size: got 0, expected > 0"),
        (lambda: RandomStart(head_dim=-8), "start.head_dim: got -8, expected > 0"),
        (lambda: RandomStart(head_dim=7), "start.head_dim: got 7, expected an even number"),
        (lambda: RandomStart(num_heads=3), "start.num_heads: got 3, expected a multiple of num_kv_heads, 2"),
    ],
)
def test_sizes_that_make_no_model_are_refused(make: Callable[[], init.Start], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ------------------------------------------------------------------------------------------------------ rollouts


def test_rollouts_come_back_and_evaluations_are_rollouts(tmp_path: Path) -> None:
    lines = [RolloutLine(prompt_ids=[1, i], token_ids=[3] * i, version=i, reward=0.5, temperature=0.7) for i in (2, 3)]
    write_rollouts(tmp_path / "rollouts" / "step-000001.jsonl", lines[:1])
    write_rollouts(tmp_path / "rollouts" / "step-000001.jsonl", lines[1:])
    assert read_rollouts([tmp_path / "rollouts"]) == lines
    evaluation = {"problem": 1, "prompt": "x", "prompt_ids": [1], "answer": "y", "token_ids": [2, 3], "score": 1.0}
    (tmp_path / "e.jsonl").write_text(json.dumps(evaluation) + "\n" + json.dumps(evaluation | {"token_ids": []}) + "\n")
    assert read_rollouts([tmp_path / "e.jsonl"]) == [RolloutLine(prompt_ids=[1], token_ids=[2, 3])]


def kept(version: int, *, is_whole: bool) -> records.SampleRecord:
    return records.SampleRecord.of(
        request_id="0.0.0",
        group=0,
        sample=0,
        problem=0,
        seed=0,
        spans=((1, 0, 1), (version, 1, 3)),
        finish_reason="stop",
        score=1.0,
        reward=0.5,
        advantage=0.0,
        prompt_ids=[1, 2],
        token_ids=[7, 8, version],
        logprobs=[-1.0, -2.0, -3.0],
        routed_experts=b"",
        is_whole=is_whole,
    )


def test_of_the_records_of_a_run_what_is_kept_whole_is_read(tmp_path: Path) -> None:
    config = {"rollout": {"temperature": 0.7}}
    for step in (1, 2):
        samples = (kept(step, is_whole=True), kept(9, is_whole=False), kept(step + 1, is_whole=True))
        records.write(tmp_path, records.StepRecord(step=step, samples=samples, config=config))
    assert read_rollouts([tmp_path / "records"]) == [
        RolloutLine(prompt_ids=[1, 2], token_ids=[7, 8, version], version=version, reward=0.5, temperature=0.7)
        for version in (1, 2, 2, 3)
    ]
    records.file_of(tmp_path, 1).write_bytes(b"cut")
    with pytest.raises(DataError, match=r"step-000001\.bin: got a record that was cut or changed"):
        read_rollouts([tmp_path / "records"])


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


IN_A_TRAINER = """
import sys
from pathlib import Path
from specactor.cpu import megatron
megatron.install()
import torch
from specactor.trainer.drafter import init
if sys.argv[2] == "wrong":
    init.fill_buffers = lambda model: None
with torch.no_grad():
    logits = init.read_model(Path(sys.argv[1]))(input_ids=torch.arange(24)[None]).logits
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
        logits = init.read_model(targets["dense"])(input_ids=torch.arange(24)[None]).logits
    here = logits.double().abs().sum().item()
    assert (float(said.split()[1]) == pytest.approx(here, rel=1e-9)) == (version == "right")
