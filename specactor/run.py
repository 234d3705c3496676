"""A whole run on one rank: build the actor, step it until done, leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import Store
from transformers import PreTrainedTokenizerBase

from specactor import measurements
from specactor.actor import SpecActor
from specactor.config import Config, DraftTrainingConfig
from specactor.config.rollout import check_attention, guarantee
from specactor.data.dataset import ALONE, Alone, Dataset
from specactor.data.tokenizer import VOCAB_SIZE, load_tokenizer
from specactor.device_memory import DeviceMemory
from specactor.errors import ConfigError, PlanError
from specactor.metrics import Tracker, read_metrics, rss_bytes
from specactor.parallel.collective import Collective, destroy_groups, ends_with_peers, init_groups
from specactor.parallel.devices import gpu_uuid, gpus, return_unused
from specactor.parallel.failure import RESUME, Failures, Member, is_end_asked
from specactor.parallel.layout import (
    Layout,
    ModelShape,
    check,
    engine_devices,
    longest_prompt,
    longest_text,
    place_engine,
    prompt_limit,
    reserved_tokens,
)
from specactor.planning import search
from specactor.planning.memory import memory_of
from specactor.problems import problems_of
from specactor.progress import Progress, summary_rows
from specactor.recipes import keep_imports, to_json
from specactor.replay.audit import Audit
from specactor.replay.recorder import StepRecorder
from specactor.replay.records import reach
from specactor.rollout.collector import RolloutCollector, check_same_problems
from specactor.rollout.decoupled.transport import DrafterAccess
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.drafter_start import check_in_engines, check_tokenizers, start_drafters
from specactor.rollout.grading import Grading
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_protocol import EngineSpec, check_extra_args
from specactor.rollout.speculation.registry import check_drafters
from specactor.run_folder import Replay, RunFolder, Status, changed_settings, checkpoint_to_resume
from specactor.run_owner import RunOwner
from specactor.trainer import checkpoint
from specactor.trainer.critic import Critic
from specactor.trainer.drafter.refresh import Distillation, left_behind
from specactor.trainer.model import read_hf_config
from specactor.trainer.policy import PolicyTrainer
from specactor.trainer.shards import RankShards
from specactor.trainer.warmup import first_model, initial_model, warmed_up_model, with_draft_model
from specactor.weights_sync.sender import WeightSender


def run(
    config: Config,
    *,
    rank: int,
    local_rank: int,
    world: int,
    head: str,
    failures: Failures,
    store: Store | None = None,
) -> None:
    """Train the policy. Raises SpecActorError on every rank when one fails.

    Args:
        local_rank: number of the rank, and its device, on its host.
        head: rank 0's host, as others know it.
        store: where ranks meet; None: the launcher's.
    """
    layout = _checked(config, world)
    device = init_groups(layout, config.parallel, seed=config.seed, local_rank=local_rank, store=store)
    with ExitStack() as stack:
        stack.push(_leave_groups)
        collective = Collective()
        gpu = gpu_uuid(device.index) if device.type == "cuda" else ""
        members = collective.gather(Member.here(local_rank, gpu=gpu), Member)
        failures.know(members)
        folder = RunFolder.of(config)
        owner = stack.enter_context(closing(RunOwner(folder.root, failures.on_lost_folder)))
        failures.on_end = owner.close
        resume = enter_folder(config, folder, owner, collective)
        note_phase = _status_writer(folder, config.train.steps, members) if rank == 0 else None
        shown = Progress(config.train.steps, quiet=rank != 0, on_phase=note_phase)
        progress = stack.enter_context(shown)
        for note in config.notes(gpu=bool(gpus())):
            progress.note(note)
        config = _planned(config, members, collective, progress)
        actor = _build(_Job(config, folder, collective, members, head, progress, stack, resume), layout)
        if resume is not None:
            _resume(actor, resume, config, progress)
        tracker = None
        if rank == 0:
            if resume is not None and resume.resolve().parent == folder.checkpoints.resolve():
                checkpoint.prune(folder.checkpoints, actor.steps_done, config.checkpoint.keep)
            tracker = Tracker(folder.root, to_json(config), config.tracking, resume_step=actor.steps_done)
            stack.enter_context(tracker)
            keep_imports(folder.root)
            if folder.read_replay() is None:
                progress.note(reach(config))
        actor.start()
        if _train(actor, folder, tracker) and note_phase is not None:
            note_phase("done", actor.steps_done)


def _leave_groups(error: type[BaseException] | None, *_: object) -> None:
    """Leave all groups; after an error not those that other ranks, maybe in the middle of a collective, must leave too:
    it would be reported after half an hour."""
    if error is None or not ends_with_peers():
        destroy_groups()


def enter_folder(config: Config, folder: RunFolder, owner: RunOwner, collective: Collective) -> Path | None:
    """Own the run's folder, on rank 0; return the checkpoint to go on from, the same on all ranks. Collective."""

    def enter() -> Path | None:
        try:
            owner.claim()
            return checkpoint_to_resume(config, folder)
        except OSError as error:
            raise ConfigError.at(
                *("output_dir", config.output_dir, f"a folder that can be written to ({error})"),
                "Give this user the right to, free disk space, or choose another --output-dir.",
            ) from None

    return collective.path_of_first("run folder", enter)


