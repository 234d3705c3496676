"""Runs first in every process of an engine without a GPU: its folder leads PYTHONPATH there."""

import importlib.abc
import sys

from specactor.cpu import torchvision_ops


class _NoMegatron(importlib.abc.MetaPathFinder):
    # SGLang's debugging aids import Megatron-core wherever it is installed, which takes over a second.
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "megatron":
            raise ModuleNotFoundError("megatron: not imported in an engine", name=fullname)
        return None


torchvision_ops.install()
sys.meta_path.insert(0, _NoMegatron())
