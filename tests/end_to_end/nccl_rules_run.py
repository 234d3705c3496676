"""The main job, whose default group stands for NCCL's; each rank writes down what went through it.

Usage: as launch/train_moe.py, with NCCL_RULES set to a folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import train_moe


def main() -> int:
    train_moe.set_environment()
    train_moe.quiet_libraries()
    from specactor.cpu import megatron

    megatron.install()
    from specactor.rollout.pool import EnginePool
    from tests.lib import nccl_rules

    nccl_rules.install()
    real = EnginePool.generate

    def generate(*args: Any, **named: Any) -> Any:
        with nccl_rules.generating():
            return real(*args, **named)

    EnginePool.generate = generate  # type: ignore[method-assign]
    try:
        return train_moe.main()
    finally:
        calls = [[*call, count] for call, count in nccl_rules.calls.items()]
        (Path(os.environ["NCCL_RULES"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(calls))


if __name__ == "__main__":
    raise SystemExit(main())
