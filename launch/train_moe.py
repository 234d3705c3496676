"""Start one rank of a training run.

    torchrun --nproc-per-node N launch/train_moe.py RECIPE [--key.path value ...]
    python launch/train_moe.py RECIPE --help

It prepares the process, meets the other ranks under a failure guard, and calls `specactor.run.run`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import warnings

PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Ask Linux to kill this rank when torchrun dies, however torchrun dies."""
    if sys.platform != "linux" or "LOCAL_RANK" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def keep_signal() -> None:
    """SIGUSR1 stays pending, where the run looks for it after each step (failure.py). All threads, engines and other
    processes of this rank inherit that, since Slurm sends it to all of a job; torchrun must ignore it (multi_node.sh).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # an ignored signal need not stay


def set_environment() -> None:
    """What libraries read once, when they are imported; what the user has set stays."""
    # torchrun sets OMP_NUM_THREADS=1 by itself. More threads than cores wait for each other in spin locks.
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),  # Megatron-core overlaps tensor parallelism with one queue per device
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_OFFLINE", "1"),
        ("WANDB_SILENT", "true"),
    ):
        os.environ.setdefault(name, value)


def allow_open_files() -> None:
    """A rank has a socket for every other rank in each group; what it starts inherits the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def quiet_libraries() -> None:
    """Hide what `specactor doctor` says better, and what is no business of the user."""
    warnings.filterwarnings("ignore", module=r"(megatron|mbridge)\b")
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of libraries that are compiled on their first import
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\b")
    # With expert parallelism ranks legitimately hold different optimizers; resuming is tested per layout.
    logging.getLogger("megatron.core.dist_checkpointing.validation").setLevel(logging.ERROR)


def main() -> int:
    die_with_launcher()
    keep_signal()
    allow_open_files()
    set_environment()
    quiet_libraries()
    from specactor.recipes import load_or_exit

    config = load_or_exit(sys.argv[1:], quiet=os.environ.get("RANK", "0") != "0")
    if "RANK" not in os.environ:
        command = f"torchrun --nproc-per-node N launch/train_moe.py {' '.join(sys.argv[1:])}"
        print(f"error: launcher: got plain python, expected torchrun. Use: {command}", file=sys.stderr)
        return 2

    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    from specactor.rollout.warm_starter import WarmStarter

    # It imports what engines need while this rank imports what a trainer needs. Only one rank of a machine starts it.
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    starter = WarmStarter(f"specactor-starter-{run_id}-{os.getppid()}", starts=local_rank == 0)
    from specactor.cpu import megatron

    megatron.install()  # before megatron.core is imported; does nothing where there is a GPU
    from specactor.parallel.collective import end_in_groups
    from specactor.parallel.failure import failure_guard, launcher_store
    from specactor.parallel.meeting import HostWatch, meet
    from specactor.recipes import to_json

    head, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        with starter, failure_guard(rank, launcher_store(head, port)) as failures:
            meeting = meet(head, port, rank=rank, world=world, config=to_json(config))
            failures.use(meeting.open_store())
            with HostWatch(meeting, rank, failures.on_silent, failures.on_reported):
                from specactor.run import run

                store = meeting.open_store()
                run(config, rank=rank, local_rank=local_rank, world=world, head=head, failures=failures, store=store)
    except SystemExit as failed:
        end_in_groups(failed.code)
        raise
    return 0


if __name__ == "__main__":  # saving a checkpoint starts processes that import this file
    sys.exit(main())
