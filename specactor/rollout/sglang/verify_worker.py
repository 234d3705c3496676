"""The speculative algorithm SPECACTOR of an SGLang engine.

A round verifies all drafts in one forward pass. SGLang's sampler draws each row's token with the noise of (request
seed, position), and what equals it is kept: tokens and log-probabilities are those of plain decoding.

Rank 0 decides, and drafts from text; a draft model runs on all ranks, and rank 0's drafts are verified.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_memory, get_model, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from specactor.config import SpeculationConfig
from specactor.config.speculation import MTP
from specactor.errors import EngineError
from specactor.parallel.collective import all_come
from specactor.rollout.sglang import draft_runner, head_runner, overlap, responses
from specactor.rollout.sglang.gpu import on_device, to_host
from specactor.rollout.sglang.model_drafter import ModelDrafter
from specactor.rollout.sglang.verify_batch import (
    Branches,
    Rows,
    install_plain_rounds,
    install_room,
    last_tokens,
    num_cached,
    spread,
)
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.probing import SOON
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.speculation.verification import NOTHING, DraftTree, accepted_path, chain
from specactor.trace import RoundTrace

NAME = "SPECACTOR"
_ROOT = [0]  # the rows that are kept of a request without drafts


class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
    """What SGLang asks of a speculative algorithm."""

    create_future_map = SpeculativeAlgorithm.create_future_map

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def handle_server_args(self, arguments: Any) -> None:
        arguments.disable_overlap_schedule = True  # of its own kind; ours is in `overlap`
        arguments.enable_mixed_chunk = False
        arguments.speculative_eagle_topk = 1
        arguments.speculative_num_steps = arguments.speculative_num_draft_tokens - 1


class _Carried(SpecInput):  # type: ignore[misc]
    """What SGLang carries between rounds: nothing, since requests hold all state."""

    def __init__(self) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)

    def filter_batch(self, *_: Any, **__: Any) -> None:
        pass

    def merge_batch(self, _: Any) -> None:
        pass


@dataclass(slots=True)
class _Running:
    """A request in the decode batch, and its view for drafters."""

    req: Any
    sequence: DraftSequence
    num_begun: int  # tokens that the request brought along of its conversation
    may_draft: bool  # whether drafts can be verified for it
    ends: frozenset[int] | None  # tokens that end it; None: it may end otherwise, too

    def follow(self) -> None:
        """Bring the drafters' view up to date. It is ahead of SGLang's request while a round is not handed out."""
        output_ids = self.sequence.output_ids
        output_ids.extend(self.req.output_ids[len(output_ids) - self.num_begun :])

    @property
    def cached(self) -> int:
        """Return how many tokens have keys: all committed ones but the last."""
        return len(self.sequence.prompt_ids) + len(self.sequence.output_ids) - 1


class Worker(BaseSpecWorker):  # type: ignore[misc]
    """Runs every batch of one engine rank."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, *, draft_models: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_workers: dict[str, Any] = {}  # SGLang's workers of draft models, by drafter
        for name, folder in draft_models.items():
            head_runner.refuse_unfit(Path(folder), hierarchical_cache=get_memory().enable_hierarchical_cache)
            self._draft_workers[name] = draft_runner.load(
                folder, server_args, gpu_id=gpu_id, nccl_port=nccl_port, target_worker=target_worker
            )
        # The first: what SGLang's base class does of itself. It is also what its figures and host caches are of.
        self._draft_worker = next(iter(self._draft_workers.values()), None)
        self._further = [*self._draft_workers.values()][1:]
        self._target_states: dict[str, head_runner.TargetStates] = {}
        """What an EAGLE-3 head or MTP layer reads, by drafter, once there are pools."""
        self._max_rows = int(get_spec().speculative_num_draft_tokens)
        self._vocab_size = int(target_worker.model_runner.model_config.vocab_size)
        self._ended: float | None = None  # when the round before ended, if this batch follows it at once
        self._running: dict[str, _Running] = {}
        self._ahead: Sequence[tuple[_Running, int]] = ()
        """Requests of the last round with drafts, and how many tokens each emitted."""
        self._plain_left = 0  # rounds from now on that are plain; the same on all ranks
        self._failures = 0  # of draft models, on all ranks
        self._plain_for = 0  # requests of the round that promised them
        self.meanwhile: Callable[[], None] = lambda: None  # called once a round with drafts is launched
        # On a CPU a round is over when it was launched, and there is nothing to hide.
        self.overlaps = os.environ.get(overlap.VARIABLE) != "0" and server_args.device != "cpu"
        self.rounds = RoundTrace()
        self.speculator: Speculator | None = None  # None: plain decoding

    @property
    def max_window(self) -> int:
        return self._max_rows - 1

    def use(self, speculator: Speculator | None) -> None:
        """Draft like this from the next round on."""
        self._attach(speculator)
        if speculator is not None:
            speculator.drafter_set.vocab_size = self._vocab_size
        if self.speculator is not None:
            self.speculator.drafter_set.stop()
        if speculator is not None:
            speculator.recorder = self.rounds.recorder
        self._running.clear()
        self._plain_left = 0
        self.speculator = speculator

    def _attach(self, speculator: Speculator | None) -> None:
        for drafter in speculator.drafters.values() if speculator is not None else ():
            if isinstance(drafter, ModelDrafter):
                if (runner := self.draft_runners.get(drafter.name)) is None:
                    raise EngineError(
                        f"rollout.speculation.drafters: got {drafter.name}, but this engine was started without a "
                        "draft model for it. Start it with rollout.speculation.draft_model, and with this drafter."
                    )
                drafter.attach(runner, lambda rid: self._running[rid].req, self._target_states.get(drafter.name))

    def alloc_memory_pool(self, **pools: Any) -> None:
        super().alloc_memory_pool(**pools)
        for worker in self._further:
            worker.alloc_memory_pool(**pools)
        self._pool, slots = self._target_worker.get_memory_pool()
        self._branches = Branches(self._pool, page_size=slots.page_size)
        for name, draft in self.draft_runners.items():
            if draft_runner.num_features(draft.model_config):
                self._target_states[name] = head_runner.prepare(self._target_worker.model_runner, draft)
                self._attach(self.speculator)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        for worker in self._further:
            worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        for worker in self._draft_workers.values():
            worker.init_cuda_graphs()

    @property
    def draft_runners(self) -> dict[str, Any]:
        """Return SGLang's runners of draft models, by drafter."""
        return {name: worker.model_runner for name, worker in self._draft_workers.items()}

    def _draft_model_runners(self) -> tuple[Any, ...]:
        return tuple(self.draft_runners.values())

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return []  # the draft model is not the policy, and never gets the policy's weights

    def clear_cache_pool(self) -> None:
        """Forget all requests."""
        for rid in list(self._running):
            self._close(rid)
        self._plain_left = 0

    def policy_changed(self) -> None:
        """Trust less what was seen: the policy has other weights."""
        if self.speculator is not None:
            self.speculator.policy_changed()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self.speculator is not None and rid in self._running:
            self._close(rid)

    def prepare_for_kv_cache_release(self, req: Any) -> None:
        # SGLang keeps the keys of a request that has ended; those of a round that is under way are not among them.
        req.kv.kv_committed_len = min(req.kv.kv_committed_len, num_cached(req))

    def decodes_plainly(self) -> bool:
        """Return whether the next round of decoding is a plain one."""
        return self.speculator is None or self._plain_left > 0

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run one batch of the scheduler, which undoes what is changed in `batch`."""
        if not batch.forward_mode.is_decode():
            return self._prefill(batch, pp_proxy_tensors)
        if batch.spec_algorithm.is_none():
            return self._plain_round(batch, pp_proxy_tensors)
        base, reqs = batch.seq_lens, batch.reqs
        entered = time.perf_counter()
        began = self._ended or entered  # what SGLang does between two rounds belongs to the second
        running = self._follow(reqs)
        trees = self._drafts(reqs, running)
        decided = time.perf_counter()
        rows = Rows.of(trees)
        batch.spec_info = None
        spread(
            batch,
            rows,
            last_tokens=[r.sequence.output_ids[-1] for r in running],
            cached=[r.cached for r in running],
            req_to_token=self._pool.req_to_token,
        )
        try:
            if rows.drafted:
                self._branches.place(batch, rows)
            result = self._target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
            batch.reqs = reqs  # SGLang counts those that run
            samples = self._samples(result)
        finally:
            self._branches.give_back()
        paths = self._accepted(running, rows, samples)
        self._ended = time.perf_counter()
        if get_parallel().tp_rank == 0:
            assert self.speculator is not None
            self.speculator.learn(
                [r.sequence for r in running],
                [
                    [tree.tokens[row - 1] for row in path[1:]] if path is not _ROOT else []
                    for tree, path in zip(trees, paths, strict=True)
                ],
                round_s=self._ended - began,
            )
        for r, path, start in zip(running, paths, rows.starts, strict=False):
            r.sequence.output_ids.extend([samples[start + row] for row in path])
        self._ahead = [*zip(running, map(len, paths), strict=True)]
        emitted = _emit(result, samples, rows, paths, base)
        times = (entered, decided, self._ended, time.perf_counter())
        self.rounds.verified(*times, requests=len(reqs), rows=rows.total, emitted=sum(map(len, paths)))
        return emitted

    def _samples(self, result: GenerationBatchResult) -> list[int]:
        """Return the rows' tokens once the device has them; SGLang gets those of the last round meanwhile."""
        output = result.logits_output
        if output.next_token_logprobs is not None:
            output.next_token_logprobs = to_host(output.next_token_logprobs)
        self.meanwhile()
        samples: list[int] = result.next_token_ids.tolist()  # the copy is over then, too
        return samples

    def _accepted(self, running: Sequence[_Running], rows: Rows, samples: Sequence[int]) -> list[list[int]]:
        """Return the kept rows per request; their slots are brought to where its next tokens look for them."""
        paths: list[list[int]] = [_ROOT] * len(running)
        for i, tree in enumerate(rows.trees):
            if tree.tokens:
                paths[i] = accepted_path(tree, samples[rows.starts[i] : rows.starts[i + 1]])
                if not running[i].req.finished():  # by a time limit, when the last round was handed out
                    self._branches.keep(running[i].req, running[i].cached, tree, paths[i])
        return paths

    def may_end(self) -> bool:
        """Return whether the last round, which SGLang was not told of and may have had drafts, may have ended any
        request."""
        return any(
            running.ends is None
            or running.req.to_finish
            or self._wanted(running) <= 0
            or not running.ends.isdisjoint(running.sequence.output_ids[-num_new:])
            for running, num_new in self._ahead
        )

    def _plain_round(self, batch: Any, pp_proxy_tensors: Any) -> GenerationBatchResult:
        self._ended = self._ended or time.perf_counter()
        self._attend(batch.reqs)
        self._plain_left = max(0, self._plain_left - 1)  # none was promised where drafts have no room
        if batch.input_ids is None:  # they are on the device where the round before is under way
            batch.input_ids = last_tokens(batch)
        return self._target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)

    def was_interrupted(self) -> None:
        """What comes next does not follow the last round at once."""
        self._ended = None

    def end_plain_round(self, requests: int) -> None:
        """Note that a plain round's tokens are on the host; the next may have been launched."""
        assert self._ended is not None
        began, self._ended = self._ended, time.perf_counter()
        self.rounds.plain(began, self._ended)
        if self.speculator is not None and get_parallel().tp_rank == 0:
            self.speculator.on_plain_round(requests, round_s=self._ended - began)

    def _prefill(self, batch: Any, pp_proxy_tensors: Any) -> GenerationBatchResult:
        self._ended = None
        self.rounds.end_stretch()
        result = self._target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
        result.accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32, device=batch.seq_lens.device)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = _Carried()
        result.speculative_num_draft_tokens = self._max_rows
        return result

    def _follow(self, reqs: Sequence[Any]) -> list[_Running]:
        """Bring the drafters' view of the running requests up to date."""
        self._attend(reqs)
        running = [self._running[req.rid] for req in reqs]
        for request in running:
            request.follow()
        return running

    def _attend(self, reqs: Sequence[Any]) -> None:
        """Open and close requests, so that those which run are open."""
        if self.speculator is None:
            return
        for req in reqs:
            if req.rid not in self._running:
                self._open(req)
        if len(self._running) > len(reqs):
            present = {req.rid for req in reqs}
            for rid in [rid for rid in self._running if rid not in present]:
                self._close(rid)  # retracted or aborted: if it comes back, it is opened again
        if self.speculator.planner.may_stop and 2 * len(reqs) <= self._plain_for:
            self._plain_left, self._plain_for = min(self._plain_left, SOON), len(reqs)

    def _open(self, req: Any) -> None:
        assert self.speculator is not None
        sampling, begun = req.sampling_params, list(responses.conversation_of(req))
        sequence = DraftSequence(
            request_id=req.rid,
            prompt_ids=tuple(req.origin_input_ids)[: len(req.origin_input_ids) - len(begun)],
            output_ids=begun,
            seed=sampling.sampling_seed or 0,
            temperature=0.0 if draft_runner.is_greedy(sampling) else sampling.temperature,
        )
        may_draft = responses.is_drafted(req)
        self._running[req.rid] = _Running(req, sequence, len(begun), may_draft, responses.ends_of(req))
        self._plain_left = min(self._plain_left, SOON)
        self.speculator.open(sequence)

    def _close(self, rid: str) -> None:
        assert self.speculator is not None
        running = self._running.pop(rid)
        running.follow()
        self.speculator.close(running.sequence)

    def _drafts(self, reqs: Sequence[Any], running: Sequence[_Running]) -> list[DraftTree]:
        """Return what to verify for each request, the same on all ranks."""
        assert self.speculator is not None
        sequences = [r.sequence for r in running]
        trees: list[DraftTree] = []
        who, windows, plain_rounds = -1, [0] * len(reqs), 0
        if get_parallel().tp_rank == 0:
            decision = self.speculator.decide(sequences, self._limits(running), max_branches=self._branches.room())
            trees, plain_rounds = decision.trees, self.speculator.plain_rounds_ahead
            if decision.together:
                who, windows = list(self.speculator.drafters).index(decision.drafter), decision.to_draft
        if get_parallel().tp_size > 1:
            [who, self._plain_left], windows, *lists = self._agreed(
                [[who + 1, plain_rounds], windows, *map(_to_list, trees or [NOTHING] * len(reqs))]
            )
            who, trees = who - 1, [_to_tree(values) for values in lists]
        else:
            self._plain_left = plain_rounds
        self._plain_for = len(reqs)
        if who >= 0:
            name, drafter_set = list(self.speculator.drafters)[who], self.speculator.drafter_set
            failures = drafter_set.num_failures(name)
            drafts = self.speculator.draft(name, sequences, windows)
            if get_parallel().tp_size > 1:
                if drafter_set.num_failures(name) > failures:
                    self._fail_together(name)
                drafts = self._agreed(drafts)
            trees = [chain(new) if w else tree for w, new, tree in zip(windows, drafts, trees, strict=True)]
        return trees

    def _fail_together(self, drafter: str) -> None:
        """Raise EngineError, of which the engine dies, unless the draft model failed on all ranks: the others wait for
        this one in the pass that it left, for ever."""
        self._failures += 1
        store = dist.distributed_c10d._get_default_store()
        if not all_come(store, f"specactor/failed/{self._failures}", get_parallel().tp_size):
            raise EngineError(f"drafter {drafter} failed on some of the engine's ranks, and not on the others")

    def _limits(self, running: Sequence[_Running]) -> list[int]:
        most, wanted = self._max_rows - 1, self._wanted
        return [min(most, wanted(request) - 1) if request.may_draft else 0 for request in running]

    @staticmethod
    def _wanted(running: _Running) -> int:
        """Return how many tokens it may still emit."""
        emitted = len(running.sequence.output_ids) - running.num_begun
        return int(running.req.sampling_params.max_new_tokens) - emitted

    def _agreed(self, lists: list[list[int]]) -> list[list[int]]:
        """Return rank 0's lists, as many as each rank has: trees, and at most two numbers for each of them."""
        group, count = get_parallel().tp_group, len(lists)
        packed = np.zeros(count * (2 * self._max_rows + 3), dtype=np.int32)  # their lengths, then their numbers
        packed[:count] = [len(values) for values in lists]
        packed[count : count + packed[:count].sum()] = [value for values in lists for value in values]
        dist.broadcast(torch.from_numpy(packed), src=group.ranks[0], group=group.cpu_group)
        ends = accumulate(packed[:count].tolist(), initial=count)
        numbers = packed.tolist()
        return [numbers[begin:end] for begin, end in pairwise(ends)]


