"""A draft model that leaves its device between refreshes. The device is pretended: what is left there is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specactor import device_memory
from specactor.device_memory import HostCopies
from specactor.trainer.drafter.train import DrafterTrainer
from specactor.trainer.drafter.updates import PlainUpdater
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


def on_a_device() -> DrafterTrainer:
    made = trainer()
    updater = made._updater
    assert isinstance(updater, PlainUpdater)
    updater._copies, updater.device = Copies(), torch.device("cuda")
    return made


def weights(made: DrafterTrainer) -> list[Any]:
    return [value.tolist() for _, value in made.named_weights()]


def test_refreshes_between_which_it_leaves_the_device_are_those_of_one_that_stays() -> None:
    stays, leaves = trainer(), on_a_device()
    leaves.offload()
    for _ in range(3):
        leaves.reload()
        assert learn(leaves, 2).losses == learn(stays, 2).losses
        leaves.offload()
        assert weights(leaves) == weights(stays), "they are read in host memory"
