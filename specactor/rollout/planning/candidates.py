"""What can be placed on a cluster: options for `search`, from device figures or from a measured table. PURE.

From figures: engines of 1, 2, 4, .. devices of a node for the target, wherever they divide its heads, as a run demands
(`parallel.layout`), and its weights and one request fit;
drafters on the verifiers' devices and on engines of their own. From a table: engines as it was measured on, with its
drafters; and the drafter process that was measured with it, on one device of its own. Where none was, its models are
placed on as many devices as the engine has.

Invariant: the planner does not see which of the two it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specactor.config import MAX_WINDOW
from specactor.errors import ConfigError, PlanError
from specactor.rollout.planning.costs import METHOD, CostTable, Grid
from specactor.rollout.planning.gpu_specs import Attained, Device
from specactor.rollout.planning.model_shapes import TransformerShape
from specactor.rollout.planning.plans import DrafterEngine, DrafterOption, Footprint, VerifierOption
from specactor.rollout.planning.rooflines import Roofline, cost_table, draft_grid

TEXT_DRAFTERS = ("suffix", "ngram", "ngram_2", "ngram_3")
"""They look things up on the host, where the verifier is."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What `search` is given."""

    verifiers: tuple[VerifierOption, ...]
    drafters: tuple[DrafterOption, ...]


def from_figures(
    target: TransformerShape,
    drafters: Sequence[TransformerShape],
    device: Device,
    *,
    survivals: Mapping[str, tuple[float, ...]],
    context: int,
    max_requests: int,
    sizes: Sequence[int] = (),
    drafter_sizes: Sequence[int] = (1, 2),
    attained: Attained | None = None,
) -> Candidates:
    """Options by rooflines. `survivals` by drafter; `max_requests`: of one engine, at most; `sizes`: devices of a
    verifier, by default all that fit.

    Raises ConfigError for a size asked for that does not divide the target's heads, and PlanError where the target fits
    on no engine of one node.
    """
    for g in sizes:
        if g > 0 and target.heads % g:
            raise ConfigError.at(
                "engine_devices", g, f"a divisor of the {target.heads} heads of {target.name}", "Choose a divisor."
            )
    sizes = sizes or [g for g in _powers(device.node_devices) if target.heads % g == 0]
    max_window = max((len(survivals[drafter.name]) for drafter in drafters), default=1)
    kept = attained or Attained()
    verifiers = []
    for g in sizes:
        roofline = Roofline(target, device, devices=g, context=context, attained=kept)
        option = VerifierOption(
            devices=g,
            costs=cost_table(
                roofline,
                {d.name: Roofline(d, device, devices=g, context=context, attained=kept) for d in drafters},
                max_window=max_window,
                max_requests=max_requests,
            ),
            footprint=_footprint(target, context),
            capacity_bytes=roofline.capacity_bytes,
        )
        if option.requests() != 0:
            verifiers.append(option)
    if not verifiers:
        raise PlanError(
            f"{target.name}: got {target.weights_bytes / 1e9:.0f} GB of weights and engines of "
            f"{tuple(sizes)} {device.name} with {device.memory_bytes / 1e9:.0f} GB; "
            "expected a node that holds them with a request. Use a larger device or a shorter context."
        )
    options = []
    for drafter in drafters:
        engines = []
        for g in drafter_sizes:
            roofline = Roofline(drafter, device, devices=g, context=context, attained=kept)
            grid = draft_grid(roofline, max_window=max_window + 1, max_requests=max_requests)
            engines.append(DrafterEngine(devices=g, seconds=grid, capacity_bytes=roofline.capacity_bytes))
        options.append(
            DrafterOption(
                name=drafter.name,
                survival=survivals[drafter.name],
                engines=tuple(engines),
                footprint=_footprint(drafter, context),
            )
        )
    return Candidates(verifiers=tuple(verifiers), drafters=tuple(options))


def from_table(table: CostTable, *, devices: int, survivals: Mapping[str, tuple[float, ...]]) -> Candidates:
    """Options of a measured table; `devices`: of the engine that was measured. Memory is not known, so nothing is
    refused for it."""
    process, drafters = table.process, []
    for name, grid in table.drafters.items():
        alone = process is None and name not in TEXT_DRAFTERS
        own = (DrafterEngine(devices=devices, seconds=grid),) if alone else ()
        drafters.append(DrafterOption(name=name, survival=survivals[name], engines=own))
    if process is not None:
        engine = DrafterEngine(devices=1, seconds=_windows(process.token_s), token_s=process.token_s)
        drafters.append(DrafterOption(name=METHOD, survival=survivals[METHOD], engines=(engine,)))
    verifier = VerifierOption(devices=devices, costs=table, ahead_s=process.ahead_s if process else None)
    return Candidates(verifiers=(verifier,), drafters=tuple(drafters))


def _windows(token_s: Grid) -> Grid:
    """Drafting windows, token by token."""
    windows = (1.0, MAX_WINDOW + 1.0)
    seconds = tuple(tuple(w * each for w in windows) for (each,) in token_s.seconds)
    return Grid(requests=token_s.requests, per_request=windows, seconds=seconds)


def _footprint(shape: TransformerShape, context: int) -> Footprint:
    return Footprint(weights_bytes=shape.weights_bytes, request_bytes=context * shape.kv_bytes_per_token)


def _powers(largest: int) -> list[int]:
    """1, 2, 4, .. up to `largest`."""
    return [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
