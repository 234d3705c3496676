"""Script: parts of a round, of learning and of weight syncs on pretended devices, beside the CPU. Prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state

from specactor.cpu import torchvision_ops

torchvision_ops.install()
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.state_capturer.base import BaseDeviceCache, BaseTopkCapturer  # noqa: E402

from specactor.config import AlgorithmConfig, WeightsSyncConfig  # noqa: E402
from specactor.cpu import layers  # noqa: E402
from specactor.device_memory import HostCopies  # noqa: E402
from specactor.errors import WeightSyncError  # noqa: E402
from specactor.rollout.sglang import responses, sampling, verify_batch, verify_worker  # noqa: E402
from specactor.rollout.sglang.gpu import to_host  # noqa: E402
from specactor.rollout.speculation.verification import DraftTree, accepted_path, chain, merged  # noqa: E402
from specactor.trainer import microbatch  # noqa: E402
from specactor.trainer.objective import PolicyObjective  # noqa: E402
from specactor.types import TrainSequence  # noqa: E402
from specactor.weights_sync import digest, memory  # noqa: E402
from specactor.weights_sync.memory import SharedCopy  # noqa: E402
from specactor.weights_sync.messages import CHECK, COMMIT, LOAD, PLAN, PULL, Holding  # noqa: E402
from specactor.weights_sync.plan import Held, held, index  # noqa: E402
from specactor.weights_sync.receiver import Receiver  # noqa: E402
from specactor.weights_sync.sender import WeightSender  # noqa: E402
from tests.lib.simulated_cuda import Mode, Waits, simulated  # noqa: E402

VOCAB, COLUMNS, CACHED = 50, 24, 7
TREES = [merged([[1, 2], [45, 3], [4]]), chain([37, 43]), DraftTree(), chain([38, 6, 7])]
"""Some of these tokens are drawn: in a branch, all of a chain, the first of one."""
ROWS = sum(tree.num_rows for tree in TREES)


def batch_on(device: str) -> tuple[Any, Any]:
    """(a batch of requests with every kind of sampling, its pool)"""
    count = len(TREES)
    info = SimpleNamespace(
        temperatures=torch.ones(count, 1, device=device),
        top_ps=torch.tensor([1.0, 0.8, 1.0, 1.0], device=device),
        top_ks=torch.tensor([1 << 30, 1 << 30, 1, 5], dtype=torch.int32, device=device),
        min_ps=torch.zeros(count, device=device),
        sampling_seed=torch.arange(count, device=device),
        logit_bias=None,
        sampling_mask_batch_indices=None,
        need_min_p_sampling=False,
    )
    reqs = [
        SimpleNamespace(
            origin_input_ids=[0] * (CACHED - 2 + i), output_ids=[1, 2, 3], kv=SimpleNamespace(req_pool_idx=i)
        )
        for i in range(count)
    ]
    table = torch.arange(COLUMNS)[None, :] + 100 * torch.arange(20)[:, None]
    pool = SimpleNamespace(req_to_token=table.to(device, torch.int32), free_slots=list(range(count, 20)), size=20)
    lengths = torch.tensor([CACHED + i for i in range(count)], device=device)
    batch = SimpleNamespace(
        seq_lens=lengths,
        req_pool_indices=torch.arange(count, device=device),
        sampling_info=info,
        reqs=reqs,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        orig_seq_lens=lengths.to(torch.int32),
    )
    return batch, pool


def draw(_: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool) -> tuple[torch.Tensor, None]:
    """As SGLang's sampler is called; the noise is another one."""
    columns = torch.arange(VOCAB, device=probs.device)
    noise = ((info.sampling_seed[:, None] * 131 + positions[:, None] * 17 + columns) % 97).float() / 97
    return (probs.log() + (noise if simple else 2 * noise)).argmax(-1), None


