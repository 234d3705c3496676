"""A trainer rank that owns one engine: parent_script.py SPEC_JSON FOLDER. Writes FOLDER/started, then FOLDER/busy."""

import sys
import threading
from pathlib import Path

import msgspec

from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import EngineSpec
from tests.rollout.conftest import request


def main(spec: EngineSpec, folder: Path) -> None:
    with EnginePool([spec]) as pool:
        _write(folder / "started", str(pool.engines[0].pid))
        pool.wait_ready()
        threading.Timer(0.3, _write, (folder / "busy", "")).start()
        while True:
            pool.generate([request(i, new=140) for i in range(16)])


def _write(file: Path, text: str) -> None:
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=EngineSpec), Path(sys.argv[2]))