def _emit(
    result: GenerationBatchResult,
    samples: Sequence[int],
    rows: Rows,
    paths: Sequence[Sequence[int]],
    base: torch.Tensor,
) -> GenerationBatchResult:
    """Make the round SGLang's result, tokens padded to the longest; what it hands out is on the host already."""
    num_emitted = np.array([len(path) for path in paths])
    width = int(num_emitted.max())
    kept_BW = np.minimum(np.arange(width), num_emitted[:, None] - 1)
    for i, path in enumerate(paths):
        if path[-1] >= len(path):
            kept_BW[i] = [*path, *[path[-1]] * (width - len(path))]
    kept = torch.from_numpy((np.array(rows.starts[:-1])[:, None] + kept_BW).ravel())
    output = result.logits_output
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs[kept].view(len(paths), width)
    result.next_token_ids = torch.tensor(samples)[kept]
    result.accept_lens = torch.from_numpy(num_emitted)
    result.new_seq_lens = base + on_device(num_emitted, base.device)
    result.next_draft_input = _Carried()
    result.speculative_output_stride = width
    return result


def _to_list(tree: DraftTree) -> list[int]:
    return [*tree.tokens, *tree.parents]


def _to_tree(values: Sequence[int]) -> DraftTree:
    half = len(values) // 2
    return DraftTree(tuple(values[:half]), tuple(values[half:])) if half else NOTHING


def register(
    starting: Callable[[], SpeculationConfig], make_speculator: Callable[[SpeculationConfig], Speculator | None]
) -> None:
    """Make the algorithm known to SGLang; the functions give each starting worker its configuration and speculator."""

    class StartedWorker(Worker):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            config = starting()
            mtp = {MTP: get_model().model_path} if config.uses_mtp else {}
            super().__init__(*arguments, draft_models=config.in_engines | mtp, **named)
            self.use(make_speculator(config))

    def worker_of(scheduler: Any) -> Worker | None:
        return scheduler.draft_worker if isinstance(scheduler.draft_worker, Worker) else None

    def decodes_plainly(scheduler: Any) -> bool:
        worker = worker_of(scheduler)
        return worker is not None and worker.decodes_plainly()

    install_room()
    install_plain_rounds(decodes_plainly)
    overlap.install(worker_of)
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(lambda _: StartedWorker)