def _checked(config: Config, world: int) -> Layout:
    """Return the job's layout. Raises ConfigError for what cannot run here."""
    policy = model_shape(config)
    if config.model.tiny is None:
        read_hf_config(Path(config.model.path))  # before anything has started
    layout = check(config, world, policy)
    check_attention(config.rollout.engine, gpu=bool(gpus()))
    check_in_engines(config, policy)
    check_tokenizers(config)
    check_drafters(config.rollout.speculation)
    check_extra_args(config.rollout.engine)
    visible = gpus()
    for own in visible[:1]:
        with suppress(PlanError):  # of a model that is built in another way, nobody can say
            memory_of(config, world, own.memory_bytes, len(visible)).check()
    return layout


def _resume(actor: SpecActor, checkpoint_dir: Path, config: Config, progress: Progress) -> None:
    actor.restore(checkpoint.load(actor.trainer, checkpoint_dir))
    if actor.distillation is not None:
        actor.distillation.load(checkpoint_dir)
    elif told := left_behind(checkpoint_dir, config.rollout.speculation):
        progress.note(told)
    if config.resume != "auto" and Path(config.resume) != checkpoint_dir:
        progress.note(f"This run began from {config.resume} before, and goes on from its own {checkpoint_dir.name}.")
    if changed := changed_settings(checkpoint_dir, to_json(config)):
        progress.note(f"Resumed from step {actor.steps_done} with other settings: {', '.join(changed)}.")
    progress.resume(actor.steps_done)


def _status_writer(folder: RunFolder, steps: int, members: Sequence[Member]) -> Callable[[str, int], None]:
    ranks = tuple(member.pid for member in members)

    def write(phase: str, step: int) -> None:
        with suppress(OSError):  # of a shared disk that fails for a moment; the next phase writes it again
            folder.write_status(Status(phase=phase, step=step, steps=steps, rank_pids=ranks))

    return write


def model_shape(config: Config) -> ModelShape:
    """Return the policy's shape. Raises ConfigError when it cannot be read."""
    if config.model.tiny is not None:
        return ModelShape.of_tiny(config.model.tiny, VOCAB_SIZE)
    return ModelShape.read(Path(config.model.path))


@dataclass(frozen=True)
class _Job:
    config: Config
    folder: RunFolder
    collective: Collective
    members: Sequence[Member]
    head: str  # host of rank 0
    progress: Progress
    stack: ExitStack  # what is entered here ends with the run
    resume: Path | None  # the checkpoint to go on from


