"""launch/train_moe.py with an audit of every response of every step, whatever share of the time that takes."""

from __future__ import annotations

import runpy
from pathlib import Path

from specactor.replay import audit

if __name__ == "__main__":
    audit.SHARE = 10.0
    runpy.run_path(str(Path(__file__).parent.parent / "launch" / "train_moe.py"), run_name="__main__")
