"""One rank of a process group, and a draft model on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specactor.parallel.collective import Collective
from tests.trainer.distillation import cases


@pytest.fixture(scope="module")
def collective() -> Iterator[Collective]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Collective(torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "model"
    cases.model().save_pretrained(folder)
    return folder
