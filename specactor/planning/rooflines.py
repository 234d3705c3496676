"""Published figures of devices, and cost tables from them. PURE. Left out: imbalance of experts, prefills beside
decodes, stragglers, slower kernels, and the host but for `host_s`.

Invariant: seconds do not fall with requests, tokens or context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from specactor.errors import ConfigError, PlanError
from specactor.planning.model_shapes import TransformerShape
from specactor.planning.plans import Candidates, DrafterEngine, DrafterOption, Footprint, VerifierOption
from specactor.rollout.speculation.costs import CostTable, Grid

PLAIN_BUCKETS = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, 8193, 32))
WINDOW_BUCKETS = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 8193, 16))
# Nodes of a table, 1 to 2048. Those after a power of two show the step to the next bucket.
REQUESTS = tuple(
    sorted({1 << k for k in range(12)} | {3 << k for k in range(2, 10)} | {(1 << k) + 1 for k in range(4, 9)})
)


class Roofline:
    def __init__(
        self,
        shape: TransformerShape,
        device: Device,
        *,
        devices: int,
        context: int,
        keys_once: bool = False,
    ) -> None:
        """`context` is a mean of tokens in the KV cache; `keys_once` reads keys once per request, not per row."""
        assert 1 <= devices <= device.node_devices, f"{devices} of a node of {device.name}"
        assert context >= 0, context
        self.shape, self.device, self.devices, self.context = shape, device, devices, context
        self.keys_once = keys_once

    @property
    def capacity_bytes(self) -> float:
        return self.devices * self.device.memory_bytes * self.device.memory_share

    @property
    def request_bytes(self) -> float:
        """Return the bytes of a request's keys and values, on all devices together."""
        copies = max(1.0, self.devices / self.shape.kv_heads)  # each device has a head of them, or a copy of one
        return self.context * self.shape.kv_bytes_per_token * copies

    def forward_s(self, requests: int, tokens: int = 1, *, buckets: Sequence[int] = PLAIN_BUCKETS) -> float:
        """Return seconds of a forward with `tokens` rows per request, rounded up to `buckets`: per part the longer of
        moving bytes and computing; plus two all-reduces per layer, the kernels' least time and the launch."""
        shape = self.shape
        wanted = requests * tokens
        rows = max(wanted, buckets[min(bisect_left(buckets, wanted), len(buckets) - 1)])
        readers = requests if self.keys_once else wanted
        attended = readers * self.request_bytes / shape.layers
        layer = self._matmul(shape.attention_params + shape.mlp_params, rows)
        layer += self._experts(rows)
        layer += self._longer(
            attended, 4.0 * rows * self.context * shape.heads * shape.head_dim, share=self.device.attention_share
        )
        layer = max(layer, self.device.kernel_s * self.device.kernels_per_layer) + 2 * self._all_reduce(rows)
        # Each logit is written and read, 4 bytes.
        output = self._matmul(shape.head_params, rows) + self._longer(8.0 * rows * shape.vocab, 0.0)
        return shape.layers * layer + output + self.device.launch_s

    def _matmul(self, params: int, rows: float) -> float:
        return self._longer(params * self.shape.param_bytes, 2.0 * params * rows)

    def _experts(self, rows: float) -> float:
        read = self.shape.distinct_experts(rows) * self.shape.expert_params * self.shape.param_bytes
        return self._longer(read, 2.0 * rows * self.shape.experts_per_token * self.shape.expert_params)

    def _longer(self, num_bytes: float, operations: float, *, share: float | None = None) -> float:
        moved = num_bytes / (self.device.memory_bytes_per_s * (self.device.weights_share if share is None else share))
        return max(moved, operations / (self.device.flops * self.device.matmul_share)) / self.devices

    def _all_reduce(self, rows: float) -> float:
        if self.devices == 1:
            return 0.0
        num_bytes = rows * self.shape.hidden * self.shape.param_bytes
        ring = 2.0 * (self.devices - 1) / self.devices * num_bytes
        return self.device.all_reduce_s + ring / (self.device.link_bytes_per_s * self.device.link_share)


