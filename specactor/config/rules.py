"""The form of every rule on a setting. PURE.

What is wrong is one `ConfigError` of one line, with the dotted path of the setting, its value, what was expected, and
the way out.
"""

from __future__ import annotations

from string import Formatter

from specactor.errors import ConfigError


def require(ok: bool, name: str, got: object, expected: str, remedy: str) -> None:
    """Raise ConfigError for the setting `name`, its dotted path in a recipe, unless `ok`."""
    if not ok:
        raise ConfigError.at(name, got, expected, remedy)


def is_template(text: str) -> bool:
    """Whether `text` has at least one {name}, and no replacement field that is more than a name."""
    try:
        parts = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError:
        return False
    plain = all(name and name.isidentifier() and not spec and not conversion for name, spec, conversion in parts)
    return bool(parts) and plain
