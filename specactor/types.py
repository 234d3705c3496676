"""Core types on the host side, without tensors. Lengths count tokens; times are seconds; log-probabilities are natural
logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    index: int  # position in its data set; stable across runs, part of a request's seed
    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    verifier: str  # name under which ``specactor.data.verifiers`` finds the scoring function
    metadata: dict[str, object]  # for the verifier: a reasoning-gym entry, or columns of a file


@dataclass(frozen=True, kw_only=True)
class DrawnProblem(Problem):
    epoch: int  # in which it was drawn, from 0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The defaults leave the distribution whole. Biases apply first, then the temperature, then top-k and top-p
    together."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    stop: tuple[str, ...] = ()  # texts that end a response; the token that completes one is its last
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # also of `stop_token_ids`


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled at one policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Begun:
    """An unfinished response's first tokens, of any engines and steps."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # as of `Trajectory`: each is of the policy that the token was sampled from
    spans: tuple[VersionSpan, ...]
    routed_experts: bytes = b""  # as of `Trajectory`


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Equal requests at equal weights give equal tokens, whatever else runs."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # 0 <= seed < 2**31; keys the sampling noise together with the position
    group_id: int  # requests of one group answer the same prompt
    is_drafted: bool = True  # whether drafters may draft for it, where the engine has some
    begun: Begun | None = None  # the response so far: it goes on from there, at the same positions of the noise
    num_earlier: int = 0  # tokens at the end of the prompt that are earlier turns of a conversation; drafters' text


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One response; of a conversation all turns and its environment's. Values are tuples and bytes while it is
    generated, then arrays, here or elsewhere, and bytes for the mask (`specactor.samples`)."""

    request_id: str
    group_id: int
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]  # under the policy at the sampling temperature; 0 where `loss_mask` is False
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    seed: int = 0  # of its request
    routed_experts: bytes | Sequence[int] = b""
    """[tokens - 1, layers, experts per token] in C order, bytes as int16, little endian: the experts of each token of
    prompt and response but the last, as the pass chose them that the engine sampled from. Empty unless
    ``train.routing_replay = r3`` or ``enable_return_routed_experts`` asks for it."""
    loss_mask: bytes | tuple[bool, ...] = ()  # False, or 0: the environment said it; empty: the policy sampled all
    reward: float | None = None  # an environment's or a verifier's; None: still to be scored
    failure: str = ""  # why there is no reward; empty: nothing failed
    environment_s: float = 0.0  # over all turns; 0 without an environment
    branches: tuple[Trajectory, ...] = ()  # further sequences of an agent's session, which share its reward

    @property
    def longest(self) -> int:
        """Return how many tokens it has, of an agent's session its longest sequence."""
        return max(len(t.token_ids) for t in (self, *self.branches))

    @property
    def num_sampled(self) -> int:
        """Return how many tokens the policy sampled."""
        own = sum(self.loss_mask) if self.loss_mask else len(self.token_ids)
        return own + sum(branch.num_sampled for branch in self.branches)

    @property
    def first_turn(self) -> Trajectory:
        """Return it without what an environment said, and what came after that."""
        end = self.first_turn_len
        return replace(self, token_ids=self.token_ids[:end], logprobs=self.logprobs[:end]) if self.loss_mask else self

    @property
    def first_turn_len(self) -> int:
        return (*self.loss_mask, False).index(False) if self.loss_mask else len(self.token_ids)

    @property
    def num_turns(self) -> int:
        mask = bytes((False, *(self.loss_mask or (True,))))  # millions of tokens are counted without a step for each
        return mask.count(b"\0\1") + sum(branch.num_turns for branch in self.branches)


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    problem: Problem
    trajectories: tuple[Trajectory, ...]
    scores: tuple[float, ...]  # the verifier's, in [0, 1]; an environment's may be any number
    rewards: tuple[float, ...]  # scores after shaping: what is learned from


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """The loss is on the response, or its mask."""

    token_ids: Sequence[int]
    prompt_len: int
    advantage: float = 0.0  # of all response tokens; a critic makes one for each instead
    reward: float = 0.0
    rollout_logprobs: Sequence[float] = ()  # the engine's, one per response token; empty in supervised training
    num_stale: int = 0  # response tokens, the first ones, that older policies sampled
    group_id: int = 0
    is_branch: bool = False  # a further sequence of the response that the sequence before it is of
    routed_experts: bytes | Sequence[int] = b""  # as of `Trajectory`; empty: the trainer's routers are free
    loss_mask: bytes | tuple[bool, ...] = ()  # of each response token, whether it is learned from; empty: all are
    seed: int = 0
    num_seeded: int = 0  # response tokens, the first ones, that are compared with what the noise of the seed picks

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_learned(self) -> int:
        return sum(self.loss_mask) if self.loss_mask else self.response_len
