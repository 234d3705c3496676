"""The policy's top-k against a sort of the whole vocabulary, on one rank and on two that share it; and what of a step
is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specactor.trainer import logprobs as module
from specactor.trainer.drafter.buffer import DraftBuffer, TopK, example_from
from specactor.trainer.drafter.recorder import Recorder
from specactor.trainer.logprobs import vocab_parallel_top_k
from specactor.types import TrainSequence
from tests.lib.ranks import run_beside


def case(tokens: int, vocab: int, k: int, *, temperature: float = 1.0, seed: int = 0) -> dict[str, Any]:
    logits = 4 * torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(seed))
    return {"logits": logits, "k": k, "temperature": temperature}


CASES = [
    case(7, 12, 3),
    case(9, 10, 5, temperature=0.6, seed=1),
    case(4, 8, 6, seed=2),  # more than a shard holds
    case(3, 8, 100, seed=3),
    case(0, 8, 3),
]


def assert_top_k(ids: Tensor, logprobs: Tensor, of: dict[str, Any]) -> None:
    """Against a sort in float64."""
    logp = (of["logits"].double() / of["temperature"]).log_softmax(-1)
    width = min(of["k"], logp.shape[1])
    assert ids.shape == logprobs.shape == (len(logp), width)
    for row, tokens, values in zip(logp.tolist(), ids.tolist(), logprobs.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda v: -row[v])[:width]
        assert tokens == order
        assert values == pytest.approx([row[v] for v in order], abs=1e-5)


@pytest.mark.parametrize("of", CASES)
def test_one_rank(of: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 24)
    assert_top_k(*vocab_parallel_top_k(of["logits"], of["k"], temperature=of["temperature"], group=None), of)


def test_two_ranks_that_share_the_vocabulary(tmp_path: Path) -> None:
    torch.save(CASES, tmp_path / "cases.pt")
    outputs = [tmp_path / f"rank{r}.pt" for r in range(2)]
    files = (tmp_path / "store", tmp_path / "cases.pt")
    run_beside([("tests.trainer.drafter.top_k_rank", r, 2, *files, out) for r, out in enumerate(outputs)])
    for of, one, two in zip(CASES, *(torch.load(out, weights_only=True) for out in outputs), strict=True):
        assert torch.equal(one["ids"], two["ids"])
        assert torch.equal(one["logprobs"], two["logprobs"])
        assert_top_k(one["ids"], one["logprobs"], of)
        own_shard = of["logits"].chunk(2, dim=1)[0]
        if len(own_shard):
            wrong = vocab_parallel_top_k(own_shard, of["k"], temperature=of["temperature"], group=None)
            with pytest.raises(AssertionError):  # a rank that forgets the other's shard
                assert_top_k(*wrong, of)


@dataclass
class FakeBatch:
    """What the recorder reads of a micro-batch."""

    rows_R: Tensor  # noqa: N815
    source_R: Tensor  # noqa: N815
    text_T: Tensor | None = None  # noqa: N815


def test_the_recorder_sees_micro_batches_on_their_way() -> None:
    """Two sequences with responses of 3 and 2 tokens, in micro-batches out of order."""
    logits_TV = case(8, 6, 2, seed=5)["logits"]
    seen = []

    def objective(batch: Any, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(logits_1TV)
        return logits_1TV.sum(), {}

    recorder = Recorder(2, temperature=0.7, vocab_size=6, device=torch.device("cpu"), group=None)
    sequences = [TrainSequence(token_ids=tuple(range(1 + n)), prompt_len=1) for n in (3, 2)]
    observed = recorder.around(objective, sequences)
    recorder.begin(sequences)
    second = logits_TV[None, 4:].clone().requires_grad_()
    loss, _ = observed(FakeBatch(torch.tensor([1, 2]), torch.tensor([3, 4])), second)  # type: ignore[arg-type]
    loss.backward()
    observed(FakeBatch(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2])), logits_TV[None, :4])  # type: ignore[arg-type]
    assert seen[0] is second
    assert torch.equal(second.grad, torch.ones_like(second)), "the loss is not touched"  # type: ignore[arg-type]
    recorder.updated(sequences)
    known = [top_k for top_k, _ in recorder.take() if top_k is not None]
    rows = torch.cat([logits_TV[:3], logits_TV[5:7]])
    want = (rows / 0.7).log_softmax(-1).topk(2)
    assert np.concatenate([of.tokens for of in known]).tolist() == want.indices.tolist()
    got = np.concatenate([of.logprobs for of in known])
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, want.values.numpy(), rtol=1e-3, atol=1e-3)
    assert [len(of.tokens) for of in known] == [3, 2]
    assert all(of.tokens.flags.owndata for of in known), "the buffer keeps few, which would keep all in memory"
    recorder.around(objective, sequences)
    recorder.begin(sequences)
    recorder.updated(sequences)
    assert not np.concatenate([of.tokens for of, _ in recorder.take() if of]).any(), "it is empty again"


def test_what_an_environment_said_is_certain() -> None:
    """No policy has a distribution there: the token itself has all of the probability."""
    logits_TV = case(8, 6, 2, seed=5)["logits"]
    recorder = Recorder(3, temperature=1.0, vocab_size=6, device=torch.device("cpu"), group=None)
    sequence = TrainSequence(token_ids=(1, 2, 5, 0, 4), prompt_len=1, loss_mask=(True, False, False, True))
    observed = recorder.around(lambda batch, logits_1TV: (logits_1TV.sum(), {}), [sequence])
    recorder.begin([sequence])
    observed(FakeBatch(torch.tensor([0, 3]), torch.tensor([0, 3])), logits_TV[None, :4])  # type: ignore[arg-type]
    recorder.updated([sequence])
    [(known, _)] = recorder.take()
    assert known is not None
    want = logits_TV[[0, 3]].log_softmax(-1).topk(3)
    assert known.tokens[[0, 3]].tolist() == want.indices.tolist()
    assert known.tokens[[1, 2], 0].tolist() == [5, 0]
    assert known.logprobs[[1, 2]].tolist() == [[0.0, -60.0, -60.0]] * 2


def step_of(recorder: Recorder, sequences: list[TrainSequence], logits_RV: Tensor) -> list[TopK | None]:
    """Two updates of two micro-batches each, the last tokens first."""
    observed = recorder.around(lambda batch, logits_1TV: (logits_1TV.sum(), {}), sequences)
    half, first = len(sequences) // 2, 0
    for part in (sequences[:half], sequences[half:]):
        recorder.begin(part)
        num = sum(s.response_len for s in part)
        for numbers in reversed(torch.arange(num).chunk(2)):
            logits_1TV = logits_RV[None, first + numbers]
            observed(FakeBatch(torch.arange(len(numbers)), numbers), logits_1TV)  # type: ignore[arg-type]
        assert sum(len(ids) for _, ids, _ in recorder._micro_batches) <= recorder.max_tokens
        recorder.updated(part)
        first += num
    return [top_k for top_k, _ in recorder.take()]


@pytest.mark.parametrize("longest", [9, 14, 100])
def test_the_buffer_holds_what_it_would_if_all_were_kept(longest: int) -> None:
    """Two steps of random lengths, many of them equal, and an environment's tokens."""
    rng, room = np.random.default_rng(longest), 80
    fixed: dict[str, Any] = {"temperature": 1.0, "vocab_size": 12, "device": torch.device("cpu"), "group": None}
    few, every = Recorder(3, **fixed, max_tokens=room, max_example_tokens=longest), Recorder(3, **fixed)
    held, would = (
        DraftBuffer(max_tokens=room, half_life_steps=2.0, seed=0, max_example_tokens=longest) for _ in range(2)
    )
    for step in range(2):
        sequences = []
        for _ in range(30):
            prompt, response = rng.integers([1, 0], [11, 12]).tolist()
            tokens, own = rng.integers(0, 12, prompt + response), rng.random(response) < 0.8
            sequences.append(TrainSequence(token_ids=tokens.tolist(), prompt_len=prompt, loss_mask=bytes(own.tolist())))
        logits_RV = case(sum(s.response_len for s in sequences), 12, 3, seed=step)["logits"]
        for recorder, buffer in ((few, held), (every, would)):
            known = step_of(recorder, sequences, logits_RV)
            assert (None in [k for k, s in zip(known, sequences, strict=True) if s.response_len]) == (recorder is few)
            assert sum(len(k.tokens) for k in known if k is not None) <= recorder.max_tokens
            examples = [
                example_from(s, k, version=step, temperature=1.0) for s, k in zip(sequences, known, strict=True)
            ]
            buffer.add([example for example in examples if example.response_len])
        assert all(example.top_k is not None for example in held.examples)
        assert held.state() == would.state()


