#!/usr/bin/env bash
# Start one node's share of a run; call it on every node with the same arguments.
#
#   NODES=2 HEAD=node0.cluster:29500 launch/multi_node.sh RECIPE [--key.path value ...]
#
# Variables
#   NODES      number of nodes (required)
#   HEAD       host:port of one of the nodes, reachable from all (required); the ranks meet there (c10d rendezvous)
#   GPUS       ranks per node; default: the number of GPUs, or 2 without one
#   RUN_ID     name of the meeting; default: specactor. Two runs on the same HEAD need two names
#   MAX_RESTARTS  times that torchrun starts all ranks again after a failure; default 0. Use it with --resume auto
#
# The run folder (--output-dir) and the model must lie on a file system that all nodes share.
# A node that dies ends the run on all nodes; the same command with --resume auto goes on from the last checkpoint.
set -euo pipefail

: "${NODES:?set NODES to the number of nodes}"
: "${HEAD:?set HEAD to host:port of one of the nodes}"
if [[ $# -lt 1 ]]; then
    echo "usage: NODES=n HEAD=host:port $0 RECIPE [--key.path value ...]" >&2
    exit 2
fi

if [[ -z "${GPUS:-}" ]]; then
    GPUS=2
    if command -v nvidia-smi >/dev/null; then
        GPUS=$(nvidia-smi --list-gpus | wc -l)
    fi
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "$GPUS" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD" \
    --rdzv-id "${RUN_ID:-specactor}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    "$root/launch/train_moe.py" "$@"
