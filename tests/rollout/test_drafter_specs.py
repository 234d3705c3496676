"""Drafters of a host: where they run, how much they hold, and who may speak to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from specactor.config import Config, EngineConfig, ParallelConfig, SpeculationConfig
from specactor.errors import ConfigError, EngineError
from specactor.parallel.failure import Member, View
from specactor.parallel.layout import ModelShape, place_engine
from specactor.recipes import load
from specactor.rollout.decoupled.transport import Address, DrafterAccess
from specactor.rollout.drafter_start import (
    Host,
    Offer,
    access,
    check_in_engines,
    check_tokenizers,
    drafting_hosts,
    host_of,
    make_specs,
    place,
    with_keys,
)

HOST = Host(ranks=2, engines=2, devices=(0, 1, 2, 3), has_gpus=False)


def config(folder: Path, *, drafters: int = 3, **fields: object) -> Config:
    (folder / "config.json").write_text(
        '{"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 50}'
    )
    base = load(["quickstart_plain"])
    speculation = SpeculationConfig(mode="decoupled", draft_model=str(folder), **fields)  # type: ignore[arg-type]
    return replace(
        base,
        parallel=ParallelConfig(drafters=drafters),
        rollout=replace(
            base.rollout,
            max_new_tokens=8,
            speculation=speculation,
            engine=EngineConfig(max_running_requests=10),
        ),
    )


def test_a_head_does_not_draft_in_a_process_of_its_own(tmp_path: Path) -> None:
    base = config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"architectures": ["LlamaForCausalLMEagle3"], ', 1))
    with pytest.raises(ConfigError, match="which stay in its engine"):
        make_specs(base, HOST, max_position=30, log_dir=tmp_path)


def listed(tmp_path: Path, *drafters: str, mode: str = "auto", processes: int = 3) -> tuple[Config, list[Path]]:
    """Of two draft models; the second has more layers, and room for shorter texts."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    base = config(folders[0])
    shape = (folders[0] / "config.json").read_text()
    (folders[1] / "config.json").write_text(shape.replace('layers": 1', 'layers": 2').replace("50", "20"))
    speculation = SpeculationConfig(mode=mode, drafters=drafters, draft_model=tuple(map(str, folders)))  # type: ignore[arg-type]
    parallel = ParallelConfig(drafters=processes)
    return replace(base, parallel=parallel, rollout=replace(base.rollout, speculation=speculation)), folders


def test_processes_draft_with_the_draft_models_in_turn(tmp_path: Path) -> None:
    made, folders = listed(tmp_path, "decoupled", "suffix", "decoupled:2")
    specs = make_specs(made, HOST, max_position=30, log_dir=tmp_path)
    assert [(spec.drafter, spec.model_dir, spec.context_length, spec.kv_tokens) for spec in specs] == [
        ("decoupled", str(folders[0]), 30, 600),
        ("decoupled:2", str(folders[1]), 20, 400),
        ("decoupled", str(folders[0]), 30, 600),
    ]
    told = View("here"), with_keys(specs)[1]
    reached = access(made, [msgspec.json.decode(msgspec.json.encode(told), type=Offer)], host=View("here"), engine=0)
    assert [address.drafter for address in reached.drafters] == [spec.drafter for spec in specs]
    [second] = make_specs(listed(tmp_path, "decoupled:2", processes=1)[0], HOST, max_position=30, log_dir=tmp_path)
    assert (second.drafter, second.model_dir) == ("decoupled:2", str(folders[1]))


