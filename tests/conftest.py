"""For all tests: a property may take long. The machine may be busy, and how long it takes is no part of it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
