"""Wrong versions of sampling, verification, windows, log-probabilities and rollback, for engines that run.

Each name below is loaded by an engine as a draft method, and breaks the process that loads it: the function of that
name is called in place of the right one, which is its first argument. Loading any of them first undoes what the one
before broke. `right` breaks nothing, and learns what it sees; all others draft what `right` saw, half of it wrong.

Shape legend: B requests, R rows of all requests, V vocabulary, W most tokens that a request emits in the round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, top_p_normalize_probs_torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from torch import Tensor

from specactor.rollout.sglang import verify_batch as spreading
from specactor.rollout.sglang import verify_worker
from specactor.rollout.sglang.verify_batch import Rows
from specactor.rollout.sglang.verify_worker import Worker
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.verification import DraftTree, chain
from tests.rollout.sglang.drafters import HalfRight

Function = Callable[..., Any]

_texts: dict[tuple[tuple[int, ...], int], list[int]] = {}
_undo: list[Callable[[], None]] = []


class _Round:
    """What is verified just now. In a prefill every row is a root."""

    rows: Rows | None = None
    requests: Sequence[Req] = ()

    @classmethod
    def root(cls, num_rows: int) -> Tensor:
        """Per row, the first row of its request."""
        if cls.rows is None:
            return torch.arange(num_rows)
        trees, starts = cls.rows.trees, cls.rows.starts
        return torch.tensor([start for tree, start in zip(trees, starts, strict=False) for _ in range(tree.num_rows)])

    @classmethod
    def is_draft(cls, num_rows: int) -> Tensor:
        return cls.root(num_rows) != torch.arange(num_rows)


class Rehearsed(HalfRight):
    """Half right about what `right` saw."""

    name = "rehearsed"

    def __init__(self, *, learns: bool) -> None:
        self._texts = _texts
        self._learns = learns

    def close(self, sequence: DraftSequence) -> None:
        if self._learns:
            super().close(sequence)


def patch(owner: Any, name: str, wrong: Function) -> None:
    """From now on `wrong` is called in place of owner.name; its first argument is what it replaces."""
    kept = vars(owner)[name]
    static = isinstance(kept, staticmethod)
    right = kept.__func__ if static else kept

    def replacement(*arguments: Any, **named: Any) -> Any:
        return wrong(right, *arguments, **named)

    setattr(owner, name, staticmethod(replacement) if static else replacement)
    _undo.append(lambda: setattr(owner, name, kept))


def heal() -> None:
    while _undo:
        _undo.pop()()
    patch(verify_worker, "spread", _note_round)
    patch(Worker, "_prefill", _note_prefill)


def _note_round(right: Function, batch: Any, rows: Rows, **named: Any) -> None:
    _Round.rows, _Round.requests = rows, batch.reqs
    right(batch, rows, **named)


def _note_prefill(right: Function, worker: Worker, *arguments: Any) -> Any:
    _Round.rows = None
    return right(worker, *arguments)


def in_place_of(owner: Any, name: str) -> Callable[[Function], Callable[[], Rehearsed]]:
    """The function becomes a draft method that breaks owner.name with it."""

    def decorate(wrong: Function) -> Callable[[], Rehearsed]:
        def load() -> Rehearsed:
            heal()
            patch(owner, name, wrong)
            return Rehearsed(learns=False)

        return load

    return decorate


def right() -> Rehearsed:
    heal()
    return Rehearsed(learns=True)


# Sampling. Arguments: probs [R, V], sampling parameters, positions [R], whether no row has top-p or top-k.


@in_place_of(Sampler, "_sample_from_probs")
def noise_of_the_root(right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
    """Noise is drawn once per round, and not once per position."""
    return right(sampler, probs, info, positions[_Round.root(len(positions))], simple)


@in_place_of(Sampler, "_sample_from_probs")
def noise_off_by_one(right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
    """Draft rows are sampled with the noise of the position after theirs."""
    return right(sampler, probs, info, positions + _Round.is_draft(len(positions)), simple)


@in_place_of(Sampler, "_sample_from_probs")
def noise_of_the_batch(right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
    """All requests of a batch share the seed of its first."""
    return right(sampler, probs, _with_seeds(info, info.sampling_seed[:1].expand(len(positions))), positions, simple)


@in_place_of(Sampler, "_sample_from_probs")
def noise_of_the_row(right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
    """Noise depends on where in the batch a row is."""
    return right(sampler, probs, _with_seeds(info, torch.arange(len(positions))), positions, simple)


def _with_seeds(info: Any, seeds_R: Tensor) -> Any:
    changed = copy.copy(info)
    changed.sampling_seed = seeds_R
    return changed


@in_place_of(Sampler, "_sample_from_probs")
def likeliest(right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
    """Temperature 0, whatever was asked."""
    return probs.argmax(dim=-1).to(torch.int32), None


@in_place_of(Sampler, "_sample_from_probs")
def likeliest_for_drafts(
    right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool
) -> Any:
    """A backend whose verification knows temperature 0 alone."""
    greedy = probs.argmax(dim=-1).to(torch.int32)
    tokens, masks = right(sampler, probs, info, positions, simple)
    return torch.where(_Round.is_draft(len(tokens)), greedy, tokens), masks


@in_place_of(Sampler, "_sample_from_probs")
def accepts_the_likely(right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
    """A draft token that is likely enough passes for the target's sample."""
    likely = probs.clone()
    tokens, masks = right(sampler, probs, info, positions, simple)
    for tree, first in zip(_Round.rows.trees, _Round.rows.starts, strict=False) if _Round.rows else ():
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            if likely[first + parent, token] > 0.05:
                tokens[first + parent] = token
    return tokens, masks


