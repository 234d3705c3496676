"""The quickstart without speculation: what other examples and comparisons begin with."""

from dataclasses import replace

from examples import quickstart
from specactor.config import Config


def recipe() -> Config:
    return replace(quickstart.plain(), name="quickstart_plain")
