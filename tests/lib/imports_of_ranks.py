"""What ranks of the main job import: `ranks.py` has it imported once, in the process that forks them."""

import gc

from launch import train_moe

train_moe.set_environment()
train_moe.quiet_libraries()

from specactor.cpu import megatron  # noqa: E402

megatron.install()  # as every rank does: it changes torch, and only its first call does anything

import torch.distributed.launcher.api  # noqa: E402, F401

import specactor.run  # noqa: E402, F401

gc.collect()
gc.freeze()  # else a child's first collection writes to every page