@in_place_of(spreading, "_spread_sampling")
def parameters_of_the_first(right: Function, info: Any, owner: Sequence[int], owner_R: Tensor) -> Any:
    """Temperature, top-p and top-k of one request serve all."""
    return _with_seeds(right(info, [0] * len(owner), torch.zeros_like(owner_R)), info.sampling_seed[owner_R])


# Verification. Arguments: what was drafted for a request, and its samples; the answer is the rows that are kept.


@in_place_of(verify_worker, "accepted_path")
def one_too_many(right: Function, tree: DraftTree, samples: Sequence[int]) -> list[int]:
    """The first rejected draft token passes as well."""
    path = right(tree, samples)
    return [*path, path[-1] + 1] if path[-1] + 1 < tree.num_rows else path


@in_place_of(verify_worker, "accepted_path")
def skips_a_mismatch(right: Function, tree: DraftTree, samples: Sequence[int]) -> list[int]:
    """Draft tokens after a rejected one are still compared."""
    return [0, *(r for r, (t, p) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1) if t == samples[p])]


@in_place_of(verify_worker, "accepted_path")
def accepts_all(right: Function, tree: DraftTree, samples: Sequence[int]) -> list[int]:
    """Drafts are not compared with anything."""
    return list(range(tree.num_rows))


# Emission. Arguments: the result, the rows' tokens, the rows, those kept, committed lengths [B].

Paths = Sequence[Sequence[int]]


@in_place_of(verify_worker, "_emit")
def emits_the_rejected(right: Function, result: Any, tokens: list[int], rows: Rows, paths: Paths, base: Tensor) -> Any:
    """In place of the token that the target has instead."""
    wrong = list(tokens)
    for tree, first, path in zip(rows.trees, rows.starts, paths, strict=False):
        if path[-1] < len(tree.tokens):
            wrong[first + path[-1]] = tree.tokens[path[-1]]
    return right(result, wrong, rows, paths, base)


@in_place_of(verify_worker, "_emit")
def bonus_of_the_row_before(
    right: Function, result: Any, tokens: list[int], rows: Rows, paths: Paths, base: Tensor
) -> Any:
    wrong = list(tokens)
    for first, path in zip(rows.starts, paths, strict=False):
        if len(path) > 1:
            wrong[first + path[-1]] = tokens[first + path[-2]]
    return right(result, wrong, rows, paths, base)


