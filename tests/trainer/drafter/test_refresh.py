"""The draft model in a run: it learns, is pushed, is saved; whatever goes wrong costs speed alone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specactor.config import SpeculationConfig
from specactor.errors import CheckpointError, ConfigError, PeerFailedError
from specactor.parallel.collective import Collective
from specactor.rollout import drafter_pool
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.drafter_pool import DrafterPool
from specactor.trainer import checkpoint
from specactor.trainer.drafter import head, init, recorder
from specactor.trainer.drafter.losses import Batch
from specactor.trainer.drafter.refresh import FOLDER, Distillation, left_behind
from specactor.trainer.drafter.train import DrafterTrainer
from specactor.trainer.drafter.updates import PlainUpdater, diverged
from specactor.types import TrainSequence
from specactor.weights_sync.draft_push import DraftSender
from specactor.weights_sync.messages import DraftWeights
from tests.rollout.decoupled.test_supervisor import child_of, make_drafter_spec
from tests.rollout.test_drafter_pool import wait_until
from tests.trainer.drafter import cases
from tests.trainer.drafter.policy_cases import SEQUENCES
from tests.trainer.drafter.refresh_cases import UPDATES, Engine, Processes, World, config

__all__ = ["make_drafter_spec"]


@pytest.fixture
def world(collective: Collective, draft_dir: Path) -> World:
    return World(collective, draft_dir)


def test_every_refresh_is_a_version_that_all_who_draft_get(world: World) -> None:
    before = world.weights()
    assert world.held() != before
    for number in (1, 2):
        metrics = world.step(number)
        assert metrics["drafter/version"] == metrics["drafter/oldest_version"] == number
        assert (metrics["drafter/refreshed"], metrics["drafter/updates"]) == (1, UPDATES)
        assert world.engines[0].versions == list(range(1, number + 1))
        assert world.processes.version == number
        assert world.held() == world.weights() != before
    assert world.notes == []


LEARNS = "refresh save load is_finite"


def diverging(self: DrafterTrainer | None, **_: Any) -> Any:
    raise diverged("loss", torch.nan)


def test_a_gpu_has_the_draft_model_only_while_it_learns(
    collective: Collective, draft_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else reads it in host memory: the engines have the device then. What the host's one thread would take long
    for is done before: its numbers are looked at, and rounded to be sent."""
    events: list[str] = []

    def note(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def noted(*args: Any, **named: Any) -> Any:
            events.append(name)
            return real(*args, **named)

        monkeypatch.setattr(kind, name, noted)

    def happened() -> list[str]:
        seen = [*events]
        events.clear()
        return seen

    for kind, names in ((PlainUpdater, "offload reload"), (DrafterTrainer, LEARNS), (DraftSender, "pack")):
        for name in names.split():
            note(kind, name)
    made = World(collective, draft_dir)
    assert happened() == ["is_finite", "offload"]
    made.step(1)
    assert happened() == ["reload", "refresh", "is_finite", "is_finite", "pack", "offload"]
    made.it.save(tmp_path)
    assert happened() == ["save"]
    made.it.load(tmp_path)
    assert happened() == ["reload", "load", "is_finite", "pack", "offload"]
    made.step(10)
    assert "reload" not in happened(), "nothing is learned from the last step"
    monkeypatch.setattr(DrafterTrainer, "refresh", lambda self, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.step(2)
    assert happened() == ["reload"], "other ranks may be in a collective: nothing is waited for"
    made.it.drafter.offload()
    monkeypatch.setattr(DrafterTrainer, "refresh", diverging)
    happened()
    assert made.step(3)["drafter/failed"]
    assert happened() == ["reload", "is_finite", "offload"]


def test_a_version_is_pushed_once_and_to_engines_that_are_new(world: World) -> None:
    world.step(1)
    assert world.it.push()["drafter/pushed_bytes"] == 0
    world.engines = [Engine()]
    assert world.it.push()["drafter/pushed_bytes"] > 0
    assert world.engines[0].versions == [1]
    assert world.held() == world.weights()


def test_a_rank_without_anybody_that_drafts_keeps_no_weights_to_hand_over(
    collective: Collective, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be as large as the draft model, in locked memory, on every rank of a host."""
    world = World(collective, draft_dir)
    others = World(collective, draft_dir)
    others.engines = []
    monkeypatch.setattr(others.processes, "oldest_version", lambda: None)
    monkeypatch.setattr(others.processes, "renew", lambda weights: pytest.fail("it has none"))
    others.it._hands_over = False
    assert others.step(1)["drafter/version"] == world.step(1)["drafter/version"] == 1
    assert others.it._packed is None
    assert others.it._sender._buffer is None
    assert others.weights() == world.weights()
    others.engines = [Engine()]  # one that was dead whenever it was looked at
    assert others.it.push()["drafter/oldest_version"] == 0
    monkeypatch.setattr(others.processes, "renew", lambda weights: ([], 0.0))
    others.step(2)
    assert others.engines[0].versions == [2]


def test_all_ranks_gather_the_weights_as_often(
    collective: Collective, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ZeRO stage 3 each time is collective: a rank without anybody that drafts would be alone in one after a
    refresh that made no new version, and wait for ever."""
    real, asked = DrafterTrainer.named_weights, list[DrafterTrainer]()

    def noted(self: DrafterTrainer) -> Any:
        asked.append(self)
        return real(self)

    world, others = World(collective, draft_dir), World(collective, draft_dir)
    monkeypatch.setattr(DrafterTrainer, "named_weights", noted)
    others.engines = []
    monkeypatch.setattr(others.processes, "oldest_version", lambda: None)
    others.it._hands_over = False
    for number in (1, 2, 3):
        if number == 2:
            monkeypatch.setattr(DrafterTrainer, "refresh", diverging)
        if number == 3:  # an engine that was dead whenever it was looked at
            others.engines = [Engine()]
        assert {of.step(number)["drafter/version"] for of in (world, others)} == {1}
        assert asked.count(world.it.drafter) == asked.count(others.it.drafter), number


def test_a_refused_push_is_said_and_made_again(world: World) -> None:
    world.engines[0].refuses = "gate arrived with a wrong digest"
    metrics = world.step(1)
    assert (metrics["drafter/refused"], metrics["drafter/version"], metrics["drafter/oldest_version"]) == (1, 1, 0)
    [note] = world.notes
    assert "engine 0, rank 0: gate arrived with a wrong digest" in note
    world.engines[0].refuses = ""
    metrics = world.it.push()
    assert (metrics["drafter/refused"], metrics["drafter/oldest_version"]) == (0, 1)
    assert world.held() == world.weights()


def test_a_refresh_that_fails_is_said_and_the_run_goes_on(world: World) -> None:
    """Weights that are not numbers give no gradient."""
    with torch.no_grad():
        next(world.it.drafter.model.parameters()).fill_(torch.nan)
    metrics = world.step(1)
    assert (metrics["drafter/failed"], metrics["drafter/refreshed"], metrics["drafter/version"]) == (1, 0, 0)
    assert "Lower distillation.learning_rate" in world.notes[0]
    assert world.engines[0].versions == []


def test_a_loss_that_is_not_finite_leaves_nothing_to_the_next_refresh(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, loss = world.it.drafter, world.it.drafter._loss

    def infinite(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        own, sums = loss(batch)
        return own * torch.inf, sums * torch.inf

    with monkeypatch.context() as once:
        once.setattr(trainer, "_loss", infinite)
        assert world.step(1)["drafter/failed"]
    assert all(parameter.grad is None for parameter in trainer.model.parameters()), "engines have the device now"
    metrics = world.step(2)
    assert (metrics["drafter/failed"], metrics["drafter/refreshed"]) == (0, 1)


def test_what_a_refresh_learned_before_it_failed_is_a_version_that_all_get(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gradients, fails = world.it.drafter._gradients, iter([False, True])
    monkeypatch.setattr(world.it.drafter, "_gradients", lambda: diverging(None) if next(fails) else gradients())
    before, metrics = world.weights(), world.step(1)
    assert (metrics["drafter/failed"], metrics["drafter/version"], metrics["drafter/oldest_version"]) == (1, 1, 1)
    assert world.held() == world.weights() != before
    world.it.save(tmp_path)
    assert json.loads((tmp_path / FOLDER / "drafter.json").read_text())["version"] == 1


def test_a_head_with_an_embedding_of_its_own_is_taken_whole(
    collective: Collective, targets: dict[str, Path], tmp_path: Path
) -> None:
    """An engine that reads it from the head's folder misses it in a push, though it does not learn."""
    target = init.read_model(targets["dense"])
    made = head.make_head(target, head.Eagle3Start())
    made.owns_embedding = True
    init.write_model(made, tmp_path / "head", tokenizer=targets["dense"])
    learns = Distillation(
        config(tmp_path / "head"),
        collective,
        recorder_of=lambda layers: None,
        policy=target.config,
        engines=lambda: [],
        processes=Processes(),
    )
    learns.drafter.version = 1
    learns._leave_device()
    assert learns._packed is not None
    sent = {slot.name for slot in learns._packed.slots}
    assert sent == set(load_file(tmp_path / "head" / "model.safetensors"))
    learns.close()


def test_a_head_says_once_that_it_learns_from_no_response(
    collective: Collective, targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are longer than what there is room for, until they are cut to that."""
    target, notes = init.read_model(targets["dense"]), list[str]()
    init.write_model(head.make_head(target, head.Eagle3Start()), tmp_path / "head", tokenizer=targets["dense"])
    room = max(s.prompt_len for s in SEQUENCES) + 1
    long = [s for s in SEQUENCES if len(s.token_ids) > room]
    monkeypatch.setattr(recorder, "MAX_BYTES", room * 2)

    def refreshed(longest: int) -> dict[str, float]:
        made = recorder.Recorder(
            1,
            temperature=1.0,
            vocab_size=cases.VOCAB,
            device=torch.device("cpu"),
            group=None,
            modules=[[torch.nn.Identity()]],
            hidden_size=1,
            max_example_tokens=longest,
        )
        learns = Distillation(
            config(tmp_path / "head", tokens_per_microbatch=longest),
            collective,
            recorder_of=lambda layers: made,
            policy=target.config,
            engines=lambda: [],
            processes=Processes(),
            note=notes.append,
        )
        for number in (1, 2):
            made.around(lambda *_: (torch.zeros(()), {}), long)
            made.begin(long)
            made.updated(long)
            metrics = learns.refresh(long, version=number, step_s=1.0, is_last=True)
        learns.close()
        return metrics

    assert refreshed(4096)["drafter/buffer_tokens"] == 0
    [note] = notes
    assert f"Lower distillation.tokens_per_microbatch to {room}," in note
    notes.clear()
    assert refreshed(room)["drafter/buffer_tokens"] == room
    assert not notes


def test_what_a_refresh_and_its_push_take_beyond_their_share_the_next_ones_lack(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 s steps grant 3 s; learning takes 1 s, of a clock that stands still else, and each push as many as here."""
    pushes, renew, gradients = iter([1.0, 3.0, 8.0, 0.0, 0.0]), world.processes.renew, world.it.drafter._gradients

    def slow(weights: DraftWeights) -> tuple[list[str], float]:
        return renew(weights)[0], next(pushes)

    def learning() -> dict[str, float]:
        world.now_s += 1.0 / UPDATES
        return gradients()

    monkeypatch.setattr(world.processes, "renew", slow)
    monkeypatch.setattr(world.it.drafter, "_gradients", learning)
    found = [world.step(number, seconds=100.0) for number in range(1, 8)]
    assert [of["time/refresh_limit_s"] for of in found] == pytest.approx([3.0, 3.0, 2.0, 0.0, 0.0, 2.0, 3.0])
    assert [of["drafter/refreshed"] for of in found] == [1, 1, 1, 0, 0, 1, 1]


def test_nothing_is_learned_where_no_rollout_is_left(world: World) -> None:
    metrics = world.step(10)
    assert (metrics["drafter/refreshed"], metrics["drafter/version"]) == (0, 0)
    assert metrics["drafter/buffer_tokens"] > 0


def test_every_response_is_an_example_and_empty_ones_are_not(world: World) -> None:
    assert world.step(1)["drafter/buffer_tokens"] == sum(len(s.token_ids) for s in SEQUENCES)
    world.it.refresh([TrainSequence(token_ids=(1, 2), prompt_len=2)], version=2, step_s=1.0, is_last=False)
    assert len(world.it.drafter.buffer) == len(SEQUENCES)


def test_long_responses_are_cut_and_long_prompts_are_said_once(collective: Collective, draft_dir: Path) -> None:
    prompts, lengths = [s.prompt_len for s in SEQUENCES], [len(s.token_ids) for s in SEQUENCES]
    room = max(prompts)
    world = World(collective, draft_dir, tokens_per_microbatch=room)
    left_out = sum(prompt == room and length > room for prompt, length in zip(prompts, lengths, strict=True))
    num_cut = sum(length > room for length in lengths) - left_out
    assert left_out
    assert num_cut
    for number in (1, 2):
        assert world.step(number)["drafter/cut_responses"] == num_cut
        assert world.it.drafter.buffer.too_long == number * left_out
        [note] = world.notes
        assert f"prompts of {room} tokens or more are not learned from." in note
    assert World(collective, draft_dir).step(1)["drafter/cut_responses"] == 0


def test_a_resume_without_refreshes_says_what_it_leaves_behind(world: World, draft_dir: Path, tmp_path: Path) -> None:
    drafts = SpeculationConfig(mode="coupled", drafters=("model",), draft_model=(str(draft_dir),))
    assert left_behind(tmp_path, drafts) == ""
    world.it.save(tmp_path)
    assert f"drafts come from {draft_dir}. Set --distillation.refresh" in left_behind(tmp_path, drafts)
    assert left_behind(tmp_path, SpeculationConfig()) == "", "nothing drafts"
    assert left_behind(tmp_path, replace(drafts, drafters=("suffix",))) == "", "nobody drafts with it"


def resumed(world: World, collective: Collective, draft_dir: Path, folder: Path) -> World:
    """Another run's world, from the checkpoint that this one writes."""
    world.it.save(folder)
    other = World(collective, draft_dir)
    other.it.load(folder)
    other.it.restore(json.loads(json.dumps(world.it.state())))
    return other


WATCHED = ("drafter/loss", "drafter/grad_norm", "drafter/version", "drafter/buffer_tokens")


def differ(a: dict[str, float], b: dict[str, float]) -> list[str]:
    """Bit for bit; nan equals nan."""
    return [name for name in WATCHED if repr(a[name]) != repr(b[name])]


def test_a_resumed_run_refreshes_as_if_it_had_not_stopped(
    world: World, collective: Collective, draft_dir: Path, tmp_path: Path
) -> None:
    world.step(1)
    other = resumed(world, collective, draft_dir, tmp_path)
    assert other.it.push()["drafter/oldest_version"] == 1, "engines that were started anew get the version there is"
    assert other.held() == world.held()
    for number in (2, 3):
        assert differ(world.step(number), other.step(number)) == []
    assert other.weights() == world.weights()
    assert other.it.state() == world.it.state()


@pytest.mark.parametrize("forgotten", ["optimizer", "buffer", "weights"])
def test_a_resume_that_forgets_is_noticed(
    world: World, collective: Collective, draft_dir: Path, tmp_path: Path, forgotten: str
) -> None:
    world.step(1)
    other = resumed(world, collective, draft_dir, tmp_path)
    trainer = other.it.drafter
    if forgotten == "optimizer":
        fresh = DrafterTrainer(other.config.distillation, trainer.model, seed=other.config.seed)
        fresh.buffer, fresh.version, fresh.updates = trainer.buffer, trainer.version, trainer.updates
        other.it.drafter = fresh
    elif forgotten == "buffer":
        trainer.buffer.restore(World(collective, draft_dir).it.drafter.buffer.state())
    else:
        trainer.model.load_state_dict(cases.model().state_dict())
    told = [differ(world.step(number), other.step(number)) for number in (2, 3)]
    assert told != [[], []]


def test_a_checkpoint_vouches_for_every_file_of_the_draft_model(world: World, tmp_path: Path) -> None:
    world.step(1)
    world.it.save(tmp_path)
    saved = [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()]
    digests = checkpoint._digests(tmp_path, saved)
    files = ("weights.safetensors", "optimizer.safetensors", "buffer.msgpack", "drafter.json")
    assert set(digests) == {f"{FOLDER}/{name}" for name in files}
    checkpoint._check_files(digests, tmp_path)
    for name in files:
        damaged = tmp_path / FOLDER / name
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="its content has changed since it was saved"):
            checkpoint._check_files(digests, tmp_path)
        damaged.write_bytes(whole)


def test_a_checkpoint_without_a_draft_model_starts_it_anew(world: World, tmp_path: Path) -> None:
    world.it.load(tmp_path)
    assert not (tmp_path / FOLDER).exists()
    assert "holds no draft model" in world.notes[0]
    assert world.it.drafter.version == 0


def test_a_draft_model_of_another_vocabulary_is_refused(collective: Collective, draft_dir: Path) -> None:
    with pytest.raises(ConfigError, match="got '48 tokens', expected the policy's 96 tokens"):
        Distillation(
            config(draft_dir),
            collective,
            recorder_of=lambda layers: None,
            policy=SimpleNamespace(vocab_size=96),
            engines=lambda: [],
            processes=Processes(),
        )


def test_a_drafter_process_that_hangs_ends_no_refresh(
    world: World, make_drafter_spec: Callable[..., DrafterSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 s steps grant 30 s; the wait for it takes 5 s, of a clock that goes by itself."""
    monkeypatch.setattr(drafter_pool, "LATE_S", 5.0)
    world.it._clock = time.perf_counter
    with DrafterPool([make_drafter_spec("Renewing")]) as pool:
        pool.wait_ready()
        world.it._processes = pool
        os.kill(child_of(pool.drafters[0]), signal.SIGSTOP)
        try:
            found = [world.step(number, seconds=1000.0) for number in (1, 2)]
        finally:
            os.kill(child_of(pool.drafters[0]), signal.SIGCONT)
        assert [of["drafter/refused"] for of in found] == [1, 0], "it is asked once"
        assert "drafter 0" in world.notes[0]
        assert [of["drafter/oldest_version"] for of in found] == [0, 0]
        assert [of["drafter/refreshed"] for of in found] == [1, 1]
        assert found[1]["time/refresh_limit_s"] > 25.1
        assert world.engines[0].versions == [1, 2]
        wait_until(lambda: pool.want(3))
        assert world.step(3, seconds=1000.0)["drafter/oldest_version"] == 3


@pytest.mark.parametrize(
    "error", [OSError("no space left"), SafetensorError("no space left"), PeerFailedError("checkpoint: rank 1 failed")]
)
def test_a_full_disk_is_an_error_of_the_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(folder: Path) -> None:
        raise error

    monkeypatch.setattr(world.it.drafter, "save", full)
    with pytest.raises(CheckpointError, match=r"no space left|rank 1 failed"):
        world.it.save(tmp_path)


def test_weights_that_are_not_finite_are_neither_pushed_nor_saved(
    world: World, collective: Collective, draft_dir: Path, tmp_path: Path
) -> None:
    """However they came to be: what resumes there begins with the draft model that it was given."""
    world.step(1)
    held = world.held()
    with world.it._on_device(), torch.no_grad():
        next(world.it.drafter.model.parameters()).view(-1)[0] = torch.inf
        world.it.drafter.version = 2
    metrics = world.it.push()
    assert (metrics["drafter/pushed_bytes"], metrics["drafter/oldest_version"]) == (0, 1)
    assert world.held() == held
    assert "not finite" in world.notes[-1]
    other = resumed(world, collective, draft_dir, tmp_path)
    assert not (tmp_path / FOLDER).exists()
    assert other.it.drafter.version == 0
    assert other.weights() == World(collective, draft_dir).weights()