def test_an_update_without_a_sequence_that_is_kept() -> None:
    recorder = Recorder(3, temperature=1.0, vocab_size=6, device=torch.device("cpu"), group=None, max_tokens=12)
    known = step_of(recorder, sequences_of((1, 3), (2, 9)), case(12, 6, 3)["logits"])
    assert [k is None for k in known] == [True, False]


def states_of(sequences: list[TrainSequence], *, updates: int = 1, **bounds: int) -> list[list[float] | None]:
    """What is kept of a layer that says each token's number in the step; its micro-batches begin with padding."""
    layer, each = torch.nn.Identity(), len(sequences) // updates
    recorder = Recorder(
        1,
        temperature=1.0,
        vocab_size=6,
        device=torch.device("cpu"),
        group=None,
        modules=[[layer]],
        hidden_size=1,
        **bounds,
    )
    recorder.around(lambda batch, logits_1TV: (logits_1TV.sum(), {}), sequences)
    first = 0
    for part in (sequences[i : i + each] for i in range(0, len(sequences), each)):
        watch, num = recorder.begin(part), sum(len(s.token_ids) for s in part)
        numbers = torch.tensor([-1, *reversed(range(num))])
        nothing = torch.zeros(0, dtype=torch.int64)
        with watch(FakeBatch(nothing, nothing, numbers)):  # type: ignore[arg-type]
            layer((first + numbers.float())[:, None, None])
        recorder.updated(part)
        first += num
    return [None if states is None else states[:, 0].tolist() for _, states in recorder.take()]


