"""What a process with an engine does that tells, of each response, how many draft tokens every verify accepted.

It is SpecActor's own. With `ALGORITHM` the engine speculates by SGLang's own worker, and ours is not there; what that
asks of a CPU is in `benchmarks.speculation_speed_kernels`, and the verification of greedy drafts here.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import msgspec
import torch
from torch import Tensor

ALGORITHM = "EAGLE3_HOST_ALGORITHM"
"""Environment variable: arguments of SGLang's server as JSON, of an engine that runs SGLang's own algorithm."""
ACCEPTED = "eagle3.accepted"
"""Rank call: by SGLang's name of each request, accepted draft tokens of every verify since the last call, as SGLang
counts them, and their number by its own count (`spec_verify_ct`, which responses have)."""

WORKER = "eagle3.worker"
"""Rank call: module and name of the class that drafts and verifies."""

_verifies: dict[str, tuple[list[int], int]] = {}


def run(connection: socket.socket) -> None:
    """Serve, as `engine_server.run` does."""
    from specactor.rollout.sglang import backend, engine_server, rank_calls

    rank_calls.RANK_CALLS.update({ACCEPTED: _take, WORKER: _worker})
    if arguments := json.loads(os.environ.get(ALGORITHM, "{}")):
        from benchmarks import speculation_speed_kernels as kernels

        own = backend.server_args
        backend.server_args = lambda spec, **device: own(spec, **device) | arguments
        kernels.install()
        import sgl_kernel

        sgl_kernel.verify_tree_greedy_cpu = verify_tree_greedy_cpu
        from sglang.srt.plugins import load_plugins

        load_plugins()
        kernels.connect()
    _count()
    engine_server.run(connection)


def _count() -> None:
    from sglang.srt.managers.schedule_batch import Req

    own = Req.update_spec_correct_drafts_histogram

    def counted(req: Any, accepted: int) -> None:
        _verifies[req.rid] = ([*_verifies.get(req.rid, ([], 0))[0], int(accepted)], int(req.spec_verify_ct))
        own(req, accepted)

    Req.update_spec_correct_drafts_histogram = counted


def _take(_: Any, __: bytes) -> bytes:
    taken = msgspec.json.encode(_verifies)
    _verifies.clear()
    return taken


def _worker(rank: Any, _: bytes) -> bytes:
    kind = type(rank.draft_worker)
    return f"{kind.__module__}.{kind.__name__}".encode()


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down each request's tree, to the child that is the target's likeliest token, as long as there is one.

    Args: candidates, links and target_predict [B, N]; the results are written to the first three arguments.
    """
    tokens, rows, likeliest = candidates.tolist(), retrive_index.tolist(), target_predict.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for b, wanted in enumerate(likeliest):
        path = [0]
        while len(path) < accept_index.shape[1]:
            child = children[b][path[-1]]
            while child != -1 and tokens[b][child] != wanted[path[-1]]:
                child = siblings[b][child]
            if child == -1:
                break
            path.append(child)
        places = [rows[b][node] for node in path]
        predicts[places] = torch.tensor([wanted[node] for node in path], dtype=predicts.dtype)
        accept_index[b, : len(places)] = torch.tensor(places, dtype=accept_index.dtype)
        accept_token_num[b] = len(places) - 1
