"""A guarded process that is no engine: guard_script.py FD FOLDER BEHAVIOUR. Writes the pids of its tree to FOLDER/pids.

With the behaviour exit it ends when there is a file FOLDER/exit.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from specactor.rollout import process_guard

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
START_ORPHAN = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""
ORPHAN = [sys.executable, "-c", START_ORPHAN, *SLEEP]


def guarded(folder: Path, behaviour: str) -> None:
    child = subprocess.Popen(SLEEP)
    orphan = int(subprocess.run(ORPHAN, stdout=subprocess.PIPE, text=True, check=True).stdout)
    Path(tempfile.gettempdir(), "rubbish").write_text("x")
    (folder / "pids.new").write_text(f"{os.getpid()} {child.pid} {orphan} {tempfile.gettempdir()}")
    (folder / "pids.new").rename(folder / "pids")
    if behaviour == "exit":
        while not (folder / "exit").exists():
            time.sleep(0.02)
        return
    time.sleep(300)


if __name__ == "__main__":
    process_guard.run_guarded(int(sys.argv[1]), lambda: guarded(Path(sys.argv[2]), sys.argv[3]))
