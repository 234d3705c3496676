"""One trainer rank that pushes weights into real engines under many layouts; rank 0 writes the results as JSON.

torchrun ... -m tests.weights_sync.sync_script MODEL_DIR LAYOUTS_AS_JSON FAULTS(0|1|2) FOLDER [KILLS]

FAULTS: 1 without those in which an engine is killed, which `kills` has, too; 2 with them.

KILLS: the first case of `kills.CASES` and their end; or which rank is killed, by plan (0|1), and at which exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specactor.cpu import megatron
from specactor.parallel.collective import destroy_groups, init_groups

megatron.install()


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch import Tensor  # noqa: E402

from specactor.config import EngineConfig, WeightsSyncConfig  # noqa: E402
from specactor.errors import WeightSyncError  # noqa: E402
from specactor.parallel.collective import Collective  # noqa: E402
from specactor.parallel.layout import Layout  # noqa: E402
from specactor.rollout.pool import EnginePool  # noqa: E402
from specactor.rollout.sglang.engine_client import Engine, EngineSpec  # noqa: E402
from specactor.trainer.policy import PolicyTrainer  # noqa: E402
from specactor.trainer.shards import RankShards  # noqa: E402
from specactor.types import RolloutRequest, SamplingParams  # noqa: E402
from specactor.weights_sync import sender as push_module  # noqa: E402
from specactor.weights_sync.messages import LOAD  # noqa: E402
from specactor.weights_sync.sender import WeightSender  # noqa: E402
from tests.trainer import policy_cases as cases  # noqa: E402
from tests.weights_sync import kills  # noqa: E402

INSPECTION = "tests.weights_sync.engine_digests"
TINY_BUCKET = 2**16
Edit = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
Pack = Callable[..., Any]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(Path(sys.argv[1]), Path(sys.argv[4]))
    results: dict[str, Any] = {}
    with bench.pool:
        bench.collective.together("start", bench.pool.wait_ready)
        numbers = list(map(int, sys.argv[5:]))
        for name, parallel in json.loads(sys.argv[2]).items():
            bench.start(name, parallel)
            if len(numbers) == 3:
                kills.end_a_rank(bench, numbers[0], bool(numbers[1]), numbers[2])
            results[name] = bench.layout(name)
            if sys.argv[3] != "0" and name == "EP2":
                results["faults"] = bench.faults(killed=sys.argv[3] == "2")
            if numbers and name == "EP2":
                results["kills"] = kills.campaign(bench, range(*numbers))
            destroy_groups(keep_process_group=True)
    if bench.collective.rank == 0:
        Path(sys.argv[4], "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """The engines, which outlive the layouts, and the trainer of the layout at hand."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self.model_dir, self.folder = model_dir, folder
        self.collective = Collective()
        self.version = 0
        self.trainer: PolicyTrainer
        self.pool = EnginePool(self.specs())

    def specs(self) -> list[EngineSpec]:
        """Of the engines of this rank: the first has all."""
        return [self.spec(index, index + 1) for index in (0, 1)] if self.collective.rank == 0 else []

    def spec(self, index: int, tensor_parallel: int) -> EngineSpec:
        return EngineSpec(
            index=index,
            model_dir=str(self.model_dir),
            dtype="float32",
            tensor_parallel=tensor_parallel,
            devices=tuple(range(tensor_parallel)),
            config=EngineConfig(max_running_requests=8, max_total_tokens=1024, max_restarts=999),
            context_length=64,
            log_file=str(self.folder / f"engine-{index}.log"),
        )

    def start(self, name: str, parallel: dict[str, Any]) -> None:
        config = cases.config(str(self.model_dir), parallel)
        p = config.parallel
        sizes = {key: getattr(p, key) for key in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
        layout = Layout(world=self.collective.world, **sizes)
        init_groups(layout, p, seed=0, local_rank=0)
        self.trainer = PolicyTrainer(config, layout, self.model_dir)
        self.trainer.train_step(cases.sequences(len(name)), learning_rate=2e-3)

    def layout(self, name: str) -> dict[str, Any]:
        before = self.answers()
        shards, apart = self.shards(), self.apart()
        sender = WeightSender(WeightsSyncConfig(), self.collective)
        result: dict[str, Any] = {"union": self.union(shards), "on_first_host": self.num_bytes_on_first_host(apart)}
        result["one_host"] = self.push(shards, sender=sender)
        after = self.answers()
        self.on_engines(Engine.flush)
        result |= {"changed": before != after or self.collective.rank > 0, "cache_dropped": after == self.answers()}
        result["wrong"] = self.compare(name)
        far_sender = WeightSender(WeightsSyncConfig(bucket_bytes=TINY_BUCKET), self.collective)
        for push, by, source in (
            ("by_plan", sender, shards),
            ("several_hosts", far_sender, apart),
            ("several_hosts_by_plan", far_sender, apart),
        ):
            self.trainer.train_step(cases.sequences(len(name) + 1), learning_rate=2e-3)
            result[push] = self.push(source, sender=by)
            result[f"wrong_{push}"] = self.compare(name)
        sender.close()
        far_sender.close()
        return result

    def shards(self) -> RankShards:
        return RankShards(self.trainer.policy, self.trainer.shared_parameters)

    def apart(self) -> RankShards:
        """As if half of the ranks were on another host than the engines'."""
        world = self.collective.world
        hosts = [2 * rank // world for rank in range(world)]
        return RankShards(self.trainer.policy, self.trainer.shared_parameters, hosts=hosts)

    def num_bytes_on_first_host(self, source: RankShards) -> int:
        """Of parameters that its ranks hold, each once: equal ones have one name."""
        rows, padded = self.trainer.policy.bridge.hf_config.vocab_size, 0
        held, group = {}, parallel_state.get_tensor_model_parallel_group()
        for name, tensor in source._parameters:
            cut = getattr(tensor, "tensor_model_parallel", False) or ".experts." in name
            shard = torch.distributed.get_rank(group) if cut else 0
            held[f"{name} {shard}"] = tensor.nbytes
            if "embedding" in name or "output_layer" in name:
                padded = tensor.shape[0] * (group.size() if cut else 1) - rows
        assert padded == 0, "it would count bytes that no engine has"
        everyone = self.collective.gather(json.dumps(held), str)
        return sum(
            {k: v for i in range(self.collective.world // 2) for k, v in json.loads(everyone[i]).items()}.values()
        )

    def push(
        self, source: RankShards, *, first: int | None = None, sender: WeightSender | None = None, **config: Any
    ) -> dict[str, Any]:
        """A push to the first engines, by a new sender where none is given; what came of it on every rank."""
        self.version += 1
        lasts = sender is not None
        sender = sender or WeightSender(WeightsSyncConfig(**config), self.collective)
        try:
            report = asdict(sender.push(source, self.pool.engines[:first], version=self.version))
            report.pop("seconds")
        except WeightSyncError as error:
            report = {"error": str(error)}
        finally:
            if not lasts:
                sender.close()
        everyone = self.collective.gather(json.dumps(report), str)
        return {"alike": len(set(everyone)) == 1, **report}

    def answers(self) -> list[Any]:
        """Greedy tokens with log-probabilities of every engine."""
        return self.on_engines(self.answers_of)

    def answers_of(self, engine: Engine) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
        requests = [
            RolloutRequest(
                request_id=str(i), prompt_ids=tuple(range(5 + i, 25 + i)), sampling=sampling, seed=i, group_id=i
            )
            for i in range(2)
        ]
        return [(t.token_ids, t.logprobs) for t in engine.generate(requests)]

    def on_engines(self, ask: Callable[[Engine], Any]) -> list[Any]:
        return self.collective.together("ask", lambda: [ask(engine) for engine in self.pool.engines if engine.alive])

    def compare(self, name: str) -> list[str]:
        """Parameters of engine ranks that differ from what SGLang's own loader makes of the exported policy."""
        target = self.folder / name
        self.trainer.export_hf(target)

        def ask(engine: Engine) -> list[str]:
            found = engine.rank_call(f"{INSPECTION}:digests", b"", timeout_s=60)
            wanted = engine.rank_call(f"{INSPECTION}:digests_of_folder", str(target).encode(), timeout_s=60)
            pairs = [(json.loads(a), json.loads(b)) for a, b in zip(found, wanted, strict=True)]
            assert all(pairs[0])
            return [n for a, b in pairs for n in a if a[n] != b[n]]

        return [n for names in self.on_engines(ask) for n in names]

    def union(self, source: RankShards) -> dict[str, Any]:
        """What all ranks hand over, against `named_weights`."""
        found = [(n, sha256(t)) for tensors in source.rounds(TINY_BUCKET) for n, t in tensors]
        every = [tuple(pair) for part in self.collective.gather(json.dumps(found), str) for pair in json.loads(part)]
        wanted = [(n, sha256(t)) for n, t in self.trainer.named_weights()]
        return {"equal": sorted(every) == sorted(wanted), "once": len({n for n, _ in every}) == len(every)}

    def faults(self, *, killed: bool) -> dict[str, Any]:
        """Every fault, on a rank that is not the first where it can be; the engines answer as before it."""
        shards = self.shards()
        self.push(shards)
        before = self.answers()
        results: dict[str, Any] = {}
        for name, bucket_bytes, number in (("flip", 2**26, 0), ("flip in the last round", TINY_BUCKET, -1)):
            rounds = sum(1 for tensors in shards.rounds(bucket_bytes * 15 // 16) if list(tensors) is not None)
            with replaced("_pack", flipping(number < 0 or self.collective.rank == 1, number % rounds)):
                results[name] = self.push(shards, bucket_bytes=bucket_bytes)
            results[name] |= {"rounds": rounds, "unharmed": self.answers() == before}
        victim = self.victim()
        swap = Edited(shards, swapping(victim))
        self.push(swap)
        results["wrong name"] = {"victims": self.compare("EP2")}
        kills: dict[str, Callable[[], dict[str, Any]]] = {
            "missing": lambda: self.push(Edited(shards, without(victim)), first=1),
            "shape": lambda: self.push(Edited(shards, cut(victim)), first=1),
            "flip while loading": lambda: self.push_with_late_flip(shards),
            "killed": lambda: self.push(Edited(shards, self.killing(victim)), first=1),
            "timeout": lambda: self.push_in_no_time(shards),
        }
        for name, act in kills.items():
            if name == "killed" and not killed:
                continue
            result = act()
            lost = self.collective.any(bool(self.pool.lost()))
            self.collective.together("restart", self.pool.restart_lost)
            again = self.push(shards)
            results[name] = result | {"lost": lost, "again": "error" not in again and self.answers() == before}
        by_plan = self.faults_by_plan(shards, before, killed=killed)
        return results | by_plan | self.faults_between_hosts(before)

    def faults_by_plan(self, shards: RankShards, before: list[Any], *, killed: bool) -> dict[str, Any]:
        """A byte that changes on its way and an engine that dies while it pulls; after each the engines answer as
        before, by buckets at first. In the end a parameter leaves the shared memory."""
        sender = WeightSender(WeightsSyncConfig(), self.collective)
        results: dict[str, Any] = {}
        for name, fault in (("flip by plan", self.flipped), *([("killed by plan", self.dying)] if killed else [])):
            first = self.push(shards, sender=sender)
            plan = sender._plan
            assert plan is not None, first
            with fault(plan):
                result = self.push(shards, sender=sender)
            lost = self.collective.any(bool(self.pool.lost()))
            self.collective.together("restart", self.pool.restart_lost)
            again = [self.push(shards, sender=sender).get("num_rounds") for _ in range(2)]
            same = self.answers() == before
            results[name] = result | {"lost": lost, "first": first["num_rounds"], "again": again, "unharmed": same}
        parameter = next(iter(self.trainer.policy.chunks[0].parameters()))
        parameter.data = parameter.data * 2
        rounds = [self.push(shards, sender=sender).get("num_rounds") for _ in range(2)]
        results["moved"] = {"rounds": rounds, "wrong": self.compare("EP2")}
        sender.close()
        return results

    def faults_between_hosts(self, before: list[Any]) -> dict[str, Any]:
        """The second rank sends a bit that it does not have, or what it had before."""
        apart, sender = self.apart(), WeightSender(WeightsSyncConfig(), self.collective)
        parameters = list(self.trainer._parameters())
        original, kept = Collective.pass_bytes, list[Tensor]()

        def flip(self: Collective, outgoing: Any, incoming: Any) -> None:
            sent = [(data.clone(), to) for data, to in outgoing]
            for data, _ in sent[-1:]:
                data[len(data) // 2] ^= 64
            original(self, sent, incoming)

        def stale(self: Collective, outgoing: Any, incoming: Any) -> None:
            original(self, [(old, to) for old, (_, to) in zip(kept, outgoing, strict=True)], incoming)

        def keep(self: Collective, outgoing: Any, incoming: Any) -> None:
            kept[:] = [data.clone() for data, _ in outgoing]
            original(self, outgoing, incoming)

        results: dict[str, Any] = {}
        for name, fault in (("flip on the link", flip), ("stale on the link", stale)):
            first = self.push(apart, sender=sender)["num_rounds"]
            Collective.pass_bytes = keep  # type: ignore[method-assign]
            self.push(apart, sender=sender)
            torch._foreach_mul_([p.data for p in parameters], 1.5)
            Collective.pass_bytes = fault if self.collective.rank == 1 else original  # type: ignore[method-assign]
            result = self.push(apart, sender=sender)
            Collective.pass_bytes = original  # type: ignore[method-assign]
            torch._foreach_div_([p.data for p in parameters], 1.5)
            lost = self.collective.any(bool(self.pool.lost()))
            self.collective.together("restart", self.pool.restart_lost)
            again = [self.push(apart, sender=sender).get("num_rounds") for _ in range(2)]
            wrong = self.compare("EP2")
            results[name] = result | {"lost": lost, "first": first, "again": again, "unharmed": not wrong}
        sender.close()
        return results

    @contextlib.contextmanager
    def flipped(self, plan: Any) -> Iterator[None]:
        """A bit of rank 1's memory differs between its digest and the engines' copies."""
        if self.collective.rank != 1:
            yield
            return
        digests, span = plan.digests(), plan._order[1][0][0]
        data = self.trainer.shared_parameters[span.memory - min(plan._memories)].data
        data[span.at + 5] ^= 64
        plan.digests = lambda: digests
        yield
        del plan.digests
        data[span.at + 5] ^= 64

    @contextlib.contextmanager
    def dying(self, plan: Any) -> Iterator[None]:
        """The first engine's scheduler dies while it pulls."""

        def killing() -> tuple[int, ...]:
            if self.pool.engines and (ready := self.pool.engines[0].ready) is not None:
                os.kill(ready.scheduler_pids[0], signal.SIGKILL)
            return digests

        digests: tuple[int, ...] = plan.digests()
        plan.digests = killing
        yield
        del plan.digests

    def push_in_no_time(self, source: RankShards) -> dict[str, Any]:
        usual, push_module.BULK_S = push_module.BULK_S, 1e-4
        try:
            return self.push(source, first=1)
        finally:
            push_module.BULK_S = usual

    def push_with_late_flip(self, source: RankShards) -> dict[str, Any]:
        def late(original: Pack) -> Pack:
            def stream(push: Any, call: str, source: RankShards) -> None:
                with replaced("_pack", flipping(self.collective.rank == 1 and call == LOAD, 0)):
                    original(push, call, source)

            return stream

        with replaced("stream", late):
            return self.push(source, first=1)

    def victim(self) -> str:
        return "model.layers.1.mlp.experts.3.down_proj.weight"

    def killing(self, victim: str) -> Edit:
        """The engine's scheduler dies while the second half of the stream is packed."""

        def edit(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
            if self.pool.engines and "layers.1" in name and self.pool.engines[0].alive:
                ready = self.pool.engines[0].ready
                assert ready is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ready.scheduler_pids[0], signal.SIGKILL)
            yield name, tensor

        return edit


class Edited:
    """A source with some tensors changed."""

    on_device = None

    def __init__(self, source: RankShards, edit: Edit) -> None:
        self.hosts, self._source, self._edit = source.hosts, source, edit

    def held(self, capacity_bytes: int) -> None:
        """Nothing."""

    def rounds(self, capacity_bytes: int) -> Iterator[Iterator[tuple[str, Tensor]]]:
        for tensors in self._source.rounds(capacity_bytes):
            yield (pair for name, tensor in tensors for pair in self._edit(name, tensor))


def without(victim: str) -> Edit:
    return lambda name, tensor: [] if name == victim else [(name, tensor)]


def cut(victim: str) -> Edit:
    return lambda name, tensor: [(name, tensor[:-1] if name == victim else tensor)]


def swapping(victim: str) -> Edit:
    """Two experts in each other's place: right bytes under wrong names."""
    other = victim.replace("experts.3", "experts.2")
    names = {victim: other, other: victim}
    return lambda name, tensor: [(names.get(name, name), tensor)]


def flipping(here: bool, number: int) -> Callable[[Pack], Pack]:
    """A bit of the last tensor changes between packing and reading, in the round of this number."""

    def wrap(original: Pack) -> Pack:
        def pack(push: Any, side: int, tensors: Any) -> Any:
            bucket = original(push, side, tensors)
            if here and bucket is not None and push.num_rounds == number:
                push._buffers[side].data[bucket.slots[-1].offset + 5] ^= 64
            return bucket

        return pack

    return wrap


class replaced:  # noqa: N801  (reads as a phrase)
    """A method of the sender's push wrapped for a while."""

    def __init__(self, method: str, wrap: Callable[[Pack], Pack]) -> None:
        self._method, self._original = method, getattr(push_module.Push, method)
        self._wrapped = wrap(self._original)

    def __enter__(self) -> None:
        setattr(push_module.Push, self._method, self._wrapped)

    def __exit__(self, *_: object) -> None:
        setattr(push_module.Push, self._method, self._original)


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


if __name__ == "__main__":
    main()
