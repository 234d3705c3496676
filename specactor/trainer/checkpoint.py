"""Checkpoints of all training state, in folders named ``step-000010``.

Invariants: a folder is whole: it gets its name last, after its files and the step's metrics are on disk; sizes and
digests are checked before anything is loaded; all ranks save and load, or all raise; after `load` under the same layout
in float32, training goes on bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specactor.errors import CheckpointError, PeerFailedError
from specactor.parallel.collective import Collective
from specactor.parallel.layout import experts_in

if TYPE_CHECKING:
    from specactor.trainer.policy import PolicyTrainer

FORMAT = 2
_CRITIC = "critic"
"""The critic's folder in a checkpoint."""
_NAME = re.compile(r"step-(\d{6,})")
_MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "tie_word_embeddings",
)


def latest(root: Path) -> Path | None:
    """Return the newest whole checkpoint; remove an interrupted one. For one rank, which owns the run."""
    if not root.is_dir():
        return None
    _remove_unfinished(root)
    return next(reversed(_checkpoints(root).values()), None)


def write(
    trainer: PolicyTrainer,
    root: Path,
    step: int,
    state: dict[str, Any],
    *,
    keep: int = 2,
    beside: Callable[[Path], None] = lambda folder: None,
) -> Callable[[], Path]:
    """Write a checkpoint under a temporary name; return the function that commits it, and removes all but the newest
    `keep`. Both are collective. `state` is JSON, rank 0's is kept; `beside` adds files on each. Raises
    CheckpointError where the disk fails."""
    from specactor.trainer import model_files

    collective = Collective()
    target = root / f"step-{step:06d}"
    folder = target.with_name(target.name + ".tmp")
    first = dist.get_rank() == 0

    def prepare() -> None:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    failed = f"{target}: could not be written"
    _on_all(collective, failed, prepare)
    model_files.save(trainer.chunks, trainer.optimizer, folder)
    if trainer.critic is not None:
        _on_all(collective, failed, lambda: (folder / _CRITIC).mkdir(exist_ok=True))
        model_files.save(trainer.critic.chunks, trainer.critic.optimizer, folder / _CRITIC)
    beside(folder)
    _on_all(collective, failed, lambda: _save_rng(folder, trainer.device))
    names = _all_files(folder, collective, failed)
    files = _on_all(collective, failed, lambda: _digests(folder, names))
    digests = {name: digest for part in collective.gather(files, dict[str, str]) for name, digest in part.items()}

    def commit() -> Path:
        if first:
            about = {"format": FORMAT, "step": step, "state": state, "files": digests} | _identity(trainer)
            (folder / "state.json").write_text(json.dumps(about))
            _fsync(folder / "state.json")
            _fsync(folder)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(folder, target)
            _fsync(root)
            prune(root, step, keep)
        return target

    return partial(_on_all, collective, failed, commit)


