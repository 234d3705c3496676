"""A draft model that leaves its device between refreshes. The device is pretended: what is left there is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specactor import device_memory
from specactor.device_memory import HostCopies
from specactor.errors import SpecActorError
from specactor.trainer.drafter.train import DrafterTrainer
from specactor.trainer.drafter.updates import PlainUpdater
from tests.lib.live_bytes import LiveBytes
from tests.trainer.drafter.train_cases import learn, trainer


class Copies(HostCopies):
    """Other tensors than those of the device, whose memory others then write."""

    def offload(self, optimizers: Sequence[Any], modules: Sequence[torch.nn.Module] = ()) -> None:
        hosts = {}
        for key, tensor, put in device_memory._tensors(optimizers, modules):
            if key[1] != "step":
                hosts[key] = self._hosts.get(key, torch.empty_like(tensor))
                hosts[key].copy_(tensor)
                tensor.fill_(77)
                put(hosts[key])
        self._hosts = hosts

    def reload(self, optimizers: Sequence[Any], device: torch.device, modules: Sequence[torch.nn.Module] = ()) -> None:
        assert device.type == "cuda"
        for key, _, put in device_memory._tensors(optimizers, modules):
            if key in self._hosts:
                put(self._hosts[key].clone())


def on_a_device() -> tuple[DrafterTrainer, PlainUpdater]:
    made = trainer()
    updater = made._updater
    assert isinstance(updater, PlainUpdater)
    updater._copies, updater.device = Copies(), torch.device("cuda")
    return made, updater


def weights(made: DrafterTrainer) -> list[Any]:
    return [value.tolist() for _, value in made.named_weights()]


def diverges(made: DrafterTrainer) -> None:
    """In the second of two updates."""
    rate = made._rate
    first = made.updates
    made._rate = lambda update: torch.inf if update > first else 1e-3  # type: ignore[method-assign]
    with pytest.raises(SpecActorError):
        learn(made, 2)
    made._rate, made.updates = rate, first  # type: ignore[method-assign]


def test_refreshes_between_which_it_leaves_the_device_are_those_of_one_that_stays() -> None:
    """Also where one diverges: what it had is still in host memory, until the weights have changed."""
    stays, (leaves, _) = trainer(), on_a_device()
    leaves.offload()
    for number in range(3):
        leaves.reload()
        assert learn(leaves, 2).losses == learn(stays, 2).losses
        if number == 1:
            diverges(leaves)
            assert weights(leaves) == weights(stays)
        leaves.offload()
        assert weights(leaves) == weights(stays), "they are read in host memory"
        leaves.reload()
        diverges(leaves)
        assert weights(leaves) == weights(stays)
        leaves.offload()


def test_what_is_taken_back_from_old_copies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong version, which believes that host memory has what was learned since."""
    monkeypatch.setattr(PlainUpdater, "_on_host", property(lambda self: True, lambda self, value: None), raising=False)
    made, _ = on_a_device()
    made.offload()
    made.reload()
    learn(made, 2)
    before = weights(made)
    diverges(made)
    assert weights(made) != before


def test_a_refresh_takes_no_memory_for_what_is_in_host_memory() -> None:
    made, updater = on_a_device()
    learn(made, 1)
    size = sum(3 * value.nbytes for _, value in made.named_weights())
    made.offload()
    made.reload()
    taken = []
    for _ in range(2):  # the second time it may have changed
        with LiveBytes() as live:
            restore = updater.kept()
        taken.append(live.peak)
        del restore
    assert taken[0] < 0.1 * size
    assert taken[1] >= size
