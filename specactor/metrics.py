"""Names and units of all metrics, and where they are written.

Invariants: unknown names are refused; ``metrics.jsonl`` after a resume equals that of an undisturbed run; wandb delays
training by at most `SILENT_S`, and its end by a minute.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from specactor.config import TrackingConfig
from specactor.errors import SpecActorError, did_you_mean
from specactor.parallel.devices import gpus
from specactor.waits import ANSWER_S, SILENT_S

Value = float | int | str

# Name -> unit and meaning; shares lie in 0..1
METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the step's responses",
    "reward/std": "standard deviation of the rewards of the step's responses",
    "reward/failed": "responses whose verifier raised, ended or gave no finite number in time; they are left out",
    "reward/uninformative_groups": "share of groups whose rewards are all equal",
    "reward/drawn_groups": "groups that dynamic sampling looked at to find those that teach",
    "reward/drawn_mean": "mean score of those groups; accuracy/train and reward/mean are of the kept ones alone",
    "accuracy/train": "share of the step's responses that are right",
    "accuracy/eval": "share of held-out problems answered right, greedily; of all samples with eval.samples (avg@k)",
    "score/eval": "mean score of the held-out responses; of a reward that is not 0 or 1 accuracy/eval tells little",
    "response/length_mean": "tokens per response, mean; of a conversation all, what its environment said too",
    "response/length_p95": "tokens per response, 95th percentile",
    "response/length_max": "tokens per response, longest",
    "response/cut_fraction": "share of responses cut at rollout.max_new_tokens, or for want of room for another turn",
    "environment/turns_mean": "turns of the policy per conversation, mean (with environments, as the next three)",
    "environment/observations": "times that an environment answered with more than a reward, such as tool calls",
    "environment/observation_tokens": "tokens that environments said; they are not learned from",
    "environment/failed": "conversations whose environment raised, or did not answer in time; they are left out",
    "policy/loss": "what the optimizer minimises, mean over the step's updates",
    "policy/entropy": "nats per response token, under the policy that trained",
    "policy/clip_fraction": "share of response tokens (gspo: sequences) whose ratio was clipped",
    "policy/kl": "nats per response token towards the reference model, with algorithm.kl_coef",
    "policy/mtp_loss": "cross entropy of the policy's MTP layer, nats per response token; where it has one",
    "policy/grad_norm": "global gradient norm before clipping, likewise",
    "policy/learning_rate": "of the step's last optimizer update",
    "agreement/logprob_gap_max": "largest |engine - trainer| log-probability of a sampled token, nats",
    "agreement/logprob_gap_mean": "mean |engine - trainer| log-probability of the sampled tokens, nats",
    "agreement/logprob_gap_share": "share of the sampled tokens that are further apart than train.max_logprob_gap",
    "correction/effective_share": "effective sample size of the weights of algorithm.correction, (sum w)^2 / sum w^2, "
    "per response token",
    "correction/cut_fraction": "share of response tokens whose weight the bounds of algorithm.correction changed",
    "critic/loss": "half the squared error of the critic's values, per response token; with algorithm.advantage = gae, "
    "as the next three",
    "critic/grad_norm": "global gradient norm of the critic before clipping",
    "critic/explained_variance": "share of the returns' variance that the values before the step explain",
    "critic/clip_fraction": "share of response tokens whose value had moved by algorithm.critic.value_clip",
    "time/rollout_s": "seconds of generation",
    "time/reward_s": "seconds of scoring, without what is scored while the rollout goes on",
    "time/environment_s": "seconds that environments took, summed over conversations, which overlap",
    "time/record_s": "seconds of recording the step for specactor replay",
    "time/train_s": "seconds of forward, backward and optimizer",
    "time/sync_s": "seconds of the weight sync",
    "time/checkpoint_s": "seconds of saving",
    "time/eval_s": "seconds of the held-out evaluation",
    "time/data_s": "seconds of making or reading problems and the model, in the line of the first step",
    "time/warm-up_s": "seconds of the supervised warm-up, in the line of the first step",
    "time/engines_s": "seconds of waiting for engines to start, in the line of the first step",
    "time/audit_s": "seconds of an audit, with rollout.audit",
    "time/refresh_s": "seconds of refreshing the draft model: learning and pushing",
    "time/refresh_limit_s": "seconds that learning was granted",
    "rollout/tokens": "response tokens generated; with dynamic sampling also of groups that are not kept",
    "rollout/tokens_per_s": "response tokens per second of generation",
    "rollout/expert_bytes": "bytes that say which experts the engines chose, with train.routing_replay = r3",
    "rollout/responses": "responses generated; with dynamic sampling also of groups that are not kept",
    "train/tokens": "prompt and response tokens trained on",
    "train/tokens_per_s": "prompt and response tokens per second of training",
    "train/microbatches": "forward passes per rank",
    "train/sequences": "sequences trained on",
    "weights/version": "policy version that the engines hold after the step",
    "sync/bytes": "bytes of weights sent",
    "sync/gb_per_s": "10^9 bytes of weights per second of the sync",
    "sync/buckets": "buckets sent",
    "memory/rank_rss_bytes": "resident memory of the largest trainer rank",
    "memory/engine_rss_bytes": "resident memory of all engine processes of the job",
    "memory/gpu_rollout_bytes": "bytes in use on the fullest GPU at the end of generation (as the next two: only with "
    "GPUs; specactor plan predicts them)",
    "memory/gpu_train_bytes": "at the end of training and refreshing, with what torch keeps",
    "memory/gpu_sync_bytes": "at the end of the weight sync",
    "memory/record_bytes": "bytes of the step's record on disk; 0 with tracking.record off",
}

# Last part of ``speculation/DRAFTER/...``, with rollout.speculation
SPECULATION: dict[str, str] = {
    "share_of_rounds": "share of decode rounds for which this drafter was chosen (off: plain decoding)",
    "switches": "requests that came to this drafter from another that had drafts for them, too",
    "drafted": "draft tokens that were verified",
    "accepted": "draft tokens that the policy confirmed",
    "wasted": "drafted - accepted",
    "accept_rate": "accepted / drafted",
    "accept_length": "tokens emitted per request and speculative round",
    "draft_s": "seconds of drafting and of deciding on it, also of drafts that were not verified",
    "verify_s": "seconds of the rest of the rounds: forward pass, sampling, scheduling",
    "predicted_s": "seconds that were predicted for rounds, where they were predicted",
    "measured_s": "seconds that those rounds took",
    "failures": "times that the drafter raised, or returned other than one draft per request; after three it is not "
    "asked again (as the next two: only where there are any)",
    "cut_drafts": "drafts that had more tokens than were asked for, or what is no token",
    "problems": "what was wrong with the drafter: its class and the reason; each is told once",
    "drafted_ahead": "draft tokens that the drafter processes made (decoupled, as all below)",
    "wasted_ahead": "draft tokens that the drafter processes threw away: the text went on otherwise, or ended; those "
    "that an engine verified and rejected among them",
    "stale_tails": "drafts that arrived too late, or for another continuation",
    "dropped_frames": "messages dropped for all other reasons; those to drafters that do not answer are not counted",
    "dropped_by_drafters": "frames that drafter processes dropped (malformed, foreign, repeated), requests that "
    "they had no room for, and tries to connect with a wrong key",
    "live_drafters": "drafter processes that answered at the end of the rollout, summed over engines",
    "busy_s": "seconds that drafter processes drafted, summed over them",
    "processes": "drafter processes that told how long they drafted",
    "utilisation": "busy_s / (processes x seconds of generation)",
    "drafted_at_J": "draft tokens at position J of a draft",
    "accepted_at_J": "of them, accepted",
}

# Last part of ``drafter/...``, with distillation.refresh
DRAFTER: dict[str, str] = {
    "version": "refreshes that changed the draft model's weights",
    "oldest_version": "oldest version that an engine or a drafter process drafts with in the next step",
    "refreshed": "1 after a refresh of at least one update, else 0",
    "updates": "optimizer updates of the refresh",
    "tokens": "response tokens that it learned from",
    "loss": "mean loss of its updates, nats per response token",
    "kl": "KL(policy, draft) over the policy's top-k tokens in its last update, nats per response token",
    "overlap": "sum of min(policy, draft) in its last update: at least 1 - total variation",
    "grad_norm": "global gradient norm of its last update, before clipping",
    "buffer_tokens": "prompt and response tokens to learn from",
    "cut_responses": "responses of the step of which only the beginning is learned from, since they are longer, with "
    "their prompts, than a micro-batch of the draft model",
    "pushed_bytes": "weights sent to each engine and drafter process that took them",
    "refused": "engines and drafter processes that did not take the weights, and keep older ones",
    "failed": "1 if the refresh failed; the run goes on with the weights there are",
}
# Last part of ``audit/...``, with rollout.audit; the first four in steps that an audit had time for, the others
# without top-p and top-k.
AUDIT: dict[str, str] = {
    "responses": "responses that an engine began again without drafts",
    "tokens": "tokens of these",
    "ties": "of these responses, those that differ where two tokens score within rounding of each other",
    "differences": "of these responses, those that differ otherwise",
    "scored": "sampled tokens that the trainer compared with what their noise picks",
    "unpicked": "of these tokens, those that it does not pick",
}
# Last part of ``tail/...``, with lent devices, several engines and rollout.oversample
TAIL: dict[str, str] = {
    "drafters_woken": "times that the drafter on the device of an engine that had run dry was to be woken",
    "groups_moved": "groups that waited for an engine of one rank, and that another rank with room began",
    "open_groups": "groups not complete when the rollout stopped, with rollout.oversample: dropped, or with "
    "rollout.partial carried to the next step",
    "open_requests": "their responses that had not finished",
    "open_tokens": "tokens of these",
    "stale_tokens": "response tokens trained on that older policies sampled, with rollout.partial",
}
_FAMILIES = {"audit": AUDIT, "drafter": DRAFTER, "tail": TAIL}


class Tracker(AbstractContextManager["Tracker"]):
    """Writes on rank 0. Lines after ``resume_step``, or cut short, are removed; 0 starts anew."""

    def __init__(
        self, run_dir: Path, config_json: Mapping[str, Any], tracking: TrackingConfig, resume_step: int = 0
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        write_whole(run_dir / "config.json", json.dumps(config_json, indent=2) + "\n")
        self._metrics = run_dir / "metrics.jsonl"
        kept = _cut(self._metrics, resume_step)
        self._last: dict[str, Any] = json.loads(kept[-1]) if kept else {}  # line of the file
        self._file = self._metrics.open("a")
        self._last_step = resume_step or -1
        self._run = _start_wandb(run_dir, config_json, tracking, resuming=resume_step > 0)
        self._wandb_least = self._run.starting_step if self._run is not None else 0
        self._wandb_step = self._wandb_least - 1  # of the last row

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Append a line, on disk when this returns. Raises SpecActorError for an unknown name or a repeated step."""
        line = _line(step, metrics)
        if step <= self._last_step:
            raise SpecActorError(
                f"metrics: got step {step} after {self._last_step}, expected a later one. Log a step once."
            )
        self._last_step, self._last = step, line
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        # wandb drops rows of steps before its last, and steps after a checkpoint run again: they are counted on.
        self._wandb_step = max(step, self._wandb_step + 1)
        self._to_wandb(lambda run: run.log({"step": step, **metrics}, step=self._wandb_step))

    def lacks(self, name: str, step: int) -> bool:
        """Return whether the step's line is the last one, and has no such metric."""
        return self._last.get("step") == step and name not in self._last

    def complete(self, metrics: Mapping[str, Value]) -> None:
        """Add to the last line; a crash leaves it as it was, or whole."""
        step = self._last["step"]
        self._last |= _line(step, metrics)
        self._file.close()
        write_whole(self._metrics, "".join([*_whole_lines(self._metrics)[:-1], json.dumps(self._last) + "\n"]))
        self._file = self._metrics.open("a")
        self._wandb_step = max(self._wandb_step, self._wandb_least)  # the row of `log`, unless another process wrote it
        self._to_wandb(lambda run: run.log({"step": step, **metrics}, step=self._wandb_step))

    def summary(self, values: Mapping[str, Value]) -> None:
        write_whole(
            self.run_dir / "summary.json", json.dumps({k: _finite(v) for k, v in values.items()}, indent=2) + "\n"
        )
        self._to_wandb(lambda run: run.summary.update(dict(values)))

    def close(self, exit_code: int = 0) -> None:
        """Close the files, waiting for wandb for a minute at most; harmless twice."""
        self._file.close()
        self._to_wandb(lambda run: run.finish(exit_code=exit_code))
        self._run = None

    def _to_wandb(self, call: Any) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # wandb is another process, whose failure must never end the training
            self._run = None
            warnings.warn(f"wandb stopped ({error}); metrics go on in {self.run_dir / 'metrics.jsonl'}", stacklevel=3)


