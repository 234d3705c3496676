"""The section `rollout.speculation` of a recipe: who drafts, where, and how far. PURE.

Draft methods of SGLang are refused by name; any other name stands for a drafter of `specactor.rollout.speculation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specactor.config.engine import INEXACT
from specactor.config.rules import require, rules_of

MAX_WINDOW = 16  # draft tokens per request and round
DRAFTERS = "suffix, model, decoupled, or package.module:Class"  # what `rollout.speculation.drafters` may name
WARM_UP, WARM_UP_HEAD = "warm-up", "warm-up-head"
MADE_BY_WARM_UP = (WARM_UP, WARM_UP_HEAD)  # as `rollout.speculation.draft_model`: what the warm-up makes
EAGLE3_HEAD = "LlamaForCausalLMEagle3"  # architecture in the config.json of heads, also published ones
SGLANG_DRAFTERS = ("eagle", "eagle3", "mtp", "nextn", "standalone")  # SGLang's, refused by name


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Drafting ahead of the policy. It changes the speed of a rollout and never a token."""

    mode: Literal["off", "coupled", "decoupled", "auto"] = "off"
    """off: plain decoding; coupled: draft, then verify, on the engine's own devices; decoupled: verify what processes
    of their own (parallel.drafters) have drafted ahead; auto: drafters, or off, whichever is predicted to be
    faster, request by request and round by round."""
    drafters: tuple[str, ...] = ("suffix",)
    """Draft methods: suffix, model, decoupled, or the import path of a class, ``package.module:Name``. Mode decoupled
    puts decoupled before them where it is not named."""
    window: int | None = None
    """Draft tokens per request and round; None: chosen per request from its past acceptance and measured costs.
    With a number there is nothing to choose, also in mode auto, which then never decodes plainly."""
    max_window: int = 8
    """Largest window that is ever chosen, and most draft tokens of a tree."""
    fastest_of: int = 1
    """In mode auto, draft methods that one request may have at once, in a tree, where few requests run and it is
    predicted to pay (Fastest-of-N); 1: one, the best for that request."""
    draft_model: str = ""
    """Folder of a dense model in Hugging Face format with the policy's tokenizer, for the drafters ``model`` and
    ``decoupled``, or of an EAGLE-3 head of the policy, for ``model`` alone; ``warm-up``: one layer of the warmed-up
    policy, distilled on the worked solutions of `warmup`; ``warm-up-head``: a head, likewise."""
    cost_table: str = ""
    """File that ``specactor profile`` wrote; empty: costs are measured while the engine runs. In mode
    auto the job is also planned by it when it starts: what no plan has is not started."""

    @property
    def draft_methods(self) -> tuple[str, ...]:
        """All drafters of an engine, the first to be preferred."""
        named = self.mode != "decoupled" or "decoupled" in self.drafters
        return self.drafters if named else ("decoupled", *self.drafters)

    @property
    def largest_window(self) -> int:
        """Most draft tokens of a request that a round can verify; drafters ahead need no more than two of these."""
        return self.window or self.max_window

    @property
    def is_decoupled(self) -> bool:
        """Return whether processes of their own draft."""
        return self.mode != "off" and "decoupled" in self.draft_methods

    @property
    def drafts_in_engine(self) -> bool:
        """Return whether engines hold the draft model."""
        return bool(self.draft_model) and (not self.is_decoupled or "model" in self.drafters)

    def __post_init__(self) -> None:
        rule = rules_of(self, "rollout.speculation")
        rule(
            "max_window",
            1 <= self.max_window <= MAX_WINDOW,
            f"1..{MAX_WINDOW}",
            "Use rollout.speculation.mode off to disable speculation.",
        )
        rule(
            "window",
            self.window is None or 0 <= self.window <= self.max_window,
            f"None or 0..{self.max_window} (rollout.speculation.max_window)",
            "Use None to have it chosen.",
        )
        rule(
            "drafters", bool(self.drafters), "at least one", "Use rollout.speculation.mode off to disable speculation."
        )
        rule(
            "fastest_of",
            self.fastest_of >= 1 and (self.fastest_of == 1 or self.mode in ("auto", "off")),
            f">= 1, and 1 in rollout.speculation.mode {self.mode}" if self.mode in ("coupled", "decoupled") else ">= 1",
            "Use mode auto for more than one method at once.",
        )
        foreign = [name for name in self.drafters if name.lower() in SGLANG_DRAFTERS]
        require(
            not foreign,
            "rollout.speculation.drafters",
            foreign,
            DRAFTERS,
            f"{INEXACT.removesuffix('Use rollout.speculation.')}A draft model, or an EAGLE-3 head, is used with the "
            "drafter model.",
        )
        rule("drafters", len(set(self.drafters)) == len(self.drafters), "every name once", "Remove the second one.")
        rule(
            "drafters",
            self.mode != "coupled" or "decoupled" not in self.drafters,
            "no decoupled in rollout.speculation.mode coupled",
            "Use mode decoupled, or auto.",
        )
        for name in ("model", "decoupled"):
            rule(
                "draft_model",
                name not in self.draft_methods or bool(self.draft_model),
                f"a folder, since {name} is among the drafters",
                f"Name a model, or take {name} out of rollout.speculation.drafters and mode.",
            )
