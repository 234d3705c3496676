"""Requests that bring along the first tokens of their response, or earlier turns of their conversation.

SGLang takes those as the end of the prompt, which is right for keys, positions and so for noise. Where it matters that
they are emitted (a stop string across the seam; earlier turns: what drafters draft from) they are found by
their number, which travels with the sampling parameters.
"""

from __future__ import annotations

from array import array
from typing import Any

from specactor.rollout.resume import num_begun
from specactor.types import RolloutRequest

_NUMBER, _EARLIER, _UNDRAFTED = "specactor_begun", "specactor_earlier", "specactor_undrafted"


def tokens(request: RolloutRequest) -> list[int]:
    """Return what there is of the response."""
    return list(request.begun.token_ids) if request.begun else []


def marked(request: RolloutRequest) -> dict[str, int] | None:
    """SGLang's ``custom_params`` of the request, which reach the scheduler as they are."""
    counts = {_NUMBER: num_begun(request), _EARLIER: request.num_earlier}
    params = {name: count for name, count in counts.items() if count}
    return params | ({} if request.is_drafted else {_UNDRAFTED: 1}) or None


def is_drafted(req: Any) -> bool:
    """Return whether drafters may draft for SGLang's request `req`."""
    return _UNDRAFTED not in (req.sampling_params.custom_params or {})


def of(req: Any) -> array[int]:
    """Return what SGLang's request `req` brought along of its response."""
    return _last(req, _NUMBER)


def conversation(req: Any) -> array[int]:
    """Return what it brought along of its conversation: earlier turns, and of the response what there is."""
    return _last(req, _EARLIER, _NUMBER)


def _last(req: Any, *numbers: str) -> array[int]:
    count = sum((req.sampling_params.custom_params or {}).get(number, 0) for number in numbers)
    return array("q", req.origin_input_ids[len(req.origin_input_ids) - count :])
