"""Script: imports the branch that SGLang takes with CUDA, with our plugin, and looks there for each name of SGLang that
this package uses. Prints JSON: what is missing, before and after names are renamed.

A driver with the symbols that Triton asks for is compiled; it has eight devices and refuses everything else.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.lib import hopper
from tests.lib.wheel_names import asked, statements, within

OURS = Path(__file__).parents[3] / "specactor"
FILES = [path for path in (OURS / "rollout/sglang").glob("*.py") if path.stem != "kernels"]
MODULES = (
    "entrypoints.engine",
    "managers.scheduler",
    "managers.tp_worker",
    "model_executor.runner.decode_cuda_graph_runner",
    "layers.attention.triton_backend",
    "models.llama_eagle3",
    "models.mimo_mtp",
    "models.qwen3",
    "models.qwen3_moe",
)
"""What an engine of ours imports, of `sglang.srt`."""


def make_driver(folder: Path) -> None:
    """Compile libcuda.so.1 and let this process, and Triton, find it."""
    from triton.backends import nvidia

    source = (Path(nvidia.__path__[0]) / "driver.c").read_text()
    names = set(re.findall(r"\bcu[A-Z]\w+", source)) - {"cuInit", "cuDeviceGetCount"}
    code = "int cuInit(unsigned flags) { return 0; }\nint cuDeviceGetCount(int *count) { *count = 8; return 0; }\n"
    code += "".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(names))
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=code, text=True, check=True)
    ctypes.CDLL(str(folder / "libcuda.so.1"))  # what is linked to that name finds it
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def missing_imports(trees: dict[str, ast.Module]) -> set[str]:
    """Return what our files import of SGLang, or reach through its modules and classes, and is not there."""
    lacks = set()
    for module, name in asked({path: ast.unparse(tree) for path, tree in trees.items()}, "sglang"):
        try:
            owner = pkgutil.resolve_name(module)
        except (ImportError, AttributeError):
            lacks.add(f"{module}.{name}")
            continue
        if name and not hasattr(owner, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                lacks.add(f"{module}.{name}")
    return lacks


def missing_hooks() -> set[str]:
    """Return targets of our hooks that SGLang's registry would not find; it would only log them."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    lacks = set()
    for target in HookRegistry._hooks:
        owner, _, name = target.rpartition(".")
        try:
            getattr(pkgutil.resolve_name(owner), name)
        except (ImportError, AttributeError):
            lacks.add(target)
    return lacks


def missing_overrides(trees: dict[str, ast.Module], texts: list[str]) -> set[str]:
    """Return methods of our subclasses of SGLang's classes for which nobody asks: base class, SGLang, or we."""
    called = {name for tree in trees.values() for name in attributes(tree, inherited=False)}
    lacks = set()
    for tree in trees.values():
        imports = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and within(node.module or "", "sglang")
            for alias in node.names
        }
        for node in ast.walk(tree):
            bases = [imports[b.id] for b in getattr(node, "bases", ()) if isinstance(b, ast.Name) and b.id in imports]
            for base in map(pkgutil.resolve_name, bases):
                own = {part.name for part in getattr(node, "body", ()) if isinstance(part, ast.FunctionDef)}
                for name in own - called - set(dir(base)):
                    if not any(f".{name}(" in text or f'"{name}"' in text for text in texts):
                        lacks.add(f"{base.__name__}.{name}")
    return lacks


def foreign_names(trees: dict[str, ast.Module]) -> set[str]:
    """Return names that our files reach on objects of SGLang."""
    own = {name for path in OURS.rglob("*.py") for name in defined(ast.parse(path.read_text()))}
    elsewhere = {"eagle_config", "target_hidden_size", "_get_default_store"}  # in models' configurations, and in torch
    return {name for tree in trees.values() for name in attributes(tree)} - own - of_others(trees.values()) - elsewhere


def missing_fields(foreign: set[str], texts: list[str]) -> set[str]:
    """Return those of the names that no loaded file of SGLang defines."""
    lacks = set(foreign)
    for text in texts:
        if lacks & set(re.findall(r"\w+", text)):
            lacks -= set(defined(ast.parse(text)))
    return lacks