def _build(job: _Job, layout: Layout) -> SpecActor:
    config, folder, collective, progress = job.config, job.folder, job.collective, job.progress
    with progress.phase("data", announce=True):
        start = initial_model(config, collective)
        tokenizer = load_tokenizer(start)
        train_data, eval_data = _problems(config, tokenizer, progress.note, collective)
        check_same_problems((train_data, *eval_data.values()), collective)
    with progress.phase("warm-up", announce=True):
        warm_up = partial(warmed_up_model, config, layout, start, train_data, tokenizer, collective, progress)
        base = first_model(config, warm_up, start, collective, progress, folder=folder, resume=job.resume)
        config = with_draft_model(config, base, train_data, tokenizer, collective, progress)
        job = replace(job, config=config)
        return_unused()  # the warm-up's trainer is gone
    with progress.phase("engines", announce=True):
        pool, drafters = _start_engines(job, start)
        devices = DeviceMemory(collective, pool, is_shared=bool(gpus()))
        trainer = devices.start(
            lambda: PolicyTrainer(config, layout, base, critic=Critic.of(config, layout, base)),
            others=[("drafter start", drafters.wait_ready)],
        )
    most = model_shape(config).max_position
    rollouts = RolloutCollector(
        config,
        pool=pool,
        drafters=drafters,
        grading=_grading(job),
        collective=collective,
        tokenizer=tokenizer,
        train_data=train_data,
        eval_data=eval_data,
        progress=progress,
        host=job.members[collective.rank].machine,
        max_prompt_tokens=longest_prompt(config, most),
        prompt_limit=prompt_limit(config, most),
        replace_lost=lambda: actor.sync(),
    )
    actor = SpecActor(
        config,
        trainer=trainer,
        devices=devices,
        rollouts=rollouts,
        sender=job.stack.enter_context(closing(WeightSender(config.weights_sync, collective))),
        weights=_weights(trainer, job.members),
        collective=collective,
        progress=progress,
        distillation=_distillation(job, trainer, pool, drafters),
        on_trace=folder.write_traces if collective.rank == 0 else lambda step, spans: None,
        recorder=StepRecorder(config, folder.root, trainer=trainer, collective=collective),
        audit=Audit(config, pool=pool, collective=collective, progress=progress),
    )
    return actor


def _grading(job: _Job) -> Grading:
    log_file = (job.folder.engines / f"verifiers-{job.collective.rank}.log").resolve()
    timeout_s = job.config.rollout.environment_timeout_s
    return job.stack.enter_context(Grading(timeout_s=timeout_s, log_file=str(log_file)))


def _start_engines(job: _Job, start: Path) -> tuple[EnginePool, DrafterPool]:
    config = job.config
    drafters, access_of = start_drafters(
        *(config, job.collective, job.members, _places(config, job.members), job.stack),
        head=job.head,
        max_position=model_shape(config).max_position,
        log_dir=job.folder.engines,
        note=job.progress.note,
    )
    engines = _own_engines(job, start, access_of)
    pool = EnginePool(engines, drafters=drafters, restart_limit_s=config.parallel.timeout_s / 2)
    return job.stack.enter_context(pool), drafters


def _planned(config: Config, members: Sequence[Member], collective: Collective, progress: Progress) -> Config:
    """Decide who drafts, where costs were measured; in config.json, so a replay drafts alike."""
    speculation = config.rollout.speculation
    if speculation.mode != "auto" or not speculation.cost_table:
        return config
    table = search.shared_table(speculation.cost_table, collective)
    config, text = search.planned(config, table, machines=len({member.machine for member in members}))
    progress.note(text)
    return config


def _distillation(job: _Job, trainer: PolicyTrainer, pool: EnginePool, drafters: DrafterPool) -> Distillation | None:
    if not job.config.drafter_learns:
        return None
    settings = DraftTrainingConfig.of(job.config.distillation)
    in_engine = "model" in job.config.rollout.speculation.in_engines
    distillation = Distillation(
        job.config,
        job.collective,
        recorder_of=lambda layers: trainer.recorder(
            settings.top_k,
            layers=layers,
            max_tokens=settings.buffer_tokens,
            max_example_tokens=settings.tokens_per_microbatch,
        ),
        policy=trainer.policy.bridge.hf_config,
        engines=lambda: [engine for engine in pool.engines if engine.alive] if in_engine else [],
        processes=drafters,
        note=job.progress.note,
        device=trainer.device,
    )
    job.stack.callback(distillation.close)
    return distillation


def _problems(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], object] = lambda text: None,
    collective: Collective | Alone = ALONE,
) -> tuple[Dataset, dict[str, Dataset]]:
    context = model_shape(config).max_position
    return problems_of(
        config,
        tokenizer,
        max_prompt_tokens=longest_prompt(config, context),
        prompt_limit=prompt_limit(config, context),
        note=note,
        collective=collective,
    )


