"""The section `rollout.speculation` of a recipe. PURE."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Literal

from specactor.config.rules import require, rules_of

MAX_WINDOW = 16  # draft tokens per request and round
DRAFTERS = (
    "suffix, previous, mtp, model, decoupled, or package.module:Class"  # what `rollout.speculation.drafters` may name
)
WARM_UP, WARM_UP_HEAD = "warm-up", "warm-up-head"
MADE_BY_WARM_UP = (WARM_UP, WARM_UP_HEAD)  # as `rollout.speculation.draft_model`: what the warm-up makes
EAGLE3_HEAD = "LlamaForCausalLMEagle3"  # architecture in the config.json of heads, also published ones
MTP = "mtp"  # the drafter of the policy's own MTP layer
SGLANG_DRAFTERS = ("eagle", "eagle3", "nextn", "standalone")  # SGLang's, refused by name
INEXACT = (
    "SGLang's own speculation does not keep the text: on a GPU it accepts drafts by coins that plain decoding does not "
    "toss, on a CPU it takes the likeliest token at any temperature. Use rollout.speculation."
)
"""Why SGLang's own speculation is refused, and the way out."""


def of_draft_model(drafter: str) -> tuple[str, int] | None:
    """Return (model or decoupled, place in `draft_model` from 1 on); None without a draft model."""
    found = re.fullmatch(r"(model|decoupled)(?::(\d+))?", drafter)
    return (found[1], int(found[2] or 1)) if found else None


def kind_of(drafter: str) -> str:
    """Return model or decoupled for a drafter with a draft model, else ""."""
    found = of_draft_model(drafter)
    return found[0] if found else ""