def attributes(tree: ast.AST, *, inherited: bool = True) -> Iterator[str]:
    """Yield each name that is reached by a dot, or by getattr and its like; those of super() if `inherited`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if inherited or ast.unparse(node.value) != "super()":
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield str(name.value)


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield each name that objects of this file can have: methods, fields, what is set on them; no local variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, ast.ClassDef | ast.Module):
            for part in statements(node.body):
                if isinstance(part, ast.Assign | ast.AnnAssign):
                    for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                        yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def of_others(trees: Iterable[ast.Module]) -> set[str]:
    """Return names that objects of Python, torch and other packages have, as far as our files import them."""
    modules = {"builtins", "msgspec.json", "torch", "torch.distributed", "torch.nn"}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module or "")
    names: set[str] = set()
    for name in modules:
        if not within(name, "sglang") and not within(name, "specactor"):
            module = importlib.import_module(name)
            names |= set(dir(module))
            names |= {part for value in vars(module).values() if inspect.isclass(value) for part in dir(value)}
    return names


def stand_in_for_memory_saver() -> None:
    """As much of torch-memory-saver as is asked for when it is imported."""
    module: Any = ModuleType("torch_memory_saver")
    module.__spec__, module.torch_memory_saver = ModuleSpec(module.__name__, None), SimpleNamespace()
    sys.modules[module.__name__] = module


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_driver(Path(folder))
        os.environ["SGLANG_PLUGINS"] = "specactor"
        stand_in_for_memory_saver()
        hopper.install()
        for module in MODULES:
            importlib.import_module(f"sglang.srt.{module}")
        found = look()
    print(json.dumps(found))


def look() -> dict[str, Any]:
    import torch
    import triton
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import is_cuda

    assert torch.cuda.is_available()
    saver = sys.modules["torch_memory_saver"].torch_memory_saver
    importlib.import_module("sglang.srt.debug_utils.dumper")
    modes = [saver.hook_mode]
    load_plugins()
    modes.append(saver.hook_mode)
    hooks = [len(HookRegistry._hooks), len(HookRegistry._patched)]
    trees = {str(path): ast.parse(path.read_text()) for path in FILES}
    modules = [module for name, module in list(sys.modules.items()) if within(name, "sglang")]
    files = [file for module in modules if (file := getattr(module, "__file__", None) or "").endswith(".py")]
    texts = [Path(file).read_text() for file in files]
    foreign = foreign_names(trees)
    return {
        "cuda": is_cuda(),
        "memory saver": modes,
        "triton": str(triton.runtime.driver.active.get_current_target()),
        "files": len(files),
        "hooks": hooks,
        "names": len(foreign),
        "missing": missing(trees, foreign, texts),
        "after renaming": renamed(trees, foreign, texts),
    }


def missing(trees: dict[str, ast.Module], foreign: set[str], texts: list[str]) -> list[str]:
    parts = (missing_imports(trees), missing_hooks(), missing_overrides(trees, texts), missing_fields(foreign, texts))
    return sorted(set().union(*parts))


def renamed(trees: dict[str, ast.Module], foreign: set[str], texts: list[str]) -> list[str]:
    """Return what is missing in a next version of SGLang: an import, a hook's target, a method of a base class and a
    field have other names; and what its import says of a kernel that has another name."""
    import sgl_kernel
    from sglang.srt.layers import activation, sampler
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.managers import io_struct

    del io_struct.RpcReqInput, sampler.Sampler._sample_from_probs
    for name in ("init_forward_metadata_out_graph", "kv_index_translator"):
        texts = [re.sub(rf"\b{name}\b", f"{name}_of_tomorrow", text) if name in text else text for text in texts]
    for kind in triton_backend.TritonAttnBackend.__mro__:
        if "init_forward_metadata_out_graph" in vars(kind):
            del kind.init_forward_metadata_out_graph
    found = missing(trees, foreign, texts)
    del sgl_kernel.silu_and_mul
    try:
        importlib.reload(activation)
    except ImportError as error:
        found.append(str(error).partition(" (")[0])
    return found


if __name__ == "__main__":
    main()