@in_place_of(verify_worker, "_emit")
def accepted_of_the_neighbour(
    right: Function, result: Any, tokens: list[int], rows: Rows, paths: Paths, base: Tensor
) -> Any:
    """Every request is told how many drafts of the request before it were right."""
    wrong = [
        range(min(len(path), tree.num_rows)) for tree, path in zip(rows.trees, [*paths[-1:], *paths[:-1]], strict=True)
    ]
    return right(result, tokens, rows, wrong, base)


@in_place_of(verify_worker, "_emit")
def tokens_of_the_neighbour(
    right: Function, result: Any, tokens: list[int], rows: Rows, paths: Paths, base: Tensor
) -> Any:
    """Two requests that emit equally many tokens get each other's."""
    result = right(result, tokens, rows, paths, base)
    tokens_BW = result.next_token_ids.view(len(paths), -1)
    for i in range(1, len(paths), 2):
        if len(paths[i - 1]) == len(paths[i]):
            tokens_BW[[i - 1, i]] = tokens_BW[[i, i - 1]]
    return result


# Windows, and where a request ends.


@in_place_of(Req, "update_finish_state")
def looks_at_the_last_token(right: Function, req: Req, emitted: int = 1) -> None:
    """An end of text inside a chain is not seen."""
    right(req, min(emitted, 1))


def overruns() -> Rehearsed:
    """Windows know no max_new_tokens, and what is too long stays."""

    def uncut(right: Function, req: Req, emitted: int = 1) -> None:
        right(req, emitted)
        if isinstance(req.finished_reason, FINISH_LENGTH):
            req.finished_len = len(req.output_ids)

    heal()
    patch(Worker, "_wanted", lambda right, running: right(running) + 1)
    patch(Req, "update_finish_state", uncut)
    return Rehearsed(learns=False)


# Log-probabilities. Arguments of a sampler's forward pass: logits [R, V], which it overwrites, sampling parameters, ...


@in_place_of(Sampler, "forward")
def logprobs_of_the_row_before(right: Function, sampler: Any, output: Any, *rest: Any) -> Tensor:
    tokens_R = right(sampler, output, *rest)
    output.next_token_logprobs = output.next_token_logprobs.roll(1)
    return tokens_R


@in_place_of(Sampler, "forward")
def logprobs_filled_in(right: Function, sampler: Any, output: Any, *rest: Any) -> Tensor:
    """Of draft rows there are none, so they are certain."""
    tokens_R = right(sampler, output, *rest)
    output.next_token_logprobs[_Round.is_draft(len(tokens_R))] = 0.0
    return tokens_R


@in_place_of(Sampler, "forward")
def logprobs_at_temperature_one(right: Function, sampler: Any, output: Any, *rest: Any) -> Tensor:
    logprobs_RV = torch.log_softmax(output.next_token_logits, dim=-1)
    tokens_R = right(sampler, output, *rest)
    output.next_token_logprobs = logprobs_RV[range(len(tokens_R)), tokens_R]
    return tokens_R


@in_place_of(Sampler, "forward")
def logprobs_after_top_p(right: Function, sampler: Any, output: Any, info: Any, *rest: Any) -> Tensor:
    """Renormalised over the tokens that top-p leaves."""
    left_RV = top_p_normalize_probs_torch((output.next_token_logits / info.temperatures).softmax(dim=-1), info.top_ps)
    tokens_R = right(sampler, output, info, *rest)
    renormalised_R = left_RV[range(len(tokens_R)), tokens_R].log()
    output.next_token_logprobs = torch.where(info.top_ps < 1.0, renormalised_R, output.next_token_logprobs)
    return tokens_R


# Keys and values. Arguments: the batch, to be spread, and the rows.


