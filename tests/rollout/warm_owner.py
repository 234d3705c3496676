"""A process that owns a warm starter: warm_owner.py NAME. It prints the starter's pid and waits to be killed."""

import os
import sys
from pathlib import Path

from specactor.rollout.warm_starter import NAME, WarmStarter

os.environ.pop(NAME, None)
with WarmStarter(sys.argv[1]):
    print(Path(f"/proc/self/task/{os.getpid()}/children").read_text().strip(), flush=True)
    input()