def _weights(trainer: PolicyTrainer, members: Sequence[Member]) -> RankShards:
    machines = [member.machine for member in members]
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    return RankShards(trainer.policy, trainer.shared_parameters, hosts=[numbers[machine] for machine in machines])


def _own_engines(job: _Job, model_dir: Path, access_of: Callable[[int], DrafterAccess]) -> list[EngineSpec]:
    config, members = job.config, job.members
    p, engine = config.parallel, config.rollout.engine
    if config.train.routing_replay == "r3":
        engine = replace(engine, extra_args=engine.extra_args | {"enable_return_routed_experts": True})
    machines, devices = [member.machine for member in members], [member.device for member in members]
    # Of all engines, so that every rank refuses a layout that cannot be.
    of_engines = [engine_devices(i, machines, devices, engine_tensor=p.engine_tensor) for i in range(p.engines)]
    return [
        EngineSpec(
            index=index,
            model_dir=str(model_dir.resolve()),
            dtype=config.model.dtype,
            tensor_parallel=p.engine_tensor,
            devices=of_engines[index],
            config=engine,
            speculation=config.rollout.speculation,
            drafters=access_of(index),
            context_length=longest_text(config, model_shape(config).max_position),
            reserved_tokens=reserved_tokens(config.rollout),
            awaits_weights=True,
            log_file=str((job.folder.engines / f"engine-{index}.log").resolve()),
            random_seed=config.seed,
        )
        for index, (owner, _) in enumerate(_places(config, members))
        if owner == job.collective.rank
    ]


def _places(config: Config, members: Sequence[Member]) -> list[tuple[int, int]]:
    """Return each engine's starting rank, and first device there."""
    views, local_ranks = [member.view for member in members], [member.local_rank for member in members]
    size, pooled = config.parallel.engine_tensor, config.lends_devices
    return [
        place_engine(index, views, local_ranks, engine_tensor=size, pooled=pooled)
        for index in range(config.parallel.engines)
    ]


def _train(actor: SpecActor, folder: RunFolder, tracker: Tracker | None) -> bool:
    """Return whether all steps were taken: else SIGUSR1 has ended them."""
    config, progress = actor.config, actor.progress
    replay = actor.collective.together("replay", folder.read_replay)
    if replay is not None:
        _replay(actor, replay, tracker)
        return True
    _evaluate_at_start(actor, folder, tracker)
    unfinished: list[Callable[[], Path]] = []
    ends = False

    def save() -> None:
        nonlocal ends
        ends = actor.collective.any(is_end_asked())  # ranks are sent a signal at different times, and maybe one alone
        _write_checkpoint(actor, folder, unfinished, is_asked=ends)

    while actor.steps_done < config.train.steps and not ends:
        metrics = actor.step(save)
        done, is_saved = actor.steps_done, bool(unfinished)
        _log(actor, tracker, done, metrics)
        while unfinished:
            unfinished.pop()()
        # After the checkpoint, since it may take longer than the step: a run that ends meanwhile resumes here.
        if config.is_evaluated(done) and not (ends and done < config.train.steps):
            _complete(actor, folder, tracker)
            ends = is_saved and actor.collective.any(is_end_asked())
    if actor.steps_done < config.train.steps:
        progress.note(f"Ended by SIGUSR1 after step {actor.steps_done}, with a checkpoint. {RESUME}")
        return False
    newest = checkpoint.latest(folder.checkpoints) if tracker is not None else None
    places = {"run": str(folder.root), "checkpoint": str(newest or "none")}
    if config.checkpoint.export:
        if tracker is not None:
            folder.remove_partial_exports()
        with progress.phase("export", announce=True):
            actor.trainer.export_hf(folder.export)
        places["Hugging Face export"] = str(folder.export)
        if actor.distillation is not None and actor.distillation.export(folder.draft_model):
            places["draft model"] = str(folder.draft_model)
    if tracker is not None:
        lines = read_metrics(folder.root)
        arithmetic, promise = guarantee(config.rollout.engine, gpu=bool(gpus()), dtype=config.model.dtype)
        told = {"engine/attention": arithmetic, "engine/guarantee": promise}
        tracker.summary(told | ({k: v for k, v in lines[-1].items() if k != "step"} if lines else {}))
        places = {"attention": f"{arithmetic}: {promise}"} | places
        progress.summary(summary_rows(lines, seconds=progress.total_seconds, places=places))
    return True


