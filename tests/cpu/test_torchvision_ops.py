"""torchvision is watched for once, however often that is asked for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from specactor.cpu import torchvision_ops
before = len(sys.meta_path)
for _ in range(3):
    torchvision_ops.install()
print("FINDERS", len(sys.meta_path) - before)
import torchvision
torchvision_ops.install()
print("FINDERS", len(sys.meta_path) - before)
"""


def test_torchvision_is_watched_for_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("FINDERS")]
    assert said == ["FINDERS 1", "FINDERS 0"], done.stderr