def drafter_of(kind: str, place: int) -> str:
    return kind if place == 1 else f"{kind}:{place}"


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Drafting ahead of the policy. It changes the speed of a rollout and never a token."""

    mode: Literal["off", "coupled", "decoupled", "auto"] = "off"
    """off: plain decoding; coupled: `drafters` draft, then the policy verifies, on the engine's own devices; decoupled:
    processes of their own (parallel.drafters) draft ahead as well; auto: drafters, or off, whichever is predicted to be
    faster, request by request and round by round."""
    drafters: tuple[str, ...] = ("suffix",)
    """Draft methods: suffix, previous, mtp (the policy's own MTP layer), model, decoupled, or the import path of a
    class, ``package.module:Name``. ``model:2`` and ``decoupled:2`` draft with the second of `draft_model`, and so on.
    Mode decoupled puts decoupled before them where none is named."""
    window: int | None = None
    """Draft tokens per request and round; None: chosen per request from its past acceptance and measured costs.
    With a number, mode auto chooses the drafter alone, and never decodes plainly."""
    max_window: int = 8
    """Largest window that is ever chosen, and most draft tokens of a tree."""
    fastest_of: int = 1
    """In mode auto, draft methods that one request may have at once, in a tree, where few requests run and it is
    predicted to pay (Fastest-of-N); 1: one, the best for that request."""
    draft_model: tuple[str, ...] = ()
    """Folders of dense models in Hugging Face format with the policy's tokenizer, the first for the drafters ``model``
    and ``decoupled``, the second for ``model:2`` and ``decoupled:2``, and so on; one may be an EAGLE-3 head of the
    policy, for drafters ``model`` alone. As the first, ``warm-up``: one layer of the warmed-up policy, distilled on the
    worked solutions of `warmup`, and ``warm-up-head``: a head, likewise. The first alone is kept fresh by
    `distillation`. One that no drafter names is neither loaded nor made; a class of yours may draft with any."""
    cost_table: str = ""
    """File that ``specactor profile`` wrote; empty: costs are measured while the engine runs. In mode
    auto the job is also planned by it when it starts: what would not pay is not started."""

    @property
    def draft_methods(self) -> tuple[str, ...]:
        """Return an engine's drafters, the preferred first."""
        named = self.mode != "decoupled" or any(kind_of(name) == "decoupled" for name in self.drafters)
        return self.drafters if named else ("decoupled", *self.drafters)

    @property
    def largest_window(self) -> int:
        """Return the most draft tokens that a round verifies; drafters are at most two of these ahead."""
        return self.window or self.max_window

    @property
    def is_decoupled(self) -> bool:
        return bool(self.in_processes)

    @property
    def in_processes(self) -> dict[str, str]:
        """Return the folders that drafter processes draft with, by drafter."""
        return {} if self.mode == "off" else self._named("decoupled")

    @property
    def in_engines(self) -> dict[str, str]:
        """Return the folders of the draft models that engines hold, by drafter."""
        if self.mode == "off":
            return {}
        if not self.is_decoupled and any(":" in name and not kind_of(name) for name in self.drafters):
            # a class of the user's may draft with any of them
            return {drafter_of("model", place): folder for place, folder in enumerate(self.draft_model, 1)}
        return self._named("model")

    @property
    def in_use(self) -> set[str]:
        """Return the folders of the draft models that somebody drafts with."""
        return {*self.in_engines.values(), *self.in_processes.values()}

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the folders of the draft models that no drafter names, though something drafts."""
        return () if self.mode == "off" else tuple(folder for folder in self.draft_model if folder not in self.in_use)

    @property
    def unused_settings(self) -> tuple[str, ...]:
        """Return the names of the settings that mode off leaves unused, where they are not the defaults."""
        if self.mode != "off":
            return ()
        return tuple(item.name for item in fields(self) if getattr(self, item.name) != item.default)

    @property
    def uses_mtp(self) -> bool:
        return self.mode != "off" and MTP in self.drafters

    @property
    def first_draft_model(self) -> str:
        """Return the folder of the draft model that is kept fresh and made by the warm-up, or ""."""
        return self.draft_model[0] if self.draft_model else ""

    def with_first(self, folder: str) -> SpeculationConfig:
        return replace(self, draft_model=(folder, *self.draft_model[1:]))

    def _named(self, kind: str) -> dict[str, str]:
        places = {name: found[1] for name in self.draft_methods if (found := of_draft_model(name)) and found[0] == kind}
        return {name: self.draft_model[place - 1] for name, place in places.items()}

    def __post_init__(self) -> None:
        if isinstance(self.draft_model, str):  # as recipes wrote it when there was one
            object.__setattr__(self, "draft_model", (self.draft_model,) if self.draft_model else ())
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
            self.mode != "coupled" or all(kind_of(name) != "decoupled" for name in self.drafters),
            "no decoupled in rollout.speculation.mode coupled",
            "Use mode decoupled, or auto.",
        )
        self._check_draft_models()

    def _check_draft_models(self) -> None:
        rule = rules_of(self, "rollout.speculation")
        folders = [PurePath(folder) for folder in self.draft_model]
        rule("draft_model", len({*folders}) == len(folders), "every folder once", "Remove the second one.")
        rule("draft_model", all(self.draft_model), "folders", "Leave the setting out for none.")
        made = " and ".join(MADE_BY_WARM_UP)
        rule(
            "draft_model",
            not {*MADE_BY_WARM_UP} & {*self.draft_model[1:]},
            f"{made} as the first alone",
            "Put it there.",
        )
        for name in self.draft_methods:
            found = of_draft_model(name)
            if found is None:
                continue
            rule(
                "draft_model",
                bool(self.draft_model),
                f"a folder, since {name} is among the drafters",
                f"Name a model, or take {name} out of rollout.speculation.drafters and mode.",
            )
            kind, place = found
            rule(
                "drafters",
                name == drafter_of(kind, place) and place <= len(self.draft_model),
                f"{kind} for the first of {len(self.draft_model)} in rollout.speculation.draft_model, {kind}:2 for the "
                "second",
                f"Name a draft model for {name}, or take it out.",
            )
        rule(
            "draft_model",
            WARM_UP_HEAD not in self.in_processes.values(),
            "a draft model for processes of their own, which have no hidden states of the policy",
            "Use warm-up, or mode coupled.",
        )
