"""The names of SGLang's server arguments, read from its files: its import takes seconds, and patches others."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from specactor.config import EngineConfig
from specactor.errors import ConfigError, did_you_mean

FIELDS = "srt/arg_groups/fields"


@cache
def known_arguments() -> frozenset[str]:
    """Return the fields of its `ServerArgs`; none where SGLang is not installed."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        return frozenset()
    texts = [file.read_text() for file in (Path(spec.origin).parent / FIELDS).glob("[!_]*.py")]
    return frozenset(name for text in texts for name in re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE))


def check_extra_args(engine: EngineConfig) -> None:
    """Raise ConfigError for a name that SGLang does not know."""
    known = known_arguments()
    for name in engine.extra_args:
        if known and name not in known:
            hint = did_you_mean(name.replace("-", "_"), sorted(known), "Leave it out.")
            raise ConfigError.at("rollout.engine.extra_args", name, "an argument of SGLang's ServerArgs", hint)
