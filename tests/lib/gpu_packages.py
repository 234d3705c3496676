"""What packages that only GPUs need have, as a list in `gpu_packages.json`: names that SGLang and Megatron-core take of
them, and symbols that their libraries take of torch. Nothing of it is installed where there is no GPU.

`python -m tests.lib.gpu_packages FOLDER` makes the list again. It downloads wheels of 2 GB into FOLDER, once.
"""

from __future__ import annotations

import importlib.machinery
import json
import re
import subprocess
import sys
import types
import zipfile
from importlib import metadata, util
from pathlib import Path
from typing import Any

from tests.lib.wheel_names import asked, missing, names_of

LIST = Path(__file__).with_suffix(".json")
VERSIONS = {
    "sglang-kernel": ("0.4.10", "0.4.4"),
    "torch": ("2.14.1", "2.11.0"),
    "transformer-engine": ("2.11.0", "2.9.0"),
}
"""The first of each is what requirements/gpu.txt gets; the others are of `doctor.STACKS`, or its oldest."""
ASKING = {"sglang-kernel": ("sgl_kernel", "sglang"), "transformer-engine": ("transformer_engine", "megatron mbridge")}
"""Distribution -> (its package, the packages that take names of it)."""
OF_TORCH = re.compile(r"c10|2at|5torch|6caffe2|^aoti_|^torch_")
"""Symbols that torch would have, if anyone."""
PLATFORMS = ["manylinux2014_x86_64", "manylinux_2_28_x86_64"]


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(LIST.read_text())
    return found


def installed(packages: str) -> dict[str, str]:
    """Return the Python files of installed packages; SGLang's without what no engine of ours runs."""
    files = {}
    for package in packages.split():
        spec = util.find_spec(package)
        assert spec is not None
        for root in map(Path, spec.submodule_search_locations or ()):
            for file in root.rglob("*.py"):
                path = str(file.relative_to(root.parent))
                if not path.startswith(("sglang/multimodal_gen", "sglang/test", "sglang/benchmark")):
                    files[path] = file.read_text()
    return files


def wanted(distribution: str) -> dict[tuple[str, str], str]:
    """Return the names that installed packages take of one that is not: (module, name) -> the first place."""
    package, users = ASKING[distribution]
    return asked(installed(users), package)


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{cls.__name__}.{name}")


class StandIn(types.ModuleType):
    """A function, constant or module that can be imported and looked into; if it is called it says which it was."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(self.__name__)


def stand_in(distribution: str) -> None:
    """Let the package be imported in this process, with the names of the list and no others."""
    version = VERSIONS[distribution][0]
    known = read()[distribution][version]
    made: dict[str, types.ModuleType] = {}
    for name in known["modules"]:
        module = sys.modules[name] = made[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module)["__version__"] = version
    for kind, make in (
        ("classes", lambda path: _AnyAttribute(path.rpartition(".")[2], (), {})),
        ("others", StandIn),
        ("modules", made.__getitem__),
    ):
        for path in known[kind]:
            module_name, _, name = path.rpartition(".")
            if module_name in made and name != "__version__":
                setattr(made[module_name], name, make(path))


def main(folder: Path) -> None:
    wheels = {(name, version): _wheel(folder, name, version) for name, all in VERSIONS.items() for version in all}
    found: dict[str, Any] = {
        "asked by": {name: metadata.version(name) for name in ("sglang", "megatron-core", "mbridge")}
    }
    for name in ASKING:
        found[name] = {version: _names(name, wheels[name, version]) for version in VERSIONS[name]}
        for version in VERSIONS[name][1:]:  # what these have beside is of no use
            found[name][version] = {"absent": found[name][version]["absent"]}
    exported = {version: _exported(folder, wheels["torch", version]) for version in VERSIONS["torch"]}
    for version in VERSIONS["sglang-kernel"]:
        libraries = _libraries(folder, wheels["sglang-kernel", version], r"^sgl_kernel/.*\.so$")
        needed = {symbol for library in libraries for symbol in _symbols(library, "--undefined-only")}
        found["sglang-kernel"][version] |= {
            "symbols of torch": {torch: len(needed & there) for torch, there in exported.items()},
            "symbols that torch lacks": {
                torch: sorted(symbol for symbol in needed - there if OF_TORCH.search(symbol))
                for torch, there in exported.items()
            },
        }
    LIST.write_text(json.dumps(found, indent=1) + "\n")


def _wheel(folder: Path, name: str, version: str) -> Path:
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        of = ["--only-binary=:all:", "--python-version=3.11", *(f"--platform={platform}" for platform in PLATFORMS)]
        command = ["pip", "download", "--quiet", "--no-deps", *of, f"--dest={folder}", f"{name}=={version}"]
        subprocess.run([sys.executable, "-m", *command], check=True)
    (wheel,) = folder.glob(pattern)
    return wheel


def _sources(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if name.endswith(".py") and "/jax/" not in name]
        return {name: file.read(name).decode() for name in names}


def _names(distribution: str, wheel: Path) -> dict[str, Any]:
    """Return what of the asked names a wheel has, classes apart from others, and what it has not."""
    names, asking = names_of(_sources(wheel)), wanted(distribution)
    absent = missing(asking, names)
    there = {f"{module}.{name}" for module, name in asking if name and name != "*"} - set(absent)
    classes = {name for name in there if (at := name.rpartition("."))[2] in getattr(names.get(at[0]), "classes", ())}
    modules = {module for module, _ in asking} & set(names) | (there & set(names))
    return {
        "modules": sorted(modules),
        "classes": sorted(classes),
        "others": sorted(name for name in there - classes - modules if name.rpartition(".")[0] in names),
        "absent": sorted(absent),
    }


def _libraries(folder: Path, wheel: Path, pattern: str) -> list[Path]:
    target = folder / wheel.stem
    with zipfile.ZipFile(wheel) as file:
        return [Path(file.extract(name, target)) for name in file.namelist() if re.search(pattern, name)]


def _symbols(library: Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}


def _exported(folder: Path, wheel: Path) -> set[str]:
    libraries = _libraries(folder, wheel, r"^torch/lib/lib(torch\w*|c10\w*)\.so$")
    return {symbol for library in libraries for symbol in _symbols(library, "--defined-only")}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