def one_round(device: str, rounds: int = 1, known: list[int] | None = None) -> list[Any]:
    """Arrange, sample, keep: all that a round does besides SGLang's forward pass. `known`: tokens for a wrong version,
    which does not wait for its own."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    batch, pool = batch_on(device)
    reqs, found = batch.reqs, []
    info, lengths, requests = batch.sampling_info, batch.seq_lens, batch.req_pool_indices
    for _ in range(rounds):
        batch.reqs, batch.sampling_info, batch.seq_lens, batch.req_pool_indices = reqs, info, lengths, requests
        rows, places = verify_batch.Rows.of(TREES), verify_batch.Branches(pool, page_size=1)
        last_tokens, cached = [req.output_ids[-1] for req in reqs], [*map(verify_batch.num_cached, reqs)]
        verify_batch.spread(batch, rows, last_tokens=last_tokens, cached=cached, req_to_token=pool.req_to_token)
        places.place(batch, rows)
        probs = (logits / batch.sampling_info.temperatures).softmax(-1)
        positions = batch.seq_lens - 1
        tokens, _mask = sampling.sample_by_kind(draw, None, probs, batch.sampling_info, positions, False)
        output = SimpleNamespace(next_token_logprobs=probs.log()[:, 0])
        result = SimpleNamespace(next_token_ids=tokens, logits_output=output)
        if known is None:
            samples = verify_worker.Worker._samples(SimpleNamespace(meanwhile=lambda: None), result)
        else:
            output.next_token_logprobs, samples = to_host(output.next_token_logprobs), known
        paths = []
        for i, (req, tree) in enumerate(zip(reqs, TREES, strict=True)):
            paths.append(accepted_path(tree, samples[rows.starts[i] : rows.starts[i + 1]]))
            places.keep(req, verify_batch.num_cached(req), tree, paths[-1])
        places.give_back()
        verify_worker._emit(result, samples, rows, paths, lengths)
        found = [batch.seq_lens_cpu.tolist(), paths, samples, output.next_token_logprobs, result.new_seq_lens]
    found += [batch.seq_lens, batch.out_cache_loc, batch.input_ids, pool.req_to_token, result.next_token_ids]
    return [x.cpu().tolist() if isinstance(x, torch.Tensor) else x for x in found]


class Parameter:
    """As much of one as an optimizer's is looked at."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


def away_and_back(device: str, *, waits: bool) -> list[Any]:
    """The optimizer's tensors in host memory for two rollouts; what is on the host meanwhile, and after all. A wrong
    version waits for nothing."""
    parameter = Parameter(torch.arange(6.0).to(device))
    of_the_model = torch.ones(2, dtype=torch.bfloat16).to(device)
    inner = SimpleNamespace(
        param_groups=[{"params": [parameter, Parameter(of_the_model)]}],
        state={parameter: {"exp_avg": torch.full((6,), 2.5).to(device), "step": torch.tensor(3.0)}},
    )
    module = torch.nn.Sequential(torch.nn.Module())
    module[0].register_buffer("embedding", torch.arange(4.0).to(device))
    copies = HostCopies()
    seen: list[Any] = []
    right = torch.cuda.synchronize
    if not waits:
        torch.cuda.synchronize = lambda *_: None
    try:
        for _ in range(2):
            copies.offload([inner], [module])
            seen.append([parameter.data.device.type, parameter.data.tolist()])
            assert module[0].embedding.device.type == "cpu"
            assert inner.param_groups[0]["params"][1].data is of_the_model, "updates would not reach the model"
            copies.reload([inner], torch.device(device), [module])
            parameter.data = parameter.data + 1
    finally:
        torch.cuda.synchronize = right
    state = inner.state[parameter]
    back = [parameter.data, state["exp_avg"], module[0].embedding]
    return [*seen, *(x.cpu().tolist() for x in back), [str(x.device) for x in (*back, state["step"])]]