def prune(root: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` up to `step`, and those of later steps, which a resume from an earlier one
    leaves. For one rank, which owns the run."""
    found = _checkpoints(root)
    history = [path for number, path in found.items() if number <= step]
    for other in {*found.values()} - {*history[-keep:]}:
        with suppress(OSError):  # it is tried again after the next one
            os.rename(other, other.with_name(other.name + ".tmp"))  # what an interruption leaves of it is not whole
    _remove_unfinished(root)


def _remove_unfinished(root: Path) -> None:
    for stale in root.glob("step-*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)


def load(trainer: PolicyTrainer, path: Path) -> dict[str, Any]:
    """Restore `trainer`; return the caller's state. Collective. Under another layout random states stay: nothing in the
    policy draws from them. Raises CheckpointError for a checkpoint that is missing, damaged or unfit; the trainer is
    then unchanged, unless Megatron failed half-way."""
    from specactor.trainer import model_files

    collective = Collective()
    about = _on_all(collective, "", lambda: _read(trainer, path))
    model_files.load(trainer.chunks, trainer.optimizer, path)
    if trainer.critic is not None:
        model_files.load(trainer.critic.chunks, trainer.critic.optimizer, path / _CRITIC)
    if about["layout"] == asdict(trainer.layout):  # else they do not fit; nothing in the policy draws from them
        _on_all(collective, f"{path}: could not be loaded", lambda: _load_rng(path, trainer.device))
    return dict(about["state"])


def _on_all(collective: Collective, what: str, work: Callable[[], Any]) -> Any:
    with failing_on_all(what):
        return collective.together("checkpoint", work)


@contextmanager
def failing_on_all(what: str) -> Iterator[None]:
    """Raise CheckpointError on all ranks where the disk of one fails in `Collective.together`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what}: {error}. Free disk space, or use another folder.") from error
    except PeerFailedError as error:
        raise CheckpointError(str(error)) from error


def _checkpoints(root: Path) -> dict[int, Path]:
    """Return those with a name, by step, in order."""
    return dict(sorted((int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))))


def _identity(trainer: PolicyTrainer) -> dict[str, Any]:
    hf, engine, dtype = trainer.policy.bridge.hf_config, trainer.config.rollout.engine, trainer.config.model.dtype
    experts = experts_in(hf.to_dict()) or None
    return {
        "layout": asdict(trainer.layout),
        "virtual_pipeline": trainer.config.parallel.virtual_pipeline,
        "model": {name: getattr(hf, name, None) for name in _MODEL_FIELDS} | {"num_experts": experts, "dtype": dtype},
        "optimizer_state": trainer.config.train.optimizer_state,
        "critic": trainer.critic is not None,
        "attention": engine.attention_on(gpu=trainer.device.type == "cuda"),
        "device": trainer.device.type,
    }


def _read(trainer: PolicyTrainer, path: Path) -> dict[str, Any]:
    file = path / "state.json"
    if not path.is_dir() or not file.is_file():
        there = "no such folder" if not path.is_dir() else "a folder without state.json"
        raise CheckpointError(
            f"{path}: got {there}, expected a checkpoint folder named step-<number>. Give one, or use --resume auto."
        )
    try:
        about: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"{file}: is not JSON ({error}). The checkpoint is damaged: use an earlier one."
        ) from error
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: got format {about.get('format')}, expected {FORMAT}. Use the version that wrote it."
        )
    _check_identity(about, _identity(trainer), path)
    _check_files(about["files"], path)
    return about


def _check_identity(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    for name, value in now["model"].items():
        if saved["model"].get(name) != value:
            raise CheckpointError(
                f"{path}: is of another model: {name} is {saved['model'].get(name)}, expected {value}. "
                "Give --model.path the model that the checkpoint was trained from."
            )
    if saved["device"] == "cpu":  # once only what was asked for was kept
        saved = saved | {"attention": {"attention_backend": "torch_native"} | saved["attention"]}
    old, new = saved["layout"]["expert"], now["layout"]["expert"]
    if now["model"]["num_experts"] and (old == 1) != (new == 1):
        can = "1" if old == 1 else f"> 1 (a divisor of {now['model']['num_experts']} experts)"
        raise CheckpointError(
            f"{path}: was saved with parallel.expert = {old} and cannot be loaded with {new}: Megatron keeps the "
            f"experts' optimizer state apart only if parallel.expert > 1. Layouts with --parallel.expert {can} would "
            "work, with any tensor, pipeline, context and data parallelism."
        )
    if now["critic"] and not saved["critic"]:
        raise CheckpointError(
            f"{path}: was saved without a critic, expected one with algorithm.advantage = gae. Go on with the "
            "advantage it was saved with, or train its exported model in a new run."
        )
    for name, before, expected, why in (
        (
            "optimizer_state",
            f"with train.optimizer_state = {saved['optimizer_state']}",
            now["optimizer_state"],
            "the updates would be those of two optimizers, since each rounds differently. Go on with the one it was "
            "saved with",
        ),
        (
            "attention",
            f"with {saved['attention'] or 'a backend that SGLang chose'} for attention",
            now["attention"],
            "the tokens would be those of two runs, since attention backends round differently. Go on with the one it "
            "was saved with",
        ),
        (
            "device",
            f"on device {saved['device']}",
            now["device"],
            "the tokens would be those of two runs, since each rounds differently. Go on where it was saved, on CPUs "
            "or on GPUs",
        ),
    ):
        if saved[name] != now[name]:
            raise CheckpointError(
                f"{path}: was saved {before}, expected {expected}: {why}, or train its exported model in a new run."
            )


def _share(names: list[str]) -> list[str]:
    """Every file is read by one rank."""
    return sorted(names)[dist.get_rank() :: dist.get_world_size()]


def _all_files(folder: Path, collective: Collective, failed: str) -> list[str]:
    """Return what any rank sees in the folder: a host may know it as it was half a minute ago, but for its own files.
    Collective."""
    own = _on_all(
        collective, failed, lambda: [f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()]
    )
    return sorted({*chain(*collective.gather(own, list[str]))})


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the digests of this rank's share of the files, which are then on the disk."""
    names = _share(names)
    for name in names:
        _fsync(folder / name)
        _fsync((folder / name).parent)
    return {name: _digest(folder / name) for name in names}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return f"{file.stat().st_size} {hashlib.file_digest(stream, hashlib.blake2b).hexdigest()[:32]}"


def _check_files(files: dict[str, str], path: Path) -> None:
    for name in _share(list(files)):
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing. The checkpoint is damaged: use an earlier one.")
        got, expected = _digest(file), files[name]
        if got != expected:
            sizes = f"{got.split()[0]} bytes, expected {expected.split()[0]}"
            what = (
                f"got {sizes}"
                if got.split()[0] != expected.split()[0]
                else "its content has changed since it was saved"
            )
            raise CheckpointError(f"{file}: {what}. The checkpoint is damaged: use an earlier one.")


def _save_rng(folder: Path, device: torch.device) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":  # by name: this thread's own device is the host's first
        states["cuda"] = torch.cuda.get_rng_state(device)
    states |= {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states = {name: state.cpu().clone() for name, state in states.items()}
    save_file(states, folder / f"rng-{dist.get_rank():05d}.safetensors")


def _load_rng(folder: Path, device: torch.device) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = load_file(folder / f"rng-{dist.get_rank():05d}.safetensors")
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    tracked = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    get_cuda_rng_tracker().set_states(tracked)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