@pytest.mark.parametrize(
    ("mode", "drafters", "in_engines", "in_processes"),
    [
        ("coupled", "suffix", "", ""),
        ("coupled", "model:2", "model:2", ""),
        ("auto", "model mtp", "model", ""),
        ("auto", "model decoupled:2", "model", "decoupled:2"),
        ("auto", "suffix decoupled", "", "decoupled"),
        ("decoupled", "suffix", "", "decoupled"),
        ("coupled", "yours:Class", "model model:2", ""),  # it may be a `ModelDrafter`
        ("auto", "yours:Class decoupled", "", "decoupled"),
        ("off", "model yours:Class", "", ""),
    ],
)
def test_a_draft_model_is_loaded_where_somebody_drafts_with_it(
    mode: str, drafters: str, in_engines: str, in_processes: str
) -> None:
    made = SpeculationConfig(mode=mode, drafters=tuple(drafters.split()), draft_model=("1", "2"))  # type: ignore[arg-type]
    assert [*made.in_engines] == in_engines.split()
    assert [*made.in_processes] == in_processes.split()
    named = {"model": "1", "decoupled": "1", "model:2": "2", "decoupled:2": "2"}
    assert made.in_engines | made.in_processes == {name: named[name] for name in f"{in_engines} {in_processes}".split()}
    assert made.in_use == {*made.in_engines.values(), *made.in_processes.values()}
    told = {*made.unused}  # by a note when a run starts
    assert told == ({"1", "2"} - made.in_use if mode != "off" else set())


def test_in_mode_decoupled_other_drafters_draft_as_well() -> None:
    assert SpeculationConfig(mode="decoupled", draft_model=("1",)).draft_methods == ("decoupled", "suffix")


def test_at_most_one_head(tmp_path: Path) -> None:
    made, folders = listed(tmp_path, "model", "model:2", mode="coupled", processes=0)
    policy = replace(ModelShape.read(folders[0]), max_position=20)
    check_in_engines(made, policy)
    for folder in folders:
        file = folder / "config.json"
        head = '{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9, '
        file.write_text(file.read_text().replace("{", head, 1))
        with pytest.raises(EngineError, match=rf"got an EAGLE-3 head \({folder}\) and no \*.safetensors, expected"):
            check_in_engines(made, policy)  # as an engine would say after it has begun to load the policy
        save_file({"fc.weight": torch.zeros(1)}, folder / "model.safetensors")
        if folder == folders[0]:
            check_in_engines(made, policy)
    with pytest.raises(
        ConfigError, match=r"^rollout.speculation.draft_model: got .*, expected at most one EAGLE-3 head"
    ):
        check_in_engines(made, policy)


@pytest.mark.parametrize(
    ("drafters", "mode", "processes"),
    [(("model", "model:2"), "coupled", 0), (("decoupled", "decoupled:2"), "decoupled", 2)],
)
def test_another_tokenizer(tmp_path: Path, drafters: tuple[str, ...], mode: str, processes: int) -> None:
    made, folders = listed(tmp_path, *drafters, mode=mode, processes=processes)
    policy = tmp_path / "policy"
    policy.mkdir()
    made = replace(made, model=replace(made.model, path=str(policy)))
    for folder in (policy, folders[0]):
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    check_tokenizers(made)  # nothing is known of the second one's
    (folders[1] / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1, "b": 0}}}')
    with pytest.raises(
        ConfigError, match=r"got 'another tokenizer \(.*b: 2 tokens differ\)', expected the policy's\. "
    ):
        check_tokenizers(made)


@pytest.mark.parametrize(
    ("ranks", "placed"),
    [(2, [2, 3, 0]), (4, [0, 1, 2]), (7, [3, 0, 1])],
)
def test_devices_are_those_after_the_ranks(ranks: int, placed: list[int]) -> None:
    assert place(3, replace(HOST, ranks=ranks)) == placed


def test_a_gpu_of_a_rank_is_no_drafters(tmp_path: Path) -> None:
    on_gpus = replace(HOST, has_gpus=True)
    assert place(2, on_gpus) == [2, 3]
    with pytest.raises(ConfigError, match=r"^parallel.drafters: got 3, expected <= 2: this host has 4 GPUs and 2 r"):
        place(3, on_gpus)
    with pytest.raises(ConfigError, match=r"^parallel.drafters: got 1, expected <= 0: "):
        make_specs(config(tmp_path, drafters=1), replace(on_gpus, ranks=8), max_position=30, log_dir=tmp_path)