@in_place_of(verify_worker, "spread")
def slots_swapped(right: Function, batch: Any, rows: Rows, **named: Any) -> None:
    """The keys of the first two draft tokens are written where the other's belong."""
    right(batch, rows, **named)
    for tree, first in zip(rows.trees, rows.starts, strict=False):
        if tree.num_rows > 2:
            batch.out_cache_loc[[first + 1, first + 2]] = batch.out_cache_loc[[first + 2, first + 1]]


@in_place_of(verify_worker, "spread")
def keys_of_the_neighbour(right: Function, batch: Any, rows: Rows, **named: Any) -> None:
    """Draft rows read the text of another request."""
    right(batch, rows, **named)
    root_R = _Round.root(rows.total)
    other_R = batch.req_pool_indices[(root_R - 1) % rows.total]
    batch.req_pool_indices = torch.where(_Round.is_draft(rows.total), other_R, batch.req_pool_indices)


@in_place_of(verify_worker, "spread")
def drafts_unseen(right: Function, batch: Any, rows: Rows, **named: Any) -> None:
    """Draft rows read committed tokens alone."""
    right(batch, rows, **named)
    batch.seq_lens = batch.seq_lens[_Round.root(rows.total)]
    batch.seq_lens_cpu = batch.seq_lens.cpu()


def keeps_keys_of_the_rejected() -> Rehearsed:
    """The token that came in place of a rejected one is read through the keys of the rejected one."""
    rejected: set[str] = set()

    def emit(right: Function, result: Any, tokens: list[int], rows: Rows, paths: Paths, base: Tensor) -> Any:
        for req, tree, path in zip(_Round.requests, rows.trees, paths, strict=True):
            (rejected.add if len(path) < tree.num_rows else rejected.discard)(req.rid)
        return right(result, tokens, rows, paths, base)

    def spread(right: Function, batch: Any, rows: Rows, **named: Any) -> None:
        stale = [first for first, req in zip(rows.starts, batch.reqs, strict=False) if req.rid in rejected]
        right(batch, rows, **named)
        batch.out_cache_loc[stale] = 0  # SGLang's slot for what nobody reads

    heal()
    patch(verify_worker, "_emit", emit)
    patch(verify_worker, "spread", spread)
    return Rehearsed(learns=False)


@in_place_of(verify_worker, "_emit")
def counts_a_rejected(right: Function, result: Any, tokens: list[int], rows: Rows, paths: Paths, base: Tensor) -> Any:
    """After a rejection a request's length is one too large."""
    result = right(result, tokens, rows, paths, base)
    rejected = [len(path) < tree.num_rows for path, tree in zip(paths, rows.trees, strict=True)]
    result.new_seq_lens = result.new_seq_lens + torch.tensor(rejected)
    return result


@in_place_of(Req, "owned_kv_len")
def caches_too_much(right: Function, req: Req) -> int:
    """The prefix cache also gets the last token, whose keys nobody computed: where they belong lie a rejected one's."""
    return min(right(req) + 1, req.kv.kv_allocated_len)


# Harmless: slower, and not wrong.


@in_place_of(verify_worker, "accepted_path")
def without_bonus(right: Function, tree: DraftTree, samples: Sequence[int]) -> list[int]:
    path = right(tree, samples)
    return path[:-1] or path


@in_place_of(Worker, "_drafts")
def drafts_of_the_neighbour(right: Function, worker: Any, reqs: Sequence[Req], running: Any) -> list[DraftTree]:
    """Drafts are made for one request and verified for the next."""
    trees = right(worker, reqs, running)
    return [
        chain(tree.tokens[: worker._wanted(request) - 1])
        for request, tree in zip(running, [*trees[-1:], *trees[:-1]], strict=True)
    ]


@in_place_of(Worker, "_wanted")
def windows_without_end(right: Function, running: Any) -> int:
    """Windows know no max_new_tokens; SGLang cuts what is too long."""
    return right(running) + 100
