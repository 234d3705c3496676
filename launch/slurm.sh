#!/usr/bin/env bash
#SBATCH --job-name=specactor
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@600
#
# Start a run on a Slurm cluster, from the repository, with the environment activated:
#
#   sbatch --nodes 8 launch/slurm.sh qwen3_30b_a3b --model.path /models/Qwen3-30B-A3B \
#       --rollout.speculation.draft-model /models/Qwen3-0.6B --data.train math_train.jsonl --data.eval math_eval.jsonl \
#       --output-dir /shared/runs
#
# --mem=0 is all memory of a node; without it a job has the cluster's default, also with --exclusive.
#
# Slurm ends a job at its --time and does not requeue it. For a longer run submit the same command several times, with
# sbatch --dependency=singleton: each job begins when the one before has ended, and goes on from its last checkpoint.
# 600 s before its --time (give more if a step takes longer: sbatch --signal=USR1@3600) Slurm sends SIGUSR1 to all of the
# job: the run ends after the step it is in, with a checkpoint. So it does after scancel --signal=USR1 JOB, and at a
# pre-emption with a GraceTime where PreemptParameters has send_user_signal (in Slurm 22.05 SlurmctldParameters has
# preempt_send_user_signal); else steps after the last checkpoint are run again. With PreemptMode=REQUEUE Slurm requeues
# a pre-empted job that still runs when its GraceTime is over; one that ended before is requeued by this script.
#
# One torchrun per node starts one rank per GPU; the ranks meet at the job's first node (see launch/multi_node.sh).
# The job id names the meeting, so jobs that share a node do not mix. After a failure the nodes meet again, MAX_RESTARTS
# times (3); a node that died is missed there until Slurm has noticed (SlurmdTimeout) and requeues the job onto others.
# Either way it continues from its last checkpoint, because of --resume auto, with a --resume PATH of yours from there at
# first.
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: sbatch launch/slurm.sh RECIPE [--key.path value ...]" >&2
    exit 2
fi
: "${SLURM_JOB_ID:?start this script with sbatch}"

# Slurm runs a copy of this file, so the repository is where sbatch was called.
root=${SLURM_SUBMIT_DIR:?}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")

export NODES=$SLURM_NNODES
export HEAD="${hosts%%$'\n'*}:$((29500 + SLURM_JOB_ID % 1000))"
export RUN_ID=$SLURM_JOB_ID
export MAX_RESTARTS=${MAX_RESTARTS:-3}
# What ranks send each other proves that it is this job's.
export SPECACTOR_KEY=${SPECACTOR_KEY:-$(od -An -vN32 -tx1 /dev/urandom | tr -d ' \n')}
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05 srun does not take it from sbatch
fi

set -m # srun in a process group of its own: in this shell's, a background process would ignore SIGINT
child= signal=
pass_on() {
    signal=$1
    kill -s "$1" "$child" 2>/dev/null || true
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
trap 'pass_on USR1' USR1
srun --kill-on-bad-exit=1 --wait=60 "$root/launch/multi_node.sh" "$1" --resume auto "${@:2}" &
child=$!
if [[ -n $signal ]]; then pass_on "$signal"; fi # one that came before there was a child
while code=0; wait "$child" || code=$?; kill -0 "$child" 2>/dev/null; do :; done

# A job that ends in its GraceTime is over for Slurm, with any exit code. PreemptTime is None, or missing, where nothing
# pre-empted it, and anew after a requeue; a run that was done ends again at once. Who sends TERM or INT wants no more.
if [[ $signal != TERM && $signal != INT ]] &&
    [[ $(SLURM_TIME_FORMAT=standard scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    # Said before: a requeue ends this script, too.
    echo "specactor: job $SLURM_JOB_ID was pre-empted: Slurm is asked to requeue it; it goes on from its checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$code"