def test_the_kv_cache_has_room_for_all_engines_of_the_host(tmp_path: Path) -> None:
    (spec,) = make_specs(config(tmp_path, drafters=1), HOST, max_position=200, log_dir=tmp_path)
    assert (spec.context_length, spec.max_requests, spec.kv_tokens) == (50, 20, 1000)
    (spec,) = make_specs(config(tmp_path, drafters=1), HOST, max_position=30, log_dir=tmp_path)
    assert (spec.context_length, spec.kv_tokens) == (30, 600)
    on_gpus = replace(HOST, has_gpus=True)
    (spec,) = make_specs(config(tmp_path, drafters=1), on_gpus, max_position=30, log_dir=tmp_path)
    assert spec.kv_tokens is None
    assert make_specs(load(["quickstart_plain"]), HOST, max_position=30, log_dir=tmp_path) == []


def test_drafters_that_sleep_on_devices_of_engines(tmp_path: Path) -> None:
    base = config(tmp_path)
    lent = replace(base, parallel=ParallelConfig(engines=2))
    host = replace(HOST, own_engines=((2, 0), (3, 1)))
    specs = make_specs(lent, host, max_position=30, log_dir=tmp_path)
    assert [(spec.index, spec.engine, spec.device, spec.kv_tokens) for spec in specs] == [
        (2, 2, 0, 600),
        (3, 3, 1, 600),
    ]
    assert len({spec.log_file for spec in specs}) == 2
    shared = replace(host, own_engines=((0, 0), (1, 1), (2, 0)))
    [spec] = make_specs(lent, shared, max_position=30, log_dir=tmp_path)
    assert (spec.engine, spec.device) == (1, 1), "device 0 is also that of an engine that may be busy"
    assert make_specs(lent, HOST, max_position=30, log_dir=tmp_path) == [], "this rank starts no engine"
    all_shared = replace(host, engines=4, own_engines=((0, 0), (1, 1), (2, 0), (3, 1)))
    alone = replace(host, engines=1, own_engines=((0, 0),))
    for nothing in (all_shared, alone):
        assert make_specs(lent, nothing, max_position=30, log_dir=tmp_path) == []
    assert all(spec.engine is None for spec in make_specs(base, host, max_position=30, log_dir=tmp_path))
    on_gpus = replace(host, has_gpus=True)
    with pytest.raises(ConfigError, match=r"^rollout.engine.max_total_tokens: got None, expected a number of tokens"):
        make_specs(lent, on_gpus, max_position=30, log_dir=tmp_path)
    bounded = replace(lent, rollout=replace(lent.rollout, engine=EngineConfig(max_total_tokens=770)))
    assert [spec.kv_tokens for spec in make_specs(bounded, on_gpus, max_position=30, log_dir=tmp_path)] == [770, 770]


def test_engines_reach_the_drafters_of_their_host_alone(tmp_path: Path) -> None:
    made = config(tmp_path)
    specs = make_specs(made, HOST, max_position=30, log_dir=tmp_path)
    own, addresses = with_keys(specs)
    told, there = (View("here"), addresses), (View("there"), with_keys(specs)[1])
    nobody = View("here"), with_keys([])[1]
    assert nobody == (View("here"), ())
    got = access(made, [nobody, there, told], host=View("here"), engine=4)
    keys = addresses[0].keys
    assert keys is not None
    assert got.drafters == tuple(Address(endpoint=spec.endpoint, keys=keys) for spec in specs)
    assert len({address.endpoint for address in got.drafters}) == 3
    assert all(address.endpoint.startswith("ipc://@") for address in got.drafters), "no other host reaches them"
    assert got.engine == "engine-4"
    assert all(spec.keys is not None and spec.keys.peer == keys.public for spec in own)
    secret = own[0].keys.secret if own[0].keys else ""
    assert secret.encode() not in msgspec.json.encode([told, there])
    assert secret not in repr(own)
    assert access(made, [nobody, told], host=View("elsewhere"), engine=0) == DrafterAccess(engine="engine-0")
    lending = replace(made, parallel=ParallelConfig(engines=2))
    none = access(lending, [nobody], host=View("here"), engine=0)
    assert none == DrafterAccess(engine="engine-0", may_be_none=True), "the engine starts all the same"
    assert msgspec.json.decode(msgspec.json.encode(told), type=Offer) == told


