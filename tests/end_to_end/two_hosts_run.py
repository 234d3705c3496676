"""The main job, where every rank lives on a host of its own, as far as it knows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import train_moe


def main() -> int:
    train_moe.set_environment()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the network between them
    import msgspec

    from specactor.parallel.failure import Member

    here = Member.here

    def alone(local_rank: int = 0, *, gpu: str = "") -> Member:
        return msgspec.structs.replace(here(local_rank, gpu=gpu), machine=f"host {local_rank}")

    Member.here = alone  # type: ignore[method-assign,assignment]
    return train_moe.main()


if __name__ == "__main__":
    raise SystemExit(main())