class Group:
    """Of context parallelism."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.ranks - 1


def learning(device: str) -> tuple[list[Any], list[Any]]:
    """(packed micro-batches and their rotary embedding, their attention), on one rank and on the second of two."""
    sequences = [
        TrainSequence(token_ids=tuple(range(n)), prompt_len=2, advantage=1.0 - n, rollout_logprobs=(-0.5,) * (n - 2))
        for n in (9, 5, 8)
    ]
    found: list[torch.Tensor] = []
    attended = []
    for ranks in (1, 2):
        shape = microbatch.Shape(context=ranks, context_rank=ranks - 1, tensor=1)
        items = microbatch.items_of(sequences, [0.1] * 20, None, None)
        made = microbatch.build(items, shape, torch.device(device))
        found += [value for value in vars(made).values() if isinstance(value, torch.Tensor)]
        boundaries = made.packed.cu_seqlens_q_padded
        rows = int(made.tokens_1T.shape[1])
        heads = torch.randn(rows * ranks, 2, 8, generator=torch.Generator().manual_seed(1)).to(device)
        angles = torch.randn(16, 1, 1, 8, generator=torch.Generator().manual_seed(2)).to(device)
        turned = layers.rotate_packed(heads[:rows], boundaries, angles, cp_group=Group(ranks))
        buckets, output_rows_T = layers.plan_packed(boundaries.tolist(), ranks, ranks - 1, boundaries.device)
        scale = SimpleNamespace(softmax_scale=0.3)
        padded = [layers.PackedAttention._attend(scale, bucket, turned, heads, heads) for bucket in buckets]
        found.append(turned)
        attended.append(torch.cat(padded).index_select(0, output_rows_T).flatten())
    return [x.cpu().tolist() for x in found], [x.cpu().tolist() for x in attended]


def loss(device: str, waits: Waits) -> tuple[int, list[float]]:
    """Reads of the device while a micro-batch's loss and statistics are computed, and these."""
    sequences = [
        TrainSequence(
            token_ids=tuple(range(n)),
            prompt_len=2,
            advantage=1.0,
            rollout_logprobs=(-1.0,) * (n - 2),
            num_stale=num_stale,
        )
        for n, num_stale in ((9, 3), (5, 0))
    ]
    items = microbatch.items_of(sequences, [0.1, 0.2], None, None)
    batch = microbatch.build(items, microbatch.Shape(1, 0, 1), torch.device(device))
    logits = torch.randn(1, 14, VOCAB, generator=torch.Generator().manual_seed(3)).to(device)
    alone = {"get_tensor_model_parallel_group": lambda: None, "get_context_parallel_world_size": lambda: 1}
    before = len(waits.reads)
    with patch.multiple(parallel_state, **alone):
        value, sums = PolicyObjective(AlgorithmConfig(), 1.0)(batch, logits)
    return len(waits.reads) - before, [float(found) for found in (value, *sums.values())]


class Model:
    """Of an engine: one parameter, [4, 3]."""

    def __init__(self, device: str, damage: Callable[[], None]) -> None:
        self.weight, self._damage = torch.zeros(4, 3, device=device), damage

    def parameters(self) -> Iterator[torch.Tensor]:
        yield self.weight

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._damage()
            self.weight[int(name[-1])].copy_(tensor)


class Engine:
    """Of a rank of the trainer, on another device; its one rank answers as a process would."""

    index = 0

    def __init__(self, device: str, damage: Callable[[], None]) -> None:
        self.receiver, self.killed = Receiver(), False
        nothing = {"begin_weight_update": lambda: None, "end_weight_update": lambda: None, "flush_cache": lambda: None}
        self.rank = SimpleNamespace(model=Model(device, damage), tp_rank=0, **nothing)

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        calls = {CHECK: self.receiver.check, LOAD: self.receiver.load, COMMIT: self.receiver.commit}
        calls |= {PLAN: self.receiver.plan, PULL: self.receiver.pull}
        with Mode():  # type: ignore[no-untyped-call]
            return [calls[name](self.rank, payload)]

    @property
    def alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True


