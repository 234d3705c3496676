"""Findings about this machine and a recipe, with remedies.

Nothing that may crash is imported: the doctor also works where SGLang or Megatron-core do not.
"""

from __future__ import annotations

import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specactor.config import Config
from specactor.config.rollout import check_attention, guarantee
from specactor.errors import ConfigError, SpecActorError
from specactor.parallel.devices import Devices, detect
from specactor.parallel.layout import ModelShape, check, longest_prompt, smallest_world
from specactor.replay.records import reach
from specactor.trainer import fusions

GIB = 2**30
MIN_DISK_BYTES = 2 * GIB  # room for checkpoints and the exported model of a small run
MIN_SHARED_BYTES = 128 * 2**20  # of /dev/shm, for SGLang and NCCL; weights travel in memory files, which have no mount
MIN_OPEN_FILES = 2**14  # of a rank among a thousand, which has several sockets for each
MIN_MEMORY_BYTES = 6 * GIB  # two trainer ranks and one engine of a tiny model


CPU = {
    "torch": "==2.13.0",
    "sglang": "==0.5.23",
    "transformers": "==5.19.0",
    "megatron-core": "==0.16.1",
    "mbridge": "==0.15.1",
}
# Versions that belong together; the last has neither TransformerEngine nor fa3: attention is Triton's
STACKS = {
    "CPU": CPU,
    "GPU": CPU | {"torch": "==2.14.1", "sglang-kernel": "==0.4.10", "transformer-engine": ">=2.9,<2.12"},
    "GPU, torch 2.11": CPU | {"torch": "==2.11.0", "transformers": "==5.17.*", "sglang-kernel": "==0.4.4"},
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    component: str
    found: str
    used: str = ""
    remedy: str = ""
    fatal: bool = False  # whether no run can start

    @classmethod
    def of(cls, component: str, found: str, ok: bool, remedy: str, *, used: str = "", fatal: bool = False) -> Finding:
        """Return a finding that has a remedy, and is `used` or `fatal`, unless it is `ok`."""
        if ok:
            return cls(component=component, found=found)
        return cls(component=component, found=found, used=used, remedy=remedy, fatal=fatal)


def examine(config: Config | None, environ: Mapping[str, str]) -> list[Finding]:
    devices = detect(environ)
    gpu = bool(devices.gpus)
    packages = [*pinned(), stack(gpu), plugin()]
    found = [_python(), *packages, *_hardware(devices), *_optional(devices), *_places(config), loopback()]
    if config and gpu:
        found.append(joined_kernels(config, devices.packages["transformer_engine"].works))
    if config and gpu:
        found += host_memory(config, len(devices.gpus), devices.memory_bytes)
    if config:
        replay = Finding(component="replay", found=reach(config).removeprefix("replay: "))
        found += [tokens(config, gpu=gpu), replay, *_recipe(config)]
    return found


def report(findings: list[Finding], console: Console) -> int:
    """Print a table; return the exit code, 0 when a run could start."""
    table = Table(title="specactor doctor", title_justify="left")
    for heading in ("", "component", "found", "used instead", "remedy"):
        table.add_column(heading, overflow="fold")
    for item in findings:
        mark = "[red]no[/]" if item.fatal else "[yellow]--[/]" if item.used else "[green]ok[/]"
        table.add_row(mark, *map(escape, (item.component, item.found, item.used, item.remedy)))
    console.print(table)
    fatal = [item for item in findings if item.fatal]
    for item in fatal:
        console.print(
            f"error: {item.component}: {item.found}. {item.remedy}", style="red", soft_wrap=True, markup=False
        )
    console.print("A run cannot start." if fatal else "A run can start.", style="bold")
    return 1 if fatal else 0


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    ok = (3, 11) <= sys.version_info[:2] < (3, 13)
    return Finding.of("Python", found, ok, "Use Python 3.11 or 3.12.", fatal=True)


def pinned() -> list[Finding]:
    """Compare required packages with this package's metadata, or `STACKS`."""
    findings = []
    for line in metadata.requires("specactor") or []:
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            version = "missing"
        tried = [versions[need.name] for versions in STACKS.values() if need.name in versions]
        ok = version != "missing" and any(_takes(wanted, version) for wanted in (str(need.specifier), *tried))
        exact = any(spec.operator == "==" for spec in need.specifier)
        if not ok or exact or need.name == "torch":
            findings.append(_requirement(need, version, ok))
    return findings


def _takes(wanted: str, version: str) -> bool:
    # A local part such as +cpu names a build of the same version.
    return SpecifierSet(wanted).contains(Version(version).public, prereleases=True)


def stack(gpu: bool) -> Finding:
    installed = {}
    for name in sorted({name for versions in STACKS.values() for name in versions}):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    for title, versions in STACKS.items():
        fits = all(name in installed and _takes(wanted, installed[name]) for name, wanted in versions.items())
        if fits and title.startswith("GPU" if gpu else "CPU"):
            return Finding(component="versions", found=title)
    listed = ", ".join(f"{name} {version}" for name, version in installed.items())
    return Finding(
        component="versions",
        found=listed,
        used="a set that was not tried together",
        remedy="See docs/gpu.md, or install requirements/gpu.txt or requirements/cpu.txt.",
    )


def tokens(config: Config, *, gpu: bool) -> Finding:
    try:
        check_attention(config.rollout.engine, gpu=gpu)
    except ConfigError as error:
        return _fault("attention", error)
    arithmetic, promise = guarantee(config.rollout.engine, gpu=gpu, dtype=config.model.dtype)
    return Finding(component="attention", found=f"{arithmetic}: {promise}")


def _fault(component: str, error: Exception) -> Finding:
    found, _, remedy = str(error).partition(". ")
    return Finding(component=component, found=found.removeprefix(f"{component}: "), fatal=True, remedy=remedy)


def joined_kernels(config: Config, transformer_engine: bool) -> Finding:
    present = fusions.present() | {"transformer_engine": transformer_engine}
    fields = fusions.fields(present, gpu=True, dtype=config.model.dtype, deterministic=config.train.deterministic)
    on, off = fusions.told(fields)
    # What is off by choice has no remedy; `_optional` has those of packages.
    return Finding(component="fusions", found=on, used=f"separate kernels for {off}" if off else "")


def _requirement(need: Requirement, version: str, ok: bool) -> Finding:
    flag = "" if need.name == "torch" else "--no-deps "
    remedy = f"{sys.executable} -m pip install {flag}'{need.name}{need.specifier}'"
    expected = "" if ok else f", expected {need.specifier}"
    return Finding.of(need.name, version + expected, ok, remedy, fatal=True)


def plugin() -> Finding:
    names = [point.name for point in metadata.entry_points(group="sglang.srt.plugins")]
    ok, remedy = "specactor" in names, f"{sys.executable} -m pip install --no-deps -e . (in the repository)"
    return Finding.of("SGLang plugin", "registered" if ok else "not registered", ok, remedy, fatal=True)


def _hardware(devices: Devices) -> list[Finding]:
    memory = devices.memory_bytes
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # ranks raise the soft limit to this one
    larger = f"Use a machine with at least {MIN_MEMORY_BYTES // GIB} GiB."
    more = f"Raise the hard limit to {MIN_OPEN_FILES} (ulimit -Hn, systemd's LimitNOFILE)."
    used, enough = "jobs of some hundred ranks", files >= MIN_OPEN_FILES
    findings = [
        Finding(component="CPU", found=f"{devices.cores} cores"),
        Finding.of("memory", f"{memory / GIB:.1f} GiB", memory >= MIN_MEMORY_BYTES, larger, fatal=True),
        Finding.of("open files", f"{files} for a process", enough, more, used=used),
    ]
    if not devices.gpus:
        return [*findings, Finding(component="GPU", found="none", used="CPU platform: gloo, float32, shared memory")]
    first = devices.gpus[0]
    text = f"{len(devices.gpus)} x {first.name}, {first.memory_bytes / GIB:.0f} GiB: NCCL, CUDA graphs"
    return [*findings, Finding(component="GPU", found=text)]


def _optional(devices: Devices) -> list[Finding]:
    """Try optional packages: one that is installed and broken may stop Megatron-core from importing."""
    gpu = bool(devices.gpus)
    instead = {
        "transformer_engine": (
            "PyTorch layers",
            "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]>=2.9,<2.12'",
        ),
        "apex": (
            "TransformerEngine's or PyTorch's Adam",
            "build NVIDIA's apex from its source; the one on PyPI is another project",
        ),
        "sgl_kernel": ("PyTorch reference of its operators", "pip install sglang-kernel"),
        "deepspeed": ("not needed", "pip install 'specactor[deepspeed]'"),
        "torch_memory_saver": ("engine memory stays allocated during training", "pip install torch-memory-saver"),
    }
    findings = []
    for module, package in devices.packages.items():
        used, install = instead[module]
        broken = bool(package.version) and not package.works
        harmful = broken and module in ("transformer_engine", "apex")
        if package.works:
            findings.append(Finding(component=module, found=package.version))
        elif harmful:
            text = f"{package.version}, but does not import: {package.problem}"
            remedy = f"{sys.executable} -m pip uninstall {module.replace('_', '-')} (Megatron-core fails with it)"
            findings.append(Finding(component=module, found=text, remedy=remedy, fatal=True))
        else:
            text = f"{package.version}, broken: {package.problem}" if broken else package.problem or "missing"
            worth_it = gpu or module == "deepspeed"
            findings.append(Finding(component=module, found=text, used=used, remedy=install if worth_it else ""))
    key, used = devices.wandb_key, "offline runs, in the run's folder"
    return [*findings, Finding.of("wandb key", "present" if key else "none", key, "wandb login", used=used)]


def _places(config: Config | None) -> list[Finding]:
    folder = _existing(Path(config.output_dir if config else "runs").absolute())
    disk = room("disk", folder, MIN_DISK_BYTES, "Free some room, or choose another --output-dir.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        remedy = "Give this user the right to write there, or choose another --output-dir."
        disk = Finding(component="disk", found=f"{folder} cannot be written to ({error})", fatal=True, remedy=remedy)
    found = [room("shared memory", Path("/dev/shm"), MIN_SHARED_BYTES, "Enlarge it (docker run --shm-size 1g)."), disk]
    return [*found, *checkpoints(config, shutil.disk_usage(folder).free)] if config else found


def checkpoints(config: Config, free_bytes: int) -> list[Finding]:
    """Compare what a run keeps with the disk; nothing where the model is unknown, which `_recipe` tells."""
    from specactor.planning.memory import checkpoint_bytes

    try:
        each = checkpoint_bytes(config)
    except SpecActorError:
        return []
    together = config.checkpoint.keep + 1  # the oldest is removed when the newest is whole
    return [
        Finding.of(
            "checkpoints",
            f"{together} of {each / GIB:.1f} GiB beside each other (draft models apart)",
            together * each <= free_bytes,
            "Free some, lower --checkpoint.keep, or choose another --output-dir.",
            used="the room that is there: a run ends where it is full",
        )
    ]


def host_memory(config: Config, devices: int, memory_bytes: int) -> list[Finding]:
    """Compare a host of so many devices with what the fewest ranks need there; nothing as in `checkpoints`."""
    from specactor.planning.memory import PHASES, host_memory_of

    ranks = smallest_world(config.parallel)
    try:
        needed = host_memory_of(config, ranks, devices)
    except SpecActorError:
        return []
    most = max(map(needed.of, PHASES))
    usual = max(needed.of(phase, without=("checkpoint",)) for phase in PHASES)
    return [
        Finding.of(
            "host memory",
            f"{usual / GIB:.0f} GiB needed, {most / GIB:.0f} at a checkpoint, by a host of {ranks} ranks in all, "
            "without processes' own",
            most <= memory_bytes,
            "Give the job all of the host's (Slurm: --mem=0), or use more hosts: specactor plan.",
            used=f"the {memory_bytes / GIB:.0f} that are there: the system ends a run that wants more",
        )
    ]


def room(component: str, folder: Path, need_bytes: int, remedy: str) -> Finding:
    if not folder.is_dir():
        return Finding(component=component, found=f"{folder} does not exist", fatal=True, remedy=remedy)
    free = shutil.disk_usage(folder).free
    ok = free >= need_bytes
    found = f"{free / GIB:.1f} GiB free in {folder}" + ("" if ok else f", expected {need_bytes / GIB:.2f} GiB")
    return Finding.of(component, found, ok, remedy, fatal=True)


def _existing(folder: Path) -> Path:
    return folder if folder.is_dir() or folder == folder.parent else _existing(folder.parent)


def loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as client, server.accept()[0] as peer:
                client.sendall(b"x")
                peer.settimeout(5)
                ok = peer.recv(1) == b"x"
        return Finding(component="loopback", found="works" if ok else "wrong data", fatal=not ok)
    except OSError as error:
        remedy = "Allow TCP on 127.0.0.1 in this container or firewall; torchrun and SGLang need it."
        return Finding(component="loopback", found=str(error), fatal=True, remedy=remedy)


def _recipe(config: Config) -> list[Finding]:
    findings, shape = [], None
    if config.model.tiny is None:
        try:
            shape = ModelShape.read(Path(config.model.path))
            kind = f"{shape.num_experts} experts" if shape.num_experts else "dense"
            findings.append(Finding(component="model", found=f"{config.model.path}: {shape.num_layers} layers, {kind}"))
        except (ConfigError, OSError, ValueError, KeyError) as error:
            findings.append(_fault("model", error))
    else:
        findings.append(Finding(component="model", found="a tiny model, made on the spot"))
    try:
        checks = list(_checks(config, shape))
    except ImportError as error:  # `pinned` says what is missing
        return [*findings, Finding(component="recipe", found="not checked", used=str(error))]
    for component, look in checks:
        try:
            look()
        except (SpecActorError, OSError) as error:
            findings.append(_fault(component, error))
    return findings


def _read_as_built(folder: Path) -> None:
    from specactor.trainer.model import read_hf_config

    try:
        read_hf_config(folder)
    except ValueError as error:  # transformers' own of a type that it does not know
        raise ConfigError.at("model.path", str(folder), "a model that transformers knows", str(error)) from None


def _checks(config: Config, shape: ModelShape | None) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what a run refuses before it starts an engine."""
    from specactor import hooks
    from specactor.data.dataset import check_source
    from specactor.data.tokenizer import VOCAB_SIZE
    from specactor.rollout.drafter_start import check_in_engines, check_tokenizers
    from specactor.rollout.sglang.engine_protocol import check_extra_args
    from specactor.rollout.speculation.registry import check_drafters

    if shape is not None:
        yield "model", partial(_read_as_built, Path(config.model.path))
    policy = ModelShape.of_tiny(config.model.tiny, VOCAB_SIZE) if config.model.tiny else shape
    if policy is not None:
        yield "layout", partial(check, config, smallest_world(config.parallel), policy)
        yield "lengths", partial(longest_prompt, config, policy.max_position)
        yield "draft model", partial(check_in_engines, config, policy)
    yield "draft model", partial(check_tokenizers, config)
    yield "drafters", partial(check_drafters, config.rollout.speculation)
    yield "engine", partial(check_extra_args, config.rollout.engine)
    yield "hooks", partial(hooks.check, config)
    data, count = config.data, config.eval.problems
    yield "data.train", partial(check_source, data.train_source)
    yield from (("data.mix", partial(check_source, source)) for source in data.mixed_sources)
    yield from (("data.eval", partial(check_source, s)) for s in (data.eval_sources(count) if count else {}).values())
