"""An owner of a drafter process: owner_script.py SPEC. Writes the guard's pid when it listens, and waits."""

import sys
import time

import msgspec

from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.supervisor import DrafterProcess

if __name__ == "__main__":
    drafter = DrafterProcess(msgspec.json.decode(sys.argv[1], type=DrafterSpec))
    drafter.wait_ready()
    print(drafter.pid, flush=True)
    time.sleep(300)