def test_two_launchers_on_a_machine_that_see_other_devices(tmp_path: Path) -> None:
    """Each drives its own engines, with the drafters on their devices; ranks 0-3 and 4-7, an engine on every second."""
    base = config(tmp_path)
    lent = replace(base, parallel=ParallelConfig(engines=4, engine_tensor=2))
    members = [
        Member(machine="m", pid=i, visible="0,1,2,3" if i < 4 else "4,5,6,7", local_rank=i % 4) for i in range(8)
    ]
    views, local_ranks = [member.view for member in members], [member.local_rank for member in members]
    places = [place_engine(i, views, local_ranks, engine_tensor=2, pooled=True) for i in range(4)]
    offers, specs = [], []
    for rank, view in enumerate(views):
        own_engines = tuple((i, first) for i, (owner, first) in enumerate(places) if owner == rank)
        host = replace(HOST, own_engines=own_engines)
        own, addresses = with_keys(make_specs(lent, host, max_position=30, log_dir=tmp_path))
        specs += own
        offers.append((host_of(lent, view), addresses))
    assert [(spec.index, spec.engine, spec.device) for spec in specs] == [(0, 0, 0), (1, 1, 2), (2, 2, 0), (3, 3, 2)]
    assert len({spec.log_file for spec in specs}) == 4
    endpoints = [spec.endpoint for spec in specs]
    for engine, (owner, _) in enumerate(places):
        got = access(lent, offers, host=host_of(lent, views[owner]), engine=engine)
        assert [address.endpoint for address in got.drafters] == (endpoints[:2] if engine < 2 else endpoints[2:])
    assert drafting_hosts(lent, views) == [views[0], views[4]]
    assert host_of(base, views[0]) == host_of(base, views[7]) == View("m"), "drafters with devices of their own"


def spread(folder: Path, **parallel: object) -> Config:
    """Two drafters on each host that gets any, two engines of two ranks each."""
    base = config(folder)
    return replace(base, parallel=ParallelConfig(drafters=2, engines=2, engine_tensor=2, **parallel))  # type: ignore[arg-type]


A, B, C = View("a"), View("b"), View("c")
RANKS = [A, A, B, B, C, C]
"""Engines are on the first two."""


@pytest.mark.parametrize(
    ("hosts", "chosen"),
    [((), [A, B]), ((1, 0), [B, A]), ((0, 1, 2), [A, B, C]), ((2,), [C]), ((1, 2), [B, C])],
)
def test_hosts_that_get_drafters(tmp_path: Path, hosts: tuple[int, ...], chosen: list[View]) -> None:
    assert drafting_hosts(spread(tmp_path, drafter_hosts=hosts), RANKS) == chosen


def test_a_host_that_is_not_there(tmp_path: Path) -> None:
    message = r"^parallel.drafter_hosts: got 3, expected 0..2: the job has 3 hosts. Give numbers in the order of ranks"
    with pytest.raises(ConfigError, match=message):
        drafting_hosts(spread(tmp_path, drafter_hosts=(0, 3)), RANKS)


