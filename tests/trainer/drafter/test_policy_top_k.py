"""The policy's own passes give its top-k, under sharded layouts; and a refresh changes nothing of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor.cpu import torchvision_ops
from specactor.trainer.drafter.buffer import DraftBuffer
from specactor.trainer.drafter.train import DrafterTrainer
from tests.lib.ranks import run_ranks
from tests.trainer import policy_cases
from tests.trainer.drafter import cases
from tests.trainer.drafter.conftest import SHAPE
from tests.trainer.drafter.policy_cases import ROOM, SEQUENCES, TOP_K, UPDATES, draft_model, head_model, learned

LAYOUTS = ["TP2", "DP2", "PP2", "CP2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dense policy; every layer counts."""
    torchvision_ops.install()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPE | {"intermediate_size": 48, "num_hidden_layers": 2, "bos_token_id": 1, "max_position_embeddings": 128}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False)).float().eval()
    made.folder = tmp_path_factory.mktemp("policy") / "model"
    made.save_pretrained(made.folder)
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("top_k")
    run_ranks(2, "tests.trainer.drafter.policy_top_k_script", model.folder, folder, folder=folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    said = json.loads((folder / "results.json").read_text())
    assert said["alike"], "ranks disagree"
    found: dict[str, Any] = said["results"]
    return found


def buffer(folder: Path, layout: str) -> DraftBuffer:
    held = DraftBuffer(max_tokens=10**6, half_life_steps=2.0, seed=0, max_example_tokens=10**6)
    held.restore((folder / layout / "buffer").read_bytes())
    return held


def assert_top_k(held: DraftBuffer, model: Any, temperature: float) -> None:
    """Against transformers, in another process than the policy's; of those whose states are kept."""
    assert len(held) == len(SEQUENCES)
    assert 0 < sum(len(example.token_ids) for example in held.examples if example.top_k is not None) <= ROOM
    for example, s in zip(held.examples, SEQUENCES, strict=True):
        if example.top_k is None:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([s.token_ids])).logits[0, s.prompt_len - 1 : -1]
        want = (logits.double() / temperature).log_softmax(-1).topk(TOP_K)
        assert example.top_k.tokens.tolist() == want.indices.tolist()
        np.testing.assert_allclose(example.top_k.logprobs, want.values.numpy(), rtol=6e-4, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_top_k_is_that_of_the_policy_before_the_update(layout: str, folder: Path, model: Any) -> None:
    held = buffer(folder, layout)
    assert_top_k(held, model, policy_cases.TEMPERATURE)
    with pytest.raises(AssertionError):
        assert_top_k(held, model, 1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refresh_changes_nothing_of_the_policy(layout: str, results: dict[str, Any]) -> None:
    found = results[layout]
    assert found["plain"] == found["with_refresh"], "bit for bit"
    assert found["plain"][0]["loss"] != found["plain"][1]["loss"], "the policy does learn"
    assert not found["drafter"]["moved"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_draft_model_learns_beside_the_policy_as_it_does_alone(
    layout: str, folder: Path, results: dict[str, Any]
) -> None:
    alone = DrafterTrainer(cases.config(), draft_model(), seed=0)
    alone.buffer.add(buffer(folder, layout).examples)
    stats = alone.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=UPDATES)
    assert results[layout]["drafter"]["losses"] == pytest.approx(stats.losses, abs=1e-5)


def outputs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[T, F] of the embedding and of both layers."""
    found: list[torch.Tensor] = []
    watched = [model.model.embed_tokens, *model.model.layers]
    hooks = [module.register_forward_hook(lambda _, __, output: found.append(output)) for module in watched]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.cat([each[0] if isinstance(each, tuple) else each for each in found], dim=-1)[0]


def assert_states(states: list[Any], model: Any, *, late: int = 0) -> None:
    for s, kept in zip(SEQUENCES, states, strict=True):
        if kept is not None:
            want = outputs(model, list(s.token_ids))
            torch.testing.assert_close(kept.float()[late:], want[: len(want) - late], rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_states_are_those_of_the_policy_before_the_update(layout: str, folder: Path, model: Any) -> None:
    """Of embedding and layers, at every token, of the longest responses that there is room for."""
    states = torch.load(folder / layout / "states.pt")
    assert_states(states, model)
    kept = [s for s, there in zip(SEQUENCES, states, strict=True) if there is not None]
    left_out = [s for s, there in zip(SEQUENCES, states, strict=True) if there is None]
    room = ROOM - sum(len(s.token_ids) for s in kept)
    assert left_out
    assert 0 <= room < min(len(s.token_ids) for s in left_out)
    with pytest.raises(AssertionError):
        assert_states(states, model, late=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_learns_beside_the_policy_as_it_does_alone(layout: str, folder: Path, results: dict[str, Any]) -> None:
    known = [example.top_k for example in buffer(folder, layout).examples]
    states = torch.load(folder / layout / "states.pt")
    assert [k is None for k in known] == [of is None for of in states]
    alone = learned(head_model(), known, states)
    for ours, theirs in zip(results[layout]["drafter"]["head"], alone, strict=True):
        assert ours == pytest.approx(list(theirs), abs=1e-4)
    assert alone[0][-1] < alone[0][0]
