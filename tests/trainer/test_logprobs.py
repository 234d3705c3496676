"""Log-probabilities over a sharded vocabulary against torch.log_softmax over the whole one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import specactor.trainer.logprobs as module
from specactor.trainer.logprobs import vocab_parallel_logprobs
from tests.lib.ranks import run_beside


def make_case(
    tokens: int, vocab: int, *, temperature: float = 1.0, scale: float = 3.0, seed: int = 0
) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(tokens, vocab, generator=generator) * scale,
        "targets": torch.randint(vocab, (tokens,), generator=generator),
        "weights": torch.randn(tokens, generator=generator),
        "temperature": temperature,
    }


def reference(case: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs_T, entropy_T, gradient of sum(weights * logprobs)) in float64, on the whole vocabulary."""
    logits, targets, weights = case["logits"], case["targets"], case["weights"]
    assert isinstance(logits, Tensor)
    assert isinstance(targets, Tensor)
    assert isinstance(weights, Tensor)
    leaf = logits.double().requires_grad_()
    all_TV = torch.log_softmax(leaf / case["temperature"], dim=-1)
    logprobs_T = all_TV[torch.arange(len(targets)), targets]
    (grad,) = torch.autograd.grad((logprobs_T * weights).sum(), leaf)
    p_TV = all_TV.detach().exp()
    return logprobs_T.detach(), -torch.where(p_TV > 0, p_TV * all_TV.detach(), 0.0).sum(-1), grad


