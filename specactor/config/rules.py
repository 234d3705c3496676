"""The form of every rule on a setting. PURE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from string import Formatter
from typing import Any

from specactor.errors import ConfigError


def require(ok: bool, name: str, got: object, expected: str, remedy: str) -> None:
    """Raise ConfigError for the setting `name`, its dotted path, unless `ok`."""
    if not ok:
        raise ConfigError.at(name, got, expected, remedy)


def rules_of(section: object, path: str = "") -> Callable[[str, bool, str, str], None]:
    """Return a function (name, ok, expected, remedy) that raises ConfigError with the section's own value unless
    `ok`."""

    def rule(name: str, ok: bool, expected: str, remedy: str) -> None:
        require(ok, f"{path}.{name}".removeprefix("."), attrgetter(name)(section), expected, remedy)

    return rule


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the settings of a config in JSON by their dotted path."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


MAY_BE_INFINITE = ("train.max_logprob_gap", "distillation.refresh")


def check_values(value: object, name: str = "") -> None:
    """Raise ConfigError for nan, an infinity that says nothing, or a NUL in a text, also inside sections and lists."""
    if is_dataclass(value):
        for item in fields(value):
            check_values(getattr(value, item.name), f"{name}.{item.name}".removeprefix("."))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            check_values(key, name)
            check_values(part, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for part in value:
            check_values(part, name)
    elif isinstance(value, float):
        fine = math.isfinite(value) or (value == math.inf and name in MAY_BE_INFINITE)
        require(fine, name, value, "a finite number", "See --help for its meaning.")
    elif isinstance(value, str):
        require("\0" not in value, name, value, "a text without NUL characters", "Leave them out.")


COMPACT = "compact"  # {name:compact} in a template is the text without its blanks


def is_template(text: str) -> bool:
    """Return whether `text` has fields, all of them {name} or {name:compact}."""
    try:
        parts = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError:
        return False
    plain = all(
        name and name.isidentifier() and spec in ("", COMPACT) and not conversion for name, spec, conversion in parts
    )
    return bool(parts) and plain