def _replay(actor: SpecActor, replay: Replay, tracker: Tracker | None) -> None:
    while actor.steps_done < replay.step - bool(replay.alone):
        metrics = actor.step()
        _log(actor, tracker, actor.steps_done, metrics)
    if replay.alone:
        groups = actor.rollouts.collect_again(actor.steps_done, replay.alone)
        actor.recorder.stepped(actor.steps_done + 1, actor.version, groups, (), None, None)


def _write_checkpoint(
    actor: SpecActor, folder: RunFolder, unfinished: list[Callable[[], Path]], *, is_asked: bool
) -> None:
    """Write one if due or asked for; append to `unfinished` what makes it whole, after the step's metrics."""
    done, every, keep = actor.steps_done, actor.config.checkpoint.every, actor.config.checkpoint.keep
    if done != actor.config.train.steps and not is_asked and not (every and done % every == 0):
        return
    beside = actor.distillation.save if actor.distillation is not None else lambda folder: None
    with actor.progress.phase("checkpoint"):
        state = actor.state()
        unfinished.append(checkpoint.write(actor.trainer, folder.checkpoints, done, state, keep=keep, beside=beside))


def _evaluate_at_start(actor: SpecActor, folder: RunFolder, tracker: Tracker | None) -> None:
    """Evaluate a new run's policy, or what a resumed one had not evaluated when it ended."""
    config, done = actor.config, actor.steps_done
    if done == 0 and config.eval.problems:
        _log(actor, tracker, 0, {"weights/version": actor.version} | _evaluate(actor, folder))
    elif config.is_evaluated(done) and actor.collective.any(tracker is not None and tracker.lacks("time/eval_s", done)):
        _complete(actor, folder, tracker)


def _complete(actor: SpecActor, folder: RunFolder, tracker: Tracker | None) -> None:
    """Evaluate, and add the metrics to the line of the step."""
    metrics = _evaluate(actor, folder)
    metrics["time/eval_s"] = actor.progress.take("eval")
    if tracker is not None:
        tracker.complete(metrics)


def _evaluate(actor: SpecActor, folder: RunFolder) -> dict[str, float]:
    sets, step, tokenizer = actor.rollouts.evaluate(), actor.steps_done, actor.rollouts.tokenizer
    temperature = actor.config.rollout.temperature if actor.config.eval.samples > 1 else 0.0
    if actor.collective.rank == 0:
        for name, groups in sets.items():
            folder.write_evaluation(step, groups, tokenizer, name=name, temperature=temperature)
    return measurements.of_evaluation(sets)


def _log(actor: SpecActor, tracker: Tracker | None, step: int, metrics: dict[str, float]) -> None:
    # Without the guards, which share what they hold with the warm starter.
    pids = [engine.pid for engine in actor.pool.engines if engine.alive]
    engines = sum(rss_bytes(pid, children=True) - rss_bytes(pid) for pid in pids)
    memory = actor.collective.gather((rss_bytes(), engines), tuple[int, int])
    used = actor.collective.gather(actor.devices.used_bytes, dict[str, int])
    metrics |= measurements.of_time(metrics, actor.progress.seconds())
    metrics["memory/rank_rss_bytes"] = max(rank for rank, _ in memory)
    metrics["memory/engine_rss_bytes"] = sum(of_engines for _, of_engines in memory)
    metrics |= {f"memory/gpu_{phase}_bytes": max(of[phase] for of in used) for phase in used[0]}
    if tracker is not None:
        metrics |= {"memory/record_bytes": actor.recorder.written_bytes} if "time/record_s" in metrics else {}
        problems = actor.progress.problems.items()
        texts = {f"speculation/{name}/problems": "; ".join(reasons) for name, reasons in problems}
        tracker.log(step, {**metrics, **texts})
        actor.progress.problems.clear()
        actor.progress.step_line(step, metrics)
