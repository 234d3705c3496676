"""The drafters `model`, `model:2`, ..: a dense model or an EAGLE-3 head on every engine rank; `mtp`: the policy's MTP
layer.

Invariants: those of `draft_runner`; keys lie in its own buffers, at slots that are committed or that the target writes
in the same round; ranks that are asked alike draft alike, so new weights, which reach it alone, see every text from its
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from specactor.errors import EngineError
from specactor.rollout.sglang.draft_runner import DraftRunner, DraftText, SequenceCache
from specactor.rollout.sglang.head_runner import HeadRunner, MtpRunner, TargetStates
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.weights_sync import draft_push
from specactor.weights_sync.messages import Answer, DraftWeights


class ModelDrafter(Drafter):
    """A draft model in the engine. `attach` it to an engine rank before it is asked."""

    drafts_first = False
    runner_type = DraftRunner
    head_runner_type = HeadRunner

    def __init__(self, name: str = "model") -> None:
        self.name = name
        self._caches: dict[str, SequenceCache] = {}
        self._version = 0

    def attach(self, runner: Any, find: Callable[[str], Any], states: TargetStates | None = None) -> None:
        """Args: runner: SGLang's. find: returns SGLang's request of an id."""
        self._runner = self.runner_type(runner) if states is None else self.head_runner_type(runner, states)
        self._find = find

    @property
    def version(self) -> int:
        return self._version

    def renewed(self, version: int) -> None:
        """Draft with new weights, which see texts from their beginning."""
        self._version = version
        self.policy_changed()

    def open(self, sequence: DraftSequence) -> None:
        self._caches[sequence.request_id] = SequenceCache()

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        length = len(sequence.prompt_ids) + len(sequence.output_ids)
        self._caches[sequence.request_id].grow(length - len(tokens), tokens)

    def close(self, sequence: DraftSequence) -> None:
        del self._caches[sequence.request_id]

    def policy_changed(self) -> None:
        for cache in self._caches.values():
            cache.cut(0)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        texts = {i: self._text(sequences[i], window) for i, window in enumerate(windows) if window}
        behind = sorted(
            (i for i, text in texts.items() if self._runner.is_behind(text)), key=lambda i: texts[i].num_unseen
        )
        self.read_up = behind
        if behind:  # one pass per round: nobody waits until all have been read
            self._runner.prefill([texts[i] for i in behind])
        ready = [i for i, text in texts.items() if not self._runner.is_behind(text)]
        drafts = dict(zip(ready, self._runner.draft([texts[i] for i in ready]), strict=True))
        return [drafts.get(i, []) for i in range(len(windows))]

    def _text(self, sequence: DraftSequence, window: int) -> DraftText:
        return DraftText(
            prompt_ids=sequence.prompt_ids,
            output_ids=sequence.output_ids,
            seed=sequence.seed,
            temperature=sequence.temperature,
            window=window,
            row=self._find(sequence.request_id).kv.req_pool_idx,
            cache=self._caches[sequence.request_id],
        )


class MtpDrafter(ModelDrafter):
    head_runner_type = MtpRunner

    def __init__(self) -> None:
        super().__init__("mtp")


def check_weights(rank: Any, payload: bytes) -> bytes:
    """Answer whether the bytes are those of their source."""
    _model(rank)
    return _reply(draft_push.check(msgspec.msgpack.decode(payload, type=DraftWeights)))


def load_weights(rank: Any, payload: bytes) -> bytes:
    """Check and load; the answer names a problem where old weights stay. Where some ranks fail, drafts are of two
    versions until the next push, which costs speed."""
    weights = msgspec.msgpack.decode(payload, type=DraftWeights)
    model, speculator = _model(rank), rank.draft_worker.speculator
    problem = "it was not loaded"
    try:
        problem = draft_push.load(model, weights)
    finally:
        for drafter in speculator.drafters.values() if speculator is not None else ():
            # A rank without them keeps its version, so that they are news when brought again. Until then drafts are of
            # two versions, and bad, which costs speed alone.
            if isinstance(drafter, ModelDrafter) and drafter.name == "model":
                drafter.renewed(drafter.version if problem else weights.draft_version)
    return _reply(problem)


def _reply(problem: str) -> bytes:
    return msgspec.msgpack.encode(Answer(problem=problem))


def _model(rank: Any) -> torch.nn.Module:
    worker = rank.draft_worker
    # the first draft model is the only one that gets new weights
    runner = worker.draft_runners.get("model") if worker is not None else None
    if runner is None:
        raise EngineError(
            "draft model: got new weights, but this engine was started without one. Start it with "
            "rollout.speculation.draft_model, and model among the drafters."
        )
    model: torch.nn.Module = runner.model
    return model
