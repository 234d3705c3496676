"""The policy's top-k against a sort of the whole vocabulary, on one rank and on two that share it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specactor.trainer import logprobs as module
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


def test_the_recorder_sees_micro_batches_on_their_way() -> None:
    """Two sequences with responses of 3 and 2 tokens, in micro-batches out of order."""
    logits_TV = case(8, 6, 2, seed=5)["logits"]
    seen = []

    def objective(batch: Any, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(logits_1TV)
        return logits_1TV.sum(), {}

    recorder = Recorder(2, temperature=0.7, vocab_size=6, device=torch.device("cpu"), group=None)
    observed = recorder.around(objective)
    second = logits_TV[None, 4:].clone().requires_grad_()
    loss, _ = observed(FakeBatch(torch.tensor([1, 2]), torch.tensor([3, 4])), second)  # type: ignore[arg-type]
    loss.backward()
    observed(FakeBatch(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2])), logits_TV[None, :4])  # type: ignore[arg-type]
    assert seen[0] is second
    assert torch.equal(second.grad, torch.ones_like(second)), "the loss is not touched"  # type: ignore[arg-type]
    sequences = [TrainSequence(token_ids=tuple(range(1 + n)), prompt_len=1) for n in (3, 2)]
    recorder.updated(sequences)
    known = [top_k for top_k, _ in recorder.take()]
    rows = torch.cat([logits_TV[:3], logits_TV[5:7]])
    want = (rows / 0.7).log_softmax(-1).topk(2)
    assert np.concatenate([of.tokens for of in known]).tolist() == want.indices.tolist()
    got = np.concatenate([of.logprobs for of in known])
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, want.values.numpy(), rtol=1e-3, atol=1e-3)
    assert [len(of.tokens) for of in known] == [3, 2]
    assert all(of.tokens.flags.owndata for of in known), "the buffer keeps few, which would keep all in memory"
    recorder.updated(sequences)
    assert not np.concatenate([of.tokens for of, _ in recorder.take()]).any(), "it is empty again"


def test_what_an_environment_said_is_certain() -> None:
    """No policy has a distribution there: the token itself has all of the probability."""
    logits_TV = case(8, 6, 2, seed=5)["logits"]
    recorder = Recorder(3, temperature=1.0, vocab_size=6, device=torch.device("cpu"), group=None)
    observed = recorder.around(lambda batch, logits_1TV: (logits_1TV.sum(), {}))
    observed(FakeBatch(torch.tensor([0, 3]), torch.tensor([0, 3])), logits_TV[None, :4])  # type: ignore[arg-type]
    sequence = TrainSequence(token_ids=(1, 2, 5, 0, 4), prompt_len=1, loss_mask=(True, False, False, True))
    recorder.updated([sequence])
    [(known, _)] = recorder.take()
    want = logits_TV[[0, 3]].log_softmax(-1).topk(3)
    assert known.tokens[[0, 3]].tolist() == want.indices.tolist()
    assert known.tokens[[1, 2], 0].tolist() == [5, 0]
    assert known.logprobs[[1, 2]].tolist() == [[0.0, -60.0, -60.0]] * 2