def draft_grid(roofline: Roofline, *, max_window: int, max_requests: int) -> Grid:
    """Return the seconds of drafting 1 to max_window tokens, by the drafter cut over the devices, or copied to groups:
    the faster."""
    requests = _nodes(max_requests)
    g = roofline.devices
    parts = [
        Roofline(roofline.shape, roofline.device, devices=d, context=roofline.context)
        for d in range(1, g + 1)
        if g % d == 0 and (d == 1 or roofline.shape.kv_heads % d == 0)
    ]
    steps = [min(part.forward_s(-(-n * part.devices // g)) for part in parts) for n in requests]
    return Grid(
        requests=tuple(map(float, requests)),
        per_request=tuple(map(float, range(1, max_window + 1))),
        seconds=tuple(tuple(w * step for w in range(1, max_window + 1)) for step in steps),
    )


def cost_table(
    target: Roofline,
    drafters: Mapping[str, Roofline],
    *,
    max_window: int,
    max_requests: int,
    host_s: tuple[float, float] = (0.0, 0.0),
) -> CostTable:
    """Return the table that a profile would give; `drafters` draft on the same devices. `host_s`: seconds that the
    device waits for the host, in a plain round and with drafts."""
    requests, tokens = _nodes(max_requests), range(1, max_window + 2)
    plain_s, drafted_s = host_s
    axis = tuple(map(float, requests))
    return CostTable(
        model=target.shape.name,
        device=f"{target.devices} x {target.device.name}, published figures",
        date="",
        verify=Grid(
            requests=axis,
            per_request=tuple(map(float, tokens)),
            seconds=tuple(
                tuple(target.forward_s(n, t, buckets=WINDOW_BUCKETS) + drafted_s for t in tokens) for n in requests
            ),
        ),
        plain=Grid(
            requests=axis, per_request=(1.0,), seconds=tuple((target.forward_s(n) + plain_s,) for n in requests)
        ),
        drafters={
            name: draft_grid(drafter, max_window=max_window, max_requests=max_requests)
            for name, drafter in drafters.items()
        },
    )


def _nodes(max_requests: int) -> list[int]:
    assert max_requests >= 1
    return sorted({n for n in chain(REQUESTS, (max_requests,)) if n <= max_requests})


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
    keys_once: bool = False,
    host_s: tuple[float, float] = (0.0, 0.0),
) -> Candidates:
    """Return options by rooflines; `max_requests` is of one engine, `sizes` are devices of a verifier (none: all that
    fit). Raises ConfigError for a size that does not divide the heads, PlanError where the target fits on no engine."""
    for g in sizes:
        if g > 0 and target.heads % g:
            raise ConfigError.at(
                "engine_devices", g, f"a divisor of the {target.heads} heads of {target.name}", "Choose a divisor."
            )
    sizes = sizes or [g for g in (1, 2, 4, 8) if g <= device.node_devices and target.heads % g == 0]
    most = {"max_window": max((len(survivals[d.name]) for d in drafters), default=1), "max_requests": max_requests}
    verifiers = []
    for g in sizes:
        roofline = Roofline(target, device, devices=g, context=context, keys_once=keys_once)
        beside = {d.name: Roofline(d, device, devices=g, context=context) for d in drafters}
        option = VerifierOption(
            devices=g,
            costs=cost_table(roofline, beside, **most, host_s=host_s),
            footprint=_footprint(roofline),
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
    for d in drafters:
        rooflines = [Roofline(d, device, devices=g, context=context) for g in drafter_sizes]
        engines = tuple(_drafter_engine(roofline, **most) for roofline in rooflines)
        footprint = _footprint(Roofline(d, device, devices=1, context=context))
        options.append(DrafterOption(name=d.name, survival=survivals[d.name], engines=engines, footprint=footprint))
    return Candidates(verifiers=tuple(verifiers), drafters=tuple(options))


def _drafter_engine(roofline: Roofline, *, max_window: int, max_requests: int) -> DrafterEngine:
    grid = draft_grid(roofline, max_window=max_window + 1, max_requests=max_requests)
    return DrafterEngine(devices=roofline.devices, seconds=grid, capacity_bytes=roofline.capacity_bytes)


def _footprint(roofline: Roofline) -> Footprint:
    return Footprint(weights_bytes=roofline.shape.weights_bytes, request_bytes=roofline.request_bytes)


HOPPER = "https://glennklockwood.com/garden/processors/h100"
ML_ENGINEERING = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device: peaks, as published, and what is attained of them."""

    name: str
    flops: float  # bfloat16, dense, per second
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the other devices of its node, one direction
    node_devices: int = 8
    """Of one NVLink domain: HGX and DGX boards, https://chippub.substack.com/p/disassembling-nvidias-16t-network"""

    # Shares of these that are attained, measured on H100 if nothing else is said.
    matmul_share: float = 0.80
    """794.5 of 989 TFLOP/s (H100; B200: 1745 of 2250, .78), the best shape, ML_ENGINEERING. Ill-shaped matrices get
    less."""
    weights_share: float = 0.84
    """2.8 of 3.35 TB/s, coalesced reads of matrices, https://mikamirai.com/blog/gpu-memory-bandwidth/"""
    attention_share: float = 0.57  # 1.9 of 3.35 TB/s, keys and values in attention, the same page
    link_share: float = 0.77
    """Bus bandwidth of a large all-reduce over NVLink's, https://waynehacking8.github.io/blog/nccl-nvlink-bandwidth/"""
    all_reduce_s: float = 5e-6
    """Of a small one among 2, 4 and 8 devices: 3.9, 3.7, 5.7 us for 4 KB, https://github.com/sgl-project/sglang/pull/2904"""
    kernel_s: float = 1.2e-6
    """The least time of a kernel in a row of kernels: 1.1 to 1.3 us for adding two small tensors,
    https://github.com/pytorch/pytorch/issues/161104"""
    kernels_per_layer: int = 12  # counted: norms, projections, rotation, attention in two passes, activation; assumed
    launch_s: float = 8e-6  # of a captured graph, processor time, https://cuda.juliagpu.org/dev/usage/graphs/
    memory_share: float = 0.90  # share for weights and KV; assumed, about SGLang's mem_fraction_static


# Where a vendor gives a figure with sparsity, half of it stands here.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(  # SXM5
            name="H100",
            flops=989.4e12,  # HOPPER
            memory_bytes=80e9,  # HOPPER
            memory_bytes_per_s=3.35e12,  # HOPPER
            link_bytes_per_s=450e9,  # HOPPER: 900 GB/s, both directions
        ),
        Device(  # SXM
            name="H200",
            flops=989.4e12,  # the same chip as H100: HOPPER
            memory_bytes=141e9,  # ML_ENGINEERING; https://www.nvidia.com/en-us/data-center/h200/
            memory_bytes_per_s=4.8e12,  # the same two
            link_bytes_per_s=450e9,  # the same two: 900 GB/s, both directions
        ),
        Device(  # SXM5
            name="H20",
            flops=148e12,  # https://willitrunai.com/es/gpus/h20-96gb; https://zangshuxian.com/new/674733024499207168
            memory_bytes=96e9,  # the first of them
            memory_bytes_per_s=4.0e12,  # both of them
            link_bytes_per_s=450e9,  # the first: 900 GB/s, both directions
        ),
        Device(  # HGX, 1000 W
            name="B200",
            flops=2250e12,  # https://glennklockwood.com/garden/processors/B200
            memory_bytes=180e9,  # 192 GB of chips; 179 to 180 usable:
            # https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview
            memory_bytes_per_s=8.0e12,  # both of them
            link_bytes_per_s=900e9,  # both of them: 1.8 TB/s, both directions
        ),
    )
}


def device(name: str) -> Device:
    """Return the device. Raises PlanError for an unknown name."""
    found = {known.lower(): one for known, one in DEVICES.items()}.get(name.lower())
    if found is None:
        raise PlanError(
            f"device: got {name!r}, expected one of {', '.join(DEVICES)}. For others measure a table with specactor "
            "profile and give it with --cost-table."
        )
    return found