def test_engines_reach_the_drafters_of_all_hosts_with_the_keys_of_each(tmp_path: Path) -> None:
    made = spread(tmp_path, drafter_hosts=(1, 2))
    specs, offers = [], []
    for rank, view in enumerate(RANKS):
        drafting = drafting_hosts(made, RANKS)
        host = replace(HOST, engines=2, first_drafter=2 * drafting.index(view) if view in drafting else 0)
        ports = iter(f"tcp://10.0.0.{rank}:{number}" for number in (4001, 4002))
        starts = view in drafting and RANKS.index(view) == rank
        found = make_specs(made, host, max_position=30, log_dir=tmp_path, endpoint=ports.__next__) if starts else []
        own, addresses = with_keys(found)
        specs += own
        offers.append((view, addresses))
    assert [spec.index for spec in specs] == [0, 1, 2, 3]
    assert len({spec.log_file for spec in specs}) == 4, "hosts share the run's folder"
    assert {spec.max_requests for spec in specs} == {20}, "each has room for those of all engines"
    there = ["tcp://10.0.0.2:4001", "tcp://10.0.0.2:4002", "tcp://10.0.0.4:4001", "tcp://10.0.0.4:4002"]
    assert [spec.endpoint for spec in specs] == there
    for host_of_engine, order in ((A, there), (B, there), (C, there[2:] + there[:2])):
        got = access(made, offers, host=host_of_engine, engine=1)
        assert [address.endpoint for address in got.drafters] == order, "those of its host first"
        drafters = {spec.endpoint: spec.keys for spec in specs}
        for address in got.drafters:
            theirs = drafters[address.endpoint]
            assert address.keys is not None
            assert theirs is not None
            assert (address.keys.public, address.keys.peer) == (theirs.peer, theirs.public)
    assert len({spec.keys.public for spec in specs if spec.keys}) == 2, "of each host"
    told_to_all = msgspec.json.encode(offers)
    assert not [spec for spec in specs if spec.keys and spec.keys.secret.encode() in told_to_all]
    only_own = access(spread(tmp_path), offers, host=B, engine=1)
    assert [address.endpoint for address in only_own.drafters] == there[:2]


def test_a_draft_model_that_is_not_there(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"^rollout.speculation.draft_model: got .*, expected a folder with"):
        make_specs(made, HOST, max_position=30, log_dir=tmp_path)


def test_a_draft_model_of_experts(tmp_path: Path) -> None:
    made = config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 8}))
    with pytest.raises(ConfigError, match=r"got 'a mixture of 8 experts .*, expected a dense model"):
        make_specs(made, HOST, max_position=30, log_dir=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position": 51}, r"got '50 positions .*, expected as many as the run's longest text has tokens: 51"),
        ({"vocab_size": 10}, r"got '9 tokens in its vocabulary .*, expected at least the policy's 10"),
    ],
)
def test_a_draft_model_that_is_too_small_for_the_policy(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    made = config(tmp_path)
    policy = ModelShape.read(tmp_path)
    within = replace(made.rollout.speculation, mode="coupled", drafters=("model",))
    here = replace(made, parallel=ParallelConfig(), rollout=replace(made.rollout, speculation=within))
    check_in_engines(here, policy)
    with pytest.raises(ConfigError, match=message):
        check_in_engines(here, replace(policy, **changes))
    check_in_engines(made, replace(policy, **changes))  # its own processes draft for requests that fit it


def test_a_draft_model_that_the_engines_ranks_cannot_divide(tmp_path: Path) -> None:
    """As Qwen2.5-0.5B, with 14 heads, on four."""
    made = config(tmp_path)
    within = replace(made.rollout.speculation, mode="coupled", drafters=("model",))
    parallel = ParallelConfig(engine_tensor=7)
    here = replace(made, parallel=parallel, rollout=replace(made.rollout, speculation=within))
    with pytest.raises(
        ConfigError, match=r"^parallel.engine_tensor: got 7, expected a divisor of 2 heads of the draft"
    ):
        check_in_engines(here, ModelShape.read(tmp_path))


def test_a_draft_model_needs_the_positions_of_the_runs_texts_alone(tmp_path: Path) -> None:
    """Heads say 2,048 and Qwen3-0.6B 40,960 beside policies of 262,144: engines have room for a run's longest text."""
    made = config(tmp_path)
    within = replace(made.rollout.speculation, mode="coupled", drafters=("model",))
    made = replace(made, parallel=ParallelConfig(), rollout=replace(made.rollout, speculation=within))
    policy = replace(ModelShape.read(tmp_path), max_position=262_144)
    fits, too_long = (replace(made, train=replace(made.train, tokens_per_microbatch=tokens)) for tokens in (49, 50))
    check_in_engines(fits, policy)
    with pytest.raises(ConfigError, match=r"got '50 positions .*, expected as many as .* tokens: 51"):
        check_in_engines(too_long, policy)