class Source:
    """The trainer's weights, in as many rounds as rows, or in one."""

    hosts = (0,)
    on_device = None

    def __init__(self, weight: torch.Tensor, rounds: int) -> None:
        self.weight, self._rounds = weight, rounds

    def held(self, capacity_bytes: int) -> None:
        """Nothing: engines do not read a GPU's memory."""

    def rounds(self, capacity_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        rows = [(f"row.{i}", row) for i, row in enumerate(self.weight.unbind(0))]
        each = len(rows) // self._rounds
        yield from (rows[start : start + each] for start in range(0, len(rows), each))


class Columns(Source):
    """The engine's rows are columns here, so that a plan has runs of one element; held in a copy of the host."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.t(), 1)
        self.on_device = SharedCopy([torch.empty(3, device=weight.device), weight])  # of others, and then these
        start, numbers = self.on_device.starts[1], torch.arange(weight.numel()).view(weight.shape).t().numpy()
        tensors = [
            Held(f"row.{i}", 4 * len(row), held(index([row]), range(weight.numel()), memory=0, at=start, item_bytes=4))
            for i, row in enumerate(numbers)
        ]
        self._holding = Holding(addresses=(self.on_device.buffer.address(),), tensors=tuple(tensors))

    def held(self, capacity_bytes: int) -> Holding:  # type: ignore[override]
        self.on_device.refresh()
        return self._holding


class Alone:
    """A job of one rank."""

    rank = 0

    def gather(self, value: Any, kind: Any) -> list[Any]:
        return [value]

    def any(self, value: bool) -> bool:
        return value

    def barrier(self) -> None: ...


def weight_sync(trainer: str, engine: str, rounds: int, *, damaged: bool = False) -> list[Any]:
    """What the engine has after a push, or why it has not."""
    weight = torch.arange(12.0).view(4, 3).to(trainer)
    sender = WeightSender(WeightsSyncConfig(), Alone())  # type: ignore[arg-type]

    def damage() -> None:
        if damaged:
            sender._buffers[0].data[4] = 77

    target = Engine(engine, damage)
    try:
        sender.push(Source(weight, rounds), [target], version=1)  # type: ignore[list-item]
    except WeightSyncError as error:
        return [str(error), target.killed]
    finally:
        sender.close()
    return [target.rank.model.weight.cpu().tolist(), str(target.rank.model.weight.device)]


def weight_pulls(trainer: str, engine: str, waits: Waits) -> list[Any]:
    """What the engine has after a push, one by the plan, and one whose bytes change in the host's copy."""
    weight = torch.arange(12.0).view(3, 4).to(trainer)
    sender, source = WeightSender(WeightsSyncConfig(), Alone()), Columns(weight)  # type: ignore[arg-type]
    target, found = Engine(engine, lambda: None), list[Any]()
    for version in (1, 2, 3):
        before = len(waits.reads)
        report = sender.push(source, [target], version=version)  # type: ignore[list-item]
        reads = len(waits.reads) - before
        found.append([target.rank.model.weight.cpu().tolist(), report.num_rounds, report.note, reads])
        weight.mul_(10)
    refresh = source.on_device.refresh

    def damaged() -> None:
        refresh()
        source.on_device.buffer.data[64 + 17] ^= 4

    source.on_device.refresh = damaged  # type: ignore[method-assign]
    try:
        sender.push(source, [target], version=4)  # type: ignore[list-item]
    except WeightSyncError as error:
        found.append([str(error), target.killed])
    return found


def pull_that_lacks_a_wait(trainer: str, engine: str, where: Any, name: str, instead: Any) -> dict[str, Any]:
    """What came of three pulls with that function in the place of the one that waits; before, all is right."""
    weight = torch.arange(12.0).view(3, 4).to(trainer)
    sender, source = WeightSender(WeightsSyncConfig(), Alone()), Columns(weight)  # type: ignore[arg-type]
    target, error = Engine(engine, lambda: None), ""
    for version in (1, 2):
        sender.push(source, [target], version=version)  # type: ignore[list-item]
    right = torch.equal(target.rank.model.weight.cpu(), weight.t().cpu())
    with patch.object(where, name, instead):
        for version in (3, 4, 5):
            weight.mul_(10)
            try:
                sender.push(source, [target], version=version)  # type: ignore[list-item]
            except (WeightSyncError, RuntimeError) as problem:  # the latter is the simulation's own
                error = str(problem)
                break
    raised(torch.cuda.synchronize)  # what is due is not left to others
    return {"right before": right, "error": error}


def read_at_once(totals: Any) -> tuple[int, ...]:
    """Digests, read without a wait."""
    return tuple(int(total.inner) & (2**64 - 1) for total in totals)


def digests(device: str) -> list[Any]:
    data = torch.arange(1000, dtype=torch.int64).to(device).view(torch.uint8)
    target = torch.zeros(8000, dtype=torch.uint8, device=device)
    same = digest.copy_with_digest(target, data) == digest.digest_of(target)
    target[4321] ^= 16
    return [same, digest.digest_of(target) == digest.digest_of(data)]


def experts(device: str, waits: Waits, *, ours: bool, synchronizes: bool = True) -> list[Any]:
    """Reads of two passes and between them, and the experts that the host has in the end, by slot."""
    capturer = BaseTopkCapturer.__new__(BaseTopkCapturer)
    capturer.topk_size, capturer.host_cache = 2, SimpleNamespace(buffer=torch.zeros(8, 3, 2, dtype=torch.int32))
    capturer.device_cache = BaseDeviceCache(4, 3, 2, device, "experts")
    outputs, before = [], len(waits.reads)
    for slots in ([5, 1, 2], [3, 1]):  # the second pass writes to a slot again, and over the buffer of the first
        capturer.device_cache.buffer += len(slots)
        locations = torch.tensor(slots).to(device, non_blocking=True)
        named = {
            "forward_batch": SimpleNamespace(out_cache_loc=locations, out_cache_loc_virtual=None),
            "can_run_graph": False,
            "cuda_graph_batch": None,
            "no_copy_to_cpu": False,
        }
        end = BaseTopkCapturer.on_forward_end
        spec = SimpleNamespace(speculative_num_draft_tokens=9 if ours else None)
        with patch.object(runtime_context, "get_spec", lambda spec=spec: spec):
            output = responses.copy_with_tokens(end, capturer, **named)
        if output is not None:
            output.map_device_tensors(lambda x: torch.empty(x.shape, dtype=x.dtype).copy_(x, non_blocking=True))
            outputs.append(output)
    reads = len(waits.reads) - before
    for output in outputs:
        if synchronizes:
            torch.cuda.synchronize()
        output.finalize()
    return [reads, capturer.host_cache.buffer[:, 2, 1].tolist()]


def raised(work: Callable[[], Any]) -> str:
    try:
        work()
    except (RuntimeError, IndexError) as error:
        return str(error)
    return ""


def main(library: Path) -> None:
    found: dict[str, Any] = {"cpu": one_round("cpu"), "learning, cpu": learning("cpu")}
    found["loss, cpu"] = loss("cpu", Waits())
    with simulated(library) as waits:
        found["cuda"] = one_round("cuda")
        before = len(waits.reads)
        one_round("cuda", rounds=11)
        eleven = len(waits.reads) - before
        before = len(waits.reads)
        one_round("cuda", rounds=1)
        found["reads of ten rounds"] = eleven - (len(waits.reads) - before)
        one, other = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        found["no wait"] = one_round("cuda", known=found["cpu"][2])
        found["mixed"] = [raised(lambda: one + other), raised(lambda: one + torch.ones(2))]
        found["learning, cuda"] = learning("cuda")
        found["loss, cuda"] = loss("cuda", waits)
        found["weights"] = [weight_sync("cuda:0", "cuda:3", rounds) for rounds in (1, 4)]
        found["damaged"] = weight_sync("cuda:0", "cuda:3", 1, damaged=True)
        found["damaged, cpu"] = weight_sync("cpu", "cpu", 1, damaged=True)
        found["pulls"] = weight_pulls("cuda:0", "cuda:3", waits)
        found["pulls that lack a wait"] = {
            "of the trainer's copies": pull_that_lacks_a_wait(
                "cuda:0", "cuda:3", torch.cuda, "synchronize", lambda *_: None
            ),
            "of the engine's copies": pull_that_lacks_a_wait("cuda:0", "cuda:3", memory, "read_totals", read_at_once),
        }
        found["digests"] = digests("cuda")
        found["experts"] = {
            "ours": experts("cuda", waits, ours=True),
            "SGLang's": experts("cuda", waits, ours=False),
            "no wait": raised(lambda: experts("cuda", waits, ours=True, synchronizes=False)),
        }
        found["offload"] = away_and_back("cuda", waits=True)
        found["no waits"] = raised(lambda: found.update({"poisoned": away_and_back("cuda", waits=False)}))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
