"""What engines promise of a request's tokens, by the arithmetic of their attention. PURE.

Tokens are a function of log-probabilities and noise. Two candidates that are tied to the last place may change places
where a row's log-probabilities have other bits in another batch; then a verification can emit another token than a
plain round, of the same distribution.
"""

from __future__ import annotations

from typing import NamedTuple

from specactor.config import EngineConfig

SAME_BITS = "same bits in plain rounds, verifications and any batch"
SAME_LAW = "same law and noise; tokens equal but for ties, which `make gpu-check` counts"
ARITHMETICS = {"torch_native": "rows", "tiles": "tiles"}
"""Of our own attention, by SGLang's name of the backend: keys are read once per row, or once per tile of rows."""


class Guarantee(NamedTuple):
    arithmetic: str
    """rows, tiles, or the backend whose own kernel it is."""
    promise: str


def guarantee(engine: EngineConfig, *, gpu: bool, dtype: str) -> Guarantee:
    """Return what these engines promise. Same bits are promised where tests have shown them: on CPUs in float32."""
    default = "" if gpu else "torch_native"
    backend = engine.attention.get("decode_attention_backend") or engine.attention.get("attention_backend") or default
    known = backend == "tiles" or (backend == "torch_native" and not gpu)
    arithmetic = ARITHMETICS[backend] if known else f"{backend or 'SGLang'}'s own kernel"
    return Guarantee(arithmetic, SAME_BITS if known and not gpu and dtype == "float32" else SAME_LAW)
