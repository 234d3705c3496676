"""Lets torchvision, which SGLang and transformers import unasked, be imported beside a CPU build of torch: for that its
operators' schemas are enough.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Schemas(importlib.abc.MetaPathFinder):
    """Defines the missing schemas just before torchvision is imported."""

    library: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is not None:  # the operators load, also on a machine without a GPU
                return None
            _Schemas.library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in ("nms", "qnms"):
                _Schemas.library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


def install() -> None:
    """Watch for the import of torchvision."""
    watched = any(isinstance(finder, _Schemas) for finder in sys.meta_path)  # two would both define the operators
    if "torchvision" not in sys.modules and _Schemas.library is None and not watched:
        sys.meta_path.insert(0, _Schemas())
