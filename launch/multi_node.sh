#!/usr/bin/env bash
# Start one node's share of a run; call it on every node with the same arguments.
#
#   NODES=2 HEAD=node0.cluster:29500 launch/multi_node.sh RECIPE [--key.path value ...]
#
# Variables
#   NODES      number of nodes (required)
#   HEAD       host:port of one of the nodes, reachable from all (required); the ranks meet there (c10d rendezvous)
#   GPUS       ranks per node; default: the number of GPUs, or 2 where there is no nvidia-smi, or it sees none
#   RUN_ID     name of the meeting; default: specactor. Two runs on the same HEAD need two names
#   MAX_RESTARTS  times that this node starts torchrun again after a failure; default 0. Use it with --resume auto. They
#              are counted anew after a start that lasted FORGIVE_S seconds (43200: half a day)
#   HEAD_S     seconds that this node tries to reach HEAD at the first start; default 60 (600 at least when it is started again)
#
# The run folder (--output-dir) and the model must lie on a file system that all nodes share.
# A node that dies or is cut off ends the run on all nodes within a minute. With MAX_RESTARTS the others wait for it in
# the next meeting, for ten minutes: start the same command there again, and the run goes on from the last checkpoint.
# SIGUSR1 to this script on any node ends the run after the step it is in, with a checkpoint; while the script pauses
# before it starts torchrun again, it ends instead.
set -euo pipefail
set -m  # torchrun in a process group of its own, which gets this script's signals once

: "${NODES:?set NODES to the number of nodes}"
: "${HEAD:?set HEAD to host:port of one of the nodes}"
if [[ $# -lt 1 ]]; then
    echo "usage: NODES=n HEAD=host:port $0 RECIPE [--key.path value ...]" >&2
    exit 2
fi

if [[ -z "${GPUS:-}" ]]; then
    GPUS=0
    if command -v nvidia-smi >/dev/null; then
        if ! found=$(nvidia-smi --list-gpus 2>&1); then # other nodes have GPUs: two ranks on CPUs would keep them waiting
            echo "specactor: nvidia-smi fails: $found Mend the driver, or set GPUS to the number of ranks." >&2
            exit 1
        fi
        GPUS=$(grep -c '^GPU ' <<<"$found" || true)
    fi
    if [[ $GPUS == 0 ]]; then GPUS=2; fi
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

child= pauses= signal=
ask_to_end() {
    signal=USR1
    if [[ -n $pauses ]]; then return 0; fi
    # Again and again: ranks that are only starting do not heed it yet. They are torchrun's children; images may have no
    # pkill, and kernels no /proc/PID/task/TID/children.
    while
        for rank in $(grep -lsx "PPid:.$child" /proc/[0-9]*/status); do
            rank=${rank#/proc/}
            kill -USR1 "${rank%/status}"
        done
        kill -0 "$child"
    do sleep 5; done &>/dev/null &
}
trap 'signal=TERM; kill -TERM "$child" 2>/dev/null || true' TERM
trap 'signal=INT; kill -INT "$child" 2>/dev/null || true' INT
trap ask_to_end USR1 # its ranks: the run ends after the step, with a checkpoint

python3 "$root/launch/head_port.py" "$HEAD" || [[ $? != 3 ]] || exit 1

# Each start is a whole new torchrun: its own --max-restarts would keep a store, and where that host dies, nothing.
restarts=${MAX_RESTARTS:-0}
head_s=${HEAD_S:-60} # how long torchrun tries to reach HEAD; when it is started again, that node may have to start, too
for ((left = restarts; ; left--)); do
    began=$SECONDS
    (
        trap '' USR1 # torchrun would die of it, and Slurm sends it to every process of a job
        exec setpriv --pdeathsig KILL torchrun \
            --nnodes "$NODES" \
            --nproc-per-node "$GPUS" \
            --rdzv-backend c10d \
            --rdzv-endpoint "$HEAD" \
            --rdzv-conf "read_timeout=$head_s" \
            --rdzv-id "${RUN_ID:-specactor}" \
            "$root/launch/train_moe.py" "$@"
    ) &
    child=$!
    if [[ $signal == USR1 ]]; then ask_to_end; fi # signals that came before there was a child
    if [[ $signal == TERM || $signal == INT ]]; then kill -s "$signal" "$child" 2>/dev/null || true; fi
    while code=0; wait "$child" || code=$?; kill -0 "$child" 2>/dev/null; do :; done
    if ((SECONDS - began >= ${FORGIVE_S:-43200})); then left=$restarts; fi # no loop of crashes
    if [[ $code == 0 || -n $signal || $left -le 0 ]]; then exit "$code"; fi
    echo "specactor: $(hostname): torchrun ended with $code and is started again, $left times at most" >&2
    head_s=$((head_s > 600 ? head_s : 600))
    pauses=1
    sleep 20 & # until other hosts' ranks have ended as well (failure.py): their launcher refuses whoever comes before
    child=$!
    [[ -n $signal ]] || wait "$child" || true
    if [[ -n $signal ]]; then
        kill "$child" 2>/dev/null || true
        exit "$code"
    fi
    pauses=
done
