"""Runs first in every process of an engine without a GPU, because its folder leads PYTHONPATH there.

SGLang's debugging aids import Megatron-core wherever it is installed, which takes over a second: not in an engine.
"""

import importlib.abc
import sys

from specactor.cpu import torchvision_ops


class _NoMegatron(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "megatron":
            raise ModuleNotFoundError("megatron: not imported in an engine", name=fullname)
        return None


torchvision_ops.install()
sys.meta_path.insert(0, _NoMegatron())