def assert_equal(got: tuple[Tensor, Tensor, Tensor], case: dict[str, object], *, atol: float = 1e-6) -> None:
    for name, a, b in zip(("logprobs", "entropy", "gradient"), got, reference(case), strict=True):
        torch.testing.assert_close(a.double(), b, atol=atol, rtol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def plain(case: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    leaf = case["logits"].clone().requires_grad_()  # type: ignore[attr-defined]
    logprobs_T, entropy_T = vocab_parallel_logprobs(
        leaf,
        case["targets"],  # type: ignore[arg-type]
        temperature=case["temperature"],  # type: ignore[arg-type]
        group=None,
    )
    (logprobs_T * case["weights"]).sum().backward()  # type: ignore[operator]
    return logprobs_T.detach(), entropy_T, leaf.grad  # type: ignore[return-value]


CASES = {
    "plain": make_case(7, 12),
    "temperature": make_case(9, 10, temperature=0.6, seed=1),
    "large logits": make_case(5, 8, scale=300.0, seed=2),
    "no tokens": make_case(0, 6),
    "one token": make_case(1, 64, temperature=1.3, seed=3),
}


def test_two_ranks_equal_the_whole_vocabulary(tmp_path: Path) -> None:
    cases, world = list(CASES.values()), 2
    torch.save(cases, tmp_path / "cases.pt")
    outputs = [tmp_path / f"rank{r}.pt" for r in range(world)]
    files = (tmp_path / "store", tmp_path / "cases.pt")
    run_beside([("tests.trainer.logprobs_rank", r, world, *files, out) for r, out in enumerate(outputs)])
    results = [torch.load(out, weights_only=True) for out in outputs]
    for case, one, two in zip(cases, *results, strict=True):
        assert torch.equal(one["logprobs"], two["logprobs"])
        assert torch.equal(one["entropy"], two["entropy"])
        assert_equal((one["logprobs"], one["entropy"], torch.cat([one["grad"], two["grad"]], dim=1)), case)
        shifted = torch.cat([two["grad"], one["grad"]], dim=1)  # shards in the wrong order must not pass
        if len(one["logprobs"]):
            with pytest.raises(AssertionError):
                assert_equal((one["logprobs"], one["entropy"], shifted), case)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_log_softmax(name: str) -> None:
    assert_equal(plain(CASES[name]), CASES[name])


def test_gradient_by_finite_differences() -> None:
    case = make_case(3, 5, temperature=0.7)
    targets, logits = case["targets"], case["logits"]
    assert isinstance(logits, Tensor)
    assert isinstance(targets, Tensor)

    def logprobs(leaf: Tensor) -> Tensor:
        return vocab_parallel_logprobs(leaf, targets, temperature=0.7, group=None)[0]

    point = logits.double()
    leaf = point.clone().requires_grad_()
    logprobs(leaf).sum().backward()
    for index in itertools.product(range(3), range(5)):
        step = torch.zeros_like(point)
        step[index] = 1e-6
        slope = (logprobs(point + step) - logprobs(point - step)).sum() / 2e-6
        assert leaf.grad is not None
        assert leaf.grad[index].item() == pytest.approx(slope.item(), abs=1e-8)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(7, 12)
    whole = plain(case)
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 24)  # two rows at a time, the last chunk is short
    for a, b in zip(plain(case), whole, strict=True):
        assert torch.equal(a, b)


def test_a_masked_vocabulary_entry() -> None:
    """-inf logits (padding of the vocabulary) have probability zero, and make nothing nan."""
    case = make_case(4, 6)
    logits, targets = case["logits"], case["targets"]
    assert isinstance(logits, Tensor)
    assert isinstance(targets, Tensor)
    logits[:, 5] = -math.inf
    targets.clamp_(max=4)
    logprobs_T, entropy_T, grad_TV = plain(case)
    without = {**case, "logits": logits[:, :5]}
    assert_equal((logprobs_T, entropy_T, grad_TV[:, :5]), without)
    assert (grad_TV[:, 5] == 0).all()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    case = make_case(6, 32)
    case["logits"] = case["logits"].bfloat16()  # type: ignore[attr-defined]
    logprobs_T, entropy_T, grad_TV = plain(case)
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    assert grad_TV.dtype == torch.bfloat16
    want_logprobs, want_entropy, want_grad = reference(case)
    torch.testing.assert_close(logprobs_T.double(), want_logprobs, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy_T.double(), want_entropy, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(grad_TV.double(), want_grad, atol=1e-3, rtol=1e-2)


def test_the_input_is_left_alone_and_entropy_has_no_gradient() -> None:
    case = make_case(3, 5)
    leaf = case["logits"].clone().requires_grad_()  # type: ignore[attr-defined]
    logprobs_T, entropy_T = vocab_parallel_logprobs(leaf, case["targets"], temperature=0.5, group=None)  # type: ignore[arg-type]
    assert torch.equal(leaf.detach(), case["logits"])  # type: ignore[arg-type]
    assert not entropy_T.requires_grad
    assert logprobs_T.requires_grad


def test_a_second_backward_pass_is_an_error_not_a_wrong_gradient() -> None:
    case = make_case(3, 5)
    leaf = case["logits"].clone().requires_grad_()  # type: ignore[attr-defined]
    logprobs_T, _ = vocab_parallel_logprobs(leaf, case["targets"], temperature=1.0, group=None)  # type: ignore[arg-type]
    logprobs_T.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs_T.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    case = make_case(3, 5)
    leaf = case["logits"].clone().requires_grad_()  # type: ignore[attr-defined]
    logprobs_T, _ = vocab_parallel_logprobs(leaf, case["targets"], temperature=1.0, group=None)  # type: ignore[arg-type]
    (grad_TV,) = torch.autograd.grad(logprobs_T.exp().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_TV.sum().backward()


def test_one_buffer_is_kept_and_none_without_gradient() -> None:
    """Of the size of the logits, only the softmax lives from the forward to the backward pass."""
    case = make_case(64, 128)
    leaf = case["logits"].clone().requires_grad_()  # type: ignore[attr-defined]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        vocab_parallel_logprobs(leaf, case["targets"], temperature=1.0, group=None)  # type: ignore[arg-type]
    assert [t.shape for t in saved if t.numel() >= leaf.numel()] == [leaf.shape]
    with torch.no_grad():
        logprobs_T, _ = vocab_parallel_logprobs(leaf, case["targets"], temperature=1.0, group=None)  # type: ignore[arg-type]
    assert logprobs_T.grad_fn is None
