"""The section `rollout` of a recipe: how many responses, how they are sampled, and where. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specactor.config.engine import EngineConfig
from specactor.config.rules import rules_of
from specactor.config.speculation import SpeculationConfig


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Responses of one RL step."""

    prompts_per_step: int = 16
    """Prompts drawn per RL step."""
    group_size: int = 8
    """Responses per prompt; advantages are relative to the group."""
    temperature: float = 1.0
    """Logits are divided by it; 1 samples from the policy itself."""
    top_p: float = 1.0
    """Sample from the most likely tokens that hold this much probability; 1: from all."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1: from all."""
    min_p: float = 0.0
    """Sample from tokens at least this many times as likely as the likeliest; 0: from all."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for every time that the response has it. Penalties switch drafting off."""
    presence_penalty: float = 0.0
    """Taken off a token's logit once the response has it."""
    repetition_penalty: float = 1.0
    """Divides a token's positive logit, multiplies a negative one, once the response has it."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the token that completes one is its last."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own."""
    max_new_tokens: int = 128
    """Longest response in tokens; of a conversation with an environment, all turns and what is said in between."""
    environment_timeout_s: float = 60.0
    """Longest that an environment or a verifier may take for one answer; then its response has failed."""
    noise_visits: int = 1
    """Visits of a problem, one per epoch of its set, in which a sample keeps its noise; 1: none does. With more, the
    drafter ``previous`` is right more often, and samples depend on noise that the weights have learned from."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    audit: Literal["off", "warn", "stop"] = "off"
    """Whether a few responses of a step are begun again by another engine without drafts, for a hundredth of the time,
    and what a difference does: a warning with the command that runs the step again, or the end of the run."""
    oversample: float = 1.0
    """Work at this many times prompts_per_step groups, and stop when prompts_per_step of them are complete; 1: off.
    With algorithm.dynamic_sampling: when that many of them, in the order of the data, teach something.
    Dropping the others favours prompts with short responses, unless `partial` keeps them. Which groups are complete
    first depends on speed, so a step is not the same again after a resume."""
    partial: bool = False
    """With oversample: the responses of groups that are not complete go on in the next step, at the next policy
    version. Needs algorithm.correction: each token keeps the log-probability under which it was sampled."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "rollout")
        rule("prompts_per_step", self.prompts_per_step >= 1, ">= 1", "Ask for at least one prompt.")
        rule("group_size", self.group_size >= 1, ">= 1", "Ask for at least one response.")
        rule(
            "temperature",
            self.temperature > 0,
            "> 0",
            "Reinforcement learning needs samples; 1.0 is the policy itself.",
        )
        rule("top_p", 0 < self.top_p <= 1, "in (0, 1]", "Use 1.0 to keep the whole distribution.")
        rule("top_k", self.top_k == -1 or self.top_k >= 1, "-1 or >= 1", "Use -1 to keep the whole distribution.")
        rule("min_p", 0 <= self.min_p <= 1, "in [0, 1]", "Use 0 to keep all tokens.")
        for name in ("frequency_penalty", "presence_penalty"):
            rule(name, -2 <= getattr(self, name) <= 2, "in [-2, 2]", "Use 0 for no penalty.")
        rule("repetition_penalty", 0 < self.repetition_penalty <= 2, "in (0, 2]", "Use 1 for no penalty.")
        rule(
            "oversample",
            1 <= self.oversample <= 10,
            "in [1, 10]",
            "Use 1 for all groups that are asked for, or for example 1.25.",
        )
        rule(
            "partial",
            not self.partial or self.oversample > 1,
            "False with rollout.oversample = 1",
            "Set rollout.oversample to more than 1: else a step waits for all of its responses, and nothing is left.",
        )
        rule("stop", all(self.stop), "texts that are not empty", "Leave the empty one out.")
        rule(
            "stop_token_ids", min(self.stop_token_ids, default=0) >= 0, ">= 0 each", "Use ids of the model's tokenizer."
        )
        rule("noise_visits", self.noise_visits >= 1, ">= 1", "Use 1 for fresh noise at every visit.")
        rule("max_new_tokens", self.max_new_tokens >= 1, ">= 1", "Ask for at least one token.")
        rule(
            "environment_timeout_s",
            self.environment_timeout_s > 0,
            "> 0",
            "Give environments time to answer.",
        )

    @property
    def has_penalties(self) -> bool:
        """Return whether a token's distribution depends on how often tokens were emitted."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
