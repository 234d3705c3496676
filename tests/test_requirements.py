"""requirements/gpu.txt against what the installed SGLang and Megatron-core say that they need."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from specactor.parallel.devices import PROBES

ROOT = Path(__file__).parents[1]
GPU = ROOT / "requirements/gpu.txt"
OURS = {need.name: need for need in map(Requirement, (x for x in GPU.read_text().splitlines() if x[0] != "#"))}


def declared(package: str) -> dict[str, Requirement]:
    """By name what a package needs on Linux, extras for development included."""
    needs = map(Requirement, metadata.requires(package) or [])
    environment = {"sys_platform": "linux", "platform_machine": "x86_64", "extra": "dev"}
    return {need.name.replace("_", "-"): need for need in needs if not need.marker or need.marker.evaluate(environment)}


def allowed(need: Requirement) -> list[str]:
    """Versions that one of both sides names, as far as this one takes them."""
    every = [own for side in (OURS, declared("sglang"), declared("megatron-core")) for own in side.values()]
    named = {spec.version for other in every if other.name.replace("_", "-") == need.name for spec in other.specifier}
    return [version for version in sorted(named) if need.specifier.contains(version, prereleases=False)]


@pytest.mark.parametrize("package", ["sglang", "megatron-core"])
def test_gpu_pins_agree_with_what_the_engines_declare(package: str) -> None:
    theirs = declared(package)
    assert OURS[package].specifier.contains(metadata.version(package))
    shared = [name for name in OURS if name in theirs and theirs[name].specifier]
    assert shared
    for name in shared:
        versions = allowed(OURS[name])
        assert versions, f"{OURS[name]} takes no version that anyone names"
        for version in versions:
            assert theirs[name].specifier.contains(version, prereleases=True), f"{OURS[name]} against {theirs[name]}"


def test_gpus_get_what_sglang_and_megatron_name_for_them() -> None:
    assert {"torch", "sglang-kernel", "transformer-engine", "torch-memory-saver"} <= set(OURS)
    assert OURS["transformer-engine"].extras == {"core_cu13"}, "pip would compile others before there is a torch"
    [extra] = re.findall(r'"gpu": \["(.*)"\]', (ROOT / "setup.py").read_text())
    assert Requirement(extra) == OURS["transformer-engine"]


def test_what_is_compiled_afterwards_is_of_the_pinned_version() -> None:
    """As the page, the pins and the doctor have it."""
    files = ("docs/gpu.md", "requirements/gpu.txt", "specactor/doctor.py")
    [command] = {found for x in files for found in re.findall(r"--no-build-isolation '(.*)'", (ROOT / x).read_text())}
    need, pinned = Requirement(command), OURS["transformer-engine"]
    assert (need.specifier, need.extras) == (pinned.specifier, pinned.extras | {"pytorch"})


def test_the_doctor_looks_for_the_kernels_that_sglang_names() -> None:
    assert PROBES["sgl_kernel"][0] in declared("sglang")
