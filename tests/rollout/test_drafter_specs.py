"""Drafters of a host: where they run, how much they hold, and who may speak to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specactor.config import Config, EngineConfig, ParallelConfig, SpeculationConfig, TailConfig
from specactor.errors import ConfigError
from specactor.recipes import load
from specactor.rollout.drafter_specs import Host, Offer, access, make_specs, offer, place

HOST = Host(ranks=2, engines=2, devices=(0, 1, 2, 3), has_gpus=False)


def config(folder: Path, *, drafters: int = 3, devices: tuple[int, ...] = (), **fields: object) -> Config:
    (folder / "config.json").write_text(
        '{"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 50}'
    )
    base = load(["quickstart"])
    speculation = SpeculationConfig(mode="decoupled", draft_model=str(folder), **fields)  # type: ignore[arg-type]
    return replace(
        base,
        parallel=ParallelConfig(drafters=drafters, drafter_devices=devices),
        rollout=replace(base.rollout, speculation=speculation, engine=EngineConfig(max_running_requests=10)),
    )


@pytest.mark.parametrize(
    ("devices", "ranks", "placed"),
    [((), 2, [2, 3, 0]), ((), 4, [0, 1, 2]), ((), 7, [3, 0, 1]), ((5, 5, 1), 2, [5, 5, 1])],
)
def test_devices_are_those_asked_for_or_those_after_the_ranks(
    devices: tuple[int, ...], ranks: int, placed: list[int]
) -> None:
    assert place(3, devices, replace(HOST, ranks=ranks)) == placed


def test_the_kv_cache_has_room_for_all_engines_of_the_host(tmp_path: Path) -> None:
    (spec,) = make_specs(config(tmp_path, drafters=1), HOST, max_position=200, log_dir=tmp_path)
    assert (spec.context_length, spec.max_requests, spec.kv_tokens) == (50, 20, 1000)
    (spec,) = make_specs(config(tmp_path, drafters=1), HOST, max_position=30, log_dir=tmp_path)
    assert (spec.context_length, spec.kv_tokens) == (30, 600)
    asked = config(tmp_path, drafters=1, drafter_kv_tokens=77)
    assert make_specs(asked, HOST, max_position=30, log_dir=tmp_path)[0].kv_tokens == 77
    on_gpus = replace(HOST, has_gpus=True)
    (spec,) = make_specs(config(tmp_path, drafters=1), on_gpus, max_position=30, log_dir=tmp_path)
    assert spec.kv_tokens is None
    assert make_specs(load(["quickstart"]), HOST, max_position=30, log_dir=tmp_path) == []


def test_drafters_that_sleep_on_devices_of_engines(tmp_path: Path) -> None:
    base = config(tmp_path)
    parallel, rollout = ParallelConfig(engines=2), replace(base.rollout, tail=TailConfig(drafters=True))
    lent = replace(base, parallel=parallel, rollout=rollout)
    host = replace(HOST, own_engines=((2, 0), (3, 1)))
    specs = make_specs(lent, host, max_position=30, log_dir=tmp_path)
    assert [(spec.index, spec.engine, spec.device, spec.kv_tokens) for spec in specs] == [
        (0, 2, 0, 600),
        (1, 3, 1, 600),
    ]
    assert make_specs(lent, HOST, max_position=30, log_dir=tmp_path) == [], "this rank starts no engine"
    assert all(spec.engine is None for spec in make_specs(base, host, max_position=30, log_dir=tmp_path))
    with pytest.raises(ConfigError, match=r"^rollout.speculation.drafter_kv_tokens: got None, expected a number"):
        make_specs(lent, replace(host, has_gpus=True), max_position=30, log_dir=tmp_path)


def test_engines_reach_the_drafters_of_their_host_alone(tmp_path: Path) -> None:
    specs = make_specs(config(tmp_path), HOST, max_position=30, log_dir=tmp_path)
    own, told = offer(specs, "here")
    there = offer(specs, "there")[1]
    nobody = offer([], "here")[1]
    assert nobody == Offer(machine="here")
    got = access([nobody, there, told], machine="here", engine=4)
    assert got.endpoints == tuple(spec.endpoint for spec in specs)
    assert len(set(got.endpoints)) == 3
    assert got.engine == "engine-4"
    assert got.keys is not None
    assert all(spec.keys is not None and spec.keys.engine_public == got.keys.public for spec in own)
    secret = own[0].keys.secret if own[0].keys else ""
    assert secret.encode() not in msgspec.json.encode([told, there])
    assert secret not in repr(own)
    assert access([nobody, told], machine="elsewhere", engine=0).endpoints == ()


def test_a_draft_model_that_is_not_there(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"^rollout.speculation.draft_model: got .*, expected the folder of"):
        make_specs(made, HOST, max_position=30, log_dir=tmp_path)
