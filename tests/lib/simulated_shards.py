"""Script: a policy whose parameters are on a pretended device hands them over to an engine on another, and a run's
start is recorded there. Prints JSON.

python -m tests.lib.simulated_shards LIBRARY FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from specactor.cpu import megatron

_replaced: list[tuple[Any, str, Any]] = []
"""What the CPU's platform changed in tensors: there a device's name means the CPU."""


def _noted(owner: Any, name: str, value: Any) -> None:
    if owner in (torch, torch.Tensor):
        _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


with patch.object(megatron, "replace", _noted):
    megatron.install()


from specactor.config import TinyModelConfig, WeightsSyncConfig  # noqa: E402
from specactor.data.tiny_model import make_tiny_model  # noqa: E402
from specactor.parallel.collective import Collective, init_groups  # noqa: E402
from specactor.parallel.layout import Layout  # noqa: E402
from specactor.trainer import shards as shards_module  # noqa: E402
from specactor.trainer.policy import PolicyTrainer  # noqa: E402
from specactor.trainer.shards import RankShards, share  # noqa: E402
from specactor.weights_sync import memory, pulls  # noqa: E402
from specactor.weights_sync.cuda_ipc import GpuMemory, Part, Places  # noqa: E402
from specactor.weights_sync.sender import WeightSender  # noqa: E402
from tests.lib.simulated_cuda import simulated  # noqa: E402
from tests.lib.simulated_cuda_cases import Engine  # noqa: E402
from tests.lib.simulated_records import recorded  # noqa: E402
from tests.trainer import policy_cases as cases  # noqa: E402


class OnDevice:
    """A chunk of the policy with its tensors on a device."""

    def __init__(self, chunk: Any, device: str) -> None:
        self._chunk, self.tensors = chunk, dict[str, torch.Tensor]()
        for name, parameter in chunk.named_parameters():
            self.tensors[name] = parameter.detach().to(device)
            self.tensors[name].tensor_model_parallel = getattr(parameter, "tensor_model_parallel", False)  # type: ignore

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


class Model:
    """Of an engine: it has Hugging Face's tensors as they are."""

    def __init__(self, shapes: dict[str, torch.Size], device: str) -> None:
        self.weights = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}

    def parameters(self) -> Iterable[torch.Tensor]:
        return iter(self.weights.values())

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return iter(self.weights.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor)


def trainer_of(folder: Path) -> PolicyTrainer:
    make_tiny_model(TinyModelConfig(num_layers=2, num_experts=4, expert_size=32), 0, folder / "model")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    config = cases.config(str(folder / "model"), {})
    layout = Layout(world=1, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    init_groups(layout, config.parallel, seed=0, local_rank=0)
    return PolicyTrainer(config, layout, folder / "model")


def no_copy(*given: Any) -> Any:
    raise OSError("no memory")


def raises(call: Callable[[], Any]) -> str:
    try:
        call()
    except OSError as error:
        return type(error).__name__
    return ""


def beside_an_equal_rank(source: RankShards, exported: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What it hands over to the host, and on its GPU alone since another rank of the host gives it to the host."""
    source._equal_shards = source._equal_whole = source._equal_experts = [1, 0]
    generation = 1

    def places(tensors: Any, starts: Any) -> Places:
        parts = tuple(Part(at, tensor.nbytes, 0, 3 * at) for tensor, at in zip(tensors, starts, strict=False))
        return parts, ((0, generation),)

    def exporting(device: int, where: Places) -> GpuMemory:
        return GpuMemory(uuid=f"GPU-{device}", handles=(b"",), parts=where[0])

    with patch.multiple(memory, places=places, exported=exporting):
        holding = source.held(2**40)
        assert holding is not None
        same = source.held(2**40) is holding
        generation = 2
        moved = source.held(2**40) is not holding
        generation = 3
        with patch.object(shards_module, "SharedCopy", no_copy):
            failed = [raises(lambda: source.held(2**40)) for _ in range(2)]
        again = source.held(2**40)
        source._equal_shards = source._equal_whole = source._equal_experts = [1]
        source._holding = None
        nothing = source.held(2**40)
    assert again is not None
    assert nothing is not None
    [unread] = nothing.addresses
    assert unread is not None
    [address] = holding.addresses
    assert address is not None
    assert address.gpu is not None
    ends = {name: at for name, at in holding.places.items() if at >= address.num_bytes}
    return {
        "given": {tensor.name for tensor in holding.tensors} < {*exported},
        "in the copy": max(block.span.at for tensor in holding.tensors for block in tensor.blocks) < address.num_bytes,
        "both": 0 < len(ends) < len(holding.places),
        "all": sorted(holding.places) == sorted(source._name_of_part(*pair) for pair in source._parameters),
        "parts": [part.at for part in address.gpu.parts] == [*holding.places.values()],
        "gpu": address.gpu.uuid == "GPU-1",
        "same": same,
        "moved": moved,
        "failed": failed == ["OSError"] * 2,
        "after a failure": again is not holding and again.addresses != holding.addresses,
        "hands over nothing": not nothing.tensors and unread.num_bytes == 1,
        "and yet has all on its GPU": unread.gpu is not None and sorted(nothing.places) == sorted(again.places),
    }


def main(library: Path, folder: Path) -> None:
    trainer = trainer_of(folder)
    exported = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    found: dict[str, Any] = {"pushes": []}
    for owner, name, before in reversed(_replaced):
        setattr(owner, name, before)
    with simulated(library):
        [chunk] = [OnDevice(chunk, "cuda:1") for chunk in trainer.policy.for_bridge()]
        policy: Any = SimpleNamespace(bridge=trainer.policy.bridge, for_bridge=lambda: [chunk])
        buffer = SimpleNamespace(param_data=next(iter(chunk.tensors.values())))
        found["shared"] = len(share([SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])]))
        source, sender = RankShards(policy), WeightSender(WeightsSyncConfig(), Collective())
        engine = Engine("cuda:3", lambda: None)
        model = Model({name: tensor.shape for name, tensor in exported.items()}, "cuda:3")
        engine.rank.model = model
        for version in range(1, 4):
            report = sender.push(source, [engine], version=version)  # type: ignore[list-item]
            wanted = {name: tensor * 2 ** (version - 1) for name, tensor in exported.items()}
            wrong = [n for n, tensor in wanted.items() if not torch.equal(model.weights[n].cpu(), tensor)]
            found["pushes"].append([report.num_rounds, report.note, wrong, report.num_bytes])
            for tensor in chunk.tensors.values():
                tensor.mul_(2)
        found["bytes"] = sum(tensor.nbytes for tensor in exported.values())
        found["devices"] = sorted({str(tensor.device) for tensor in model.weights.values()})
        found["beside an equal rank"] = beside_an_equal_rank(RankShards(policy), exported)
        source, sender = RankShards(policy), WeightSender(WeightsSyncConfig(), Collective())
        with patch.object(pulls, "room_bytes", lambda ranks: found.setdefault("ranks", ranks) and 1000):
            reports = [sender.push(source, [engine], version=version) for version in (4, 5)]  # type: ignore[list-item]
        found["no room"] = [[report.num_rounds > 0, report.note] for report in reports]
        found["records"] = recorded(folder / "records")
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