def read_metrics(run_dir: Path) -> list[dict[str, Value]]:
    """Return the lines of metrics.jsonl, each with "step"; non-finite numbers are nan."""
    lines = _whole_lines(run_dir / "metrics.jsonl")
    return [{k: math.nan if v is None else v for k, v in json.loads(line).items()} for line in lines]


def rss_bytes(pid: int | None = None, *, children: bool = False) -> int:
    """Return resident memory, shared memory included; 0 for a process that is gone."""
    try:
        root = psutil.Process(pid)
        family = [root, *(root.children(recursive=True) if children else [])]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _known(name: str) -> None:
    family, _, rest = name.partition("/")
    if family == "speculation" and re.sub(r"_at_[0-9]+$", "_at_J", rest.rpartition("/")[2]) in SPECULATION:
        return
    # A further set of data.eval; of any set the chance that one of K samples is right, with eval.samples.
    if family in ("accuracy", "score") and re.fullmatch(r"[A-Za-z0-9_-]+(/pass@[0-9]+)?", rest):
        return
    if name not in METRICS and rest not in _FAMILIES.get(family, ()):
        hint = did_you_mean(name, METRICS, "Add it, with its unit, to specactor.metrics.METRICS.")
        raise SpecActorError(f"metrics: got the unknown name {name!r}. {hint}")