def sequences_of(*lengths: tuple[int, int]) -> list[TrainSequence]:
    """Of prompts and responses of so many tokens."""
    return [TrainSequence(token_ids=(1,) * (p + r), prompt_len=p) for p, r in lengths]


def test_of_a_long_response_the_states_are_kept_that_the_buffer_keeps() -> None:
    """The first ones, with the prompt's: 20 tokens suffice the two longest, cut to 7, and the one that then fits."""
    sequences = sequences_of((3, 2), (2, 10), (5, 0), (1, 40), (2, 4), (7, 30))
    kept = states_of(sequences, max_tokens=20, max_example_tokens=7)
    first = [0, 5, 17, 22, 63, 69]
    assert kept[1] == [*range(first[1], first[1] + 7)]
    assert kept[3] == [*range(first[3], first[3] + 7)]
    assert kept[4] == [*range(first[4], first[4] + 6)]
    assert kept[5] == [], "the buffer counts it, whose prompt leaves no room"
    assert kept[0] is kept[2] is None


def test_whole_responses_are_chosen_as_if_none_were_cut() -> None:
    sequences = sequences_of((2, 3), (1, 6), (2, 3), (4, 6), (1, 1))
    kept = states_of(sequences, max_tokens=24, max_example_tokens=10)
    assert [states and len(states) for states in kept] == [5, 7, None, 10, 2]


def test_updates_of_a_step_share_the_room_for_states() -> None:
    sequences = sequences_of((1, 4), (1, 3), (1, 8), (1, 6))
    kept = states_of(sequences, updates=2, max_tokens=16)
    assert [states and len(states) for states in kept] == [None, None, 9, 7]
    assert kept[3] == [*range(18, 25)]
