"""Requests that bring along the first tokens of their response.

SGLang takes those as the end of the prompt, which is right for keys, positions and so for noise. Where it matters that
they are emitted (a stop string across the seam, penalties) they are found by their number, which travels with the
sampling parameters.
"""

from __future__ import annotations

from array import array
from typing import Any

from specactor.rollout.resume import num_begun
from specactor.types import RolloutRequest

_NUMBER, _UNDRAFTED = "specactor_begun", "specactor_undrafted"


def tokens(request: RolloutRequest) -> list[int]:
    """Of the response, what there is."""
    return list(request.begun.token_ids) if request.begun else []


def marked(request: RolloutRequest) -> dict[str, int] | None:
    """SGLang's ``custom_params`` of the request, which reach the scheduler as they are."""
    params = {_NUMBER: num_begun(request)} if num_begun(request) else {}
    return params | ({} if request.is_drafted else {_UNDRAFTED: 1}) or None


def is_drafted(req: Any) -> bool:
    """Whether drafters may draft for SGLang's request `req`."""
    return _UNDRAFTED not in (req.sampling_params.custom_params or {})


def of(req: Any) -> array[int]:
    """What SGLang's request `req` brought along."""
    count = (req.sampling_params.custom_params or {}).get(_NUMBER, 0)
    return array("q", req.origin_input_ids[len(req.origin_input_ids) - count :])