def _line(step: int, metrics: Mapping[str, Value]) -> dict[str, Any]:
    for name in metrics:
        _known(name)
    return {"step": step, **{k: _finite(v) for k, v in metrics.items()}}


def _finite(value: Value) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_lines(file: Path) -> list[str]:
    kept = []
    for line in file.read_text().splitlines(keepends=True) if file.exists() else []:
        if not line.endswith("\n"):
            break
        kept.append(line)
    return kept


def _cut(file: Path, resume_step: int) -> list[str]:
    kept = [line for line in _whole_lines(file) if resume_step and json.loads(line)["step"] <= resume_step]
    write_whole(file, "".join(kept))
    return kept


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file; a crash leaves the old one or the new one."""
    fresh = file.with_name(file.name + ".tmp")
    with fresh.open("wb") as handle:
        handle.write(content.encode() if isinstance(content, str) else content)
        handle.flush()
        os.fsync(handle.fileno())
    fresh.replace(file)


def _start_wandb(run_dir: Path, config_json: Mapping[str, Any], tracking: TrackingConfig, *, resuming: bool) -> Any:
    if tracking.wandb == "off":
        return None
    import wandb  # takes a second

    online = tracking.wandb == "online" or (tracking.wandb == "auto" and _has_key(wandb))
    id_file = run_dir / "wandb_id.txt"
    known = id_file.read_text().strip() if resuming and id_file.exists() else ""  # empty where the disk was full
    run_id = known or uuid.uuid4().hex[:12]
    id_file.write_text(run_id + "\n")
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_stats=not gpus(),  # its samples of a CPU take of the cores that compute
        init_timeout=SILENT_S,
        finish_timeout=ANSWER_S,
    )
    for mode in ("online", "offline") if online else ("offline",):
        try:
            run = wandb.init(
                dir=str(run_dir),
                project=os.environ.get("WANDB_PROJECT", "specactor"),
                name=run_dir.name,
                id=run_id,
                resume="allow" if mode == "online" else None,
                mode=mode,
                config=dict(config_json),
                settings=settings,
            )
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:  # wandb is another process, or a server: its failure must never end the training
            rest = "goes on offline" if mode == "online" else "is off; metrics.jsonl goes on"
            wandb.teardown()  # else the id counts as in use
            warnings.warn(f"wandb could not start {mode} ({_first_line(error)}); it {rest}", stacklevel=3)
    return None


def _has_key(wandb: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wandb.setup(settings=wandb.Settings(silent=True))
            return bool(wandb.login(prompt=False, verify=False))
    except Exception as error:  # a malformed key, for example; said once, and the run goes on offline
        warnings.warn(f"wandb: {_first_line(error)}; it goes on offline", stacklevel=4)
        return False


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
