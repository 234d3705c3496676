"""What packages for GPUs have, by the list of `lib/gpu_packages.py`, against what is taken of them here."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from specactor.doctor import STACKS
from tests.lib.gpu_packages import ASKING, VERSIONS, installed, read, wanted
from tests.lib.wheel_names import asked, missing, names_of
from tests.test_requirements import OURS

REMAKE = "python -m tests.lib.gpu_packages FOLDER makes the list again"
FALLBACKS = {
    "transformer_engine.pytorch.attention._SplitAlongDim": "split by PyTorch",
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb": "of older versions",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8": "of older versions",
    "transformer_engine.pytorch.cpp_extensions.rmsnorm_fwd": "reached, not imported, and for inference alone",
    "transformer_engine.pytorch.module.base.get_workspace": "routers multiply by PyTorch, in float32",
    "transformer_engine.pytorch.cpu_offload_v1": "cpu_offload",
    "transformer_engine.pytorch.tensor.utils.post_all_gather_processing": "fp8 alone",
}
"""What TransformerEngine lacks of Megatron's names, and what Megatron then does."""


def test_the_list_is_of_the_versions_that_are_pinned() -> None:
    found = read()
    for name, version in found["asked by"].items():
        assert metadata.version(name) == version, REMAKE
    for name in ASKING:
        assert tuple(found[name]) == VERSIONS[name], REMAKE
    for stack in STACKS.values():
        for name in {*VERSIONS} & {*stack} if "sglang-kernel" in stack else ():
            assert [*SpecifierSet(stack[name]).filter(VERSIONS[name])], (name, REMAKE)
    newest, oldest = VERSIONS["transformer-engine"]
    pinned = OURS["transformer-engine"].specifier
    assert {spec.version for spec in pinned if spec.operator == ">="} == {oldest.removesuffix(".0")}, REMAKE
    assert {spec.version for spec in pinned if spec.operator == "<"} == {f"2.{Version(newest).minor + 1}"}, REMAKE


@pytest.mark.parametrize("name", ASKING)
def test_every_name_that_is_taken_is_there_or_known_to_be_absent(name: str) -> None:
    known = read()[name][VERSIONS[name][0]]
    there = {*known["modules"], *known["classes"], *known["others"], *known["absent"]}
    taken = {f"{module}.{of}".rstrip(".*") for module, of in wanted(name)}
    assert len(taken) > 90
    known_owners = there - {*known["modules"]}  # what follows a class or a constant is not looked at
    assert {path for path in taken - there if path.rpartition(".")[0] not in known_owners} == set(), REMAKE


def test_megatron_has_another_way_for_each_name_that_transformer_engine_lacks() -> None:
    found = read()["transformer-engine"]
    assert {name for version in found.values() for name in version["absent"]} == FALLBACKS.keys()


def test_kernels_find_their_symbols_in_the_torch_that_is_pinned_beside_them() -> None:
    pairs = [(stack["sglang-kernel"], stack["torch"]) for stack in STACKS.values() if "sglang-kernel" in stack]
    assert len(pairs) == 2
    found = read()["sglang-kernel"]
    for kernel, torch in pairs:
        of = {version.removeprefix("=="): version for version in (kernel, torch)}
        kernel, torch = of
        assert found[kernel]["symbols of torch"][torch] > 100
        assert found[kernel]["symbols that torch lacks"][torch] == []
        (other,) = {*VERSIONS["torch"]} - {torch}
        assert found[kernel]["symbols that torch lacks"][other], "pins that were crossed would be seen"


def test_a_name_that_moved_is_seen() -> None:
    """In a package of two modules, by a star, a relative import, an attribute and a branch that is not taken here."""
    package = {
        "lib/__init__.py": "from lib.a import *\nfrom . import b\nif False:\n    hidden = 1",
        "lib/a.py": "class Kept: ...\ndef moved(): ...\n_private = 1",
        "lib/b/__init__.py": "from ..a import Kept as Renamed",
    }
    user = {
        "user.py": "import lib as l\nfrom lib.b import Renamed\nfrom lib import moved, hidden\nl.b.Renamed.x\nl.a.Kept"
    }
    assert missing(asked(user, "lib"), names_of(package)) == {}
    package["lib/a.py"] = package["lib/a.py"].replace("moved", "elsewhere")
    assert [*missing(asked(user, "lib"), names_of(package))] == ["lib.moved"]
    package["lib/a.py"] = package["lib/a.py"].replace("Kept", "Other")
    assert {*missing(asked(user, "lib"), names_of(package))} == {"lib.moved", "lib.a.Kept"}


def test_megatrons_own_sources_are_read() -> None:
    renamed = {
        path: text.replace("moe_unpermute,", "moe_unpermute_of_tomorrow,")
        for path, text in installed("megatron").items()
        if path.endswith("extensions/transformer_engine.py")
    }
    known = read()["transformer-engine"][VERSIONS["transformer-engine"][0]]
    taken = {f"{module}.{name}" for module, name in asked(renamed, "transformer_engine")}
    assert "transformer_engine.pytorch.permutation.moe_unpermute_of_tomorrow" in taken - {*known["others"]}
