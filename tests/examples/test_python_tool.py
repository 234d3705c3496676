"""The Python tool keeps what it runs in bounds, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from examples import python_tool
from examples.python_tool import PythonTool, run_python
from specactor.types import Problem


def output(code: str) -> str:
    return asyncio.run(run_python(code))


def processes_with(mark: str) -> list[str]:
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [line.parts[2]] if mark in line.read_text() and "RLIMIT_" in line.read_text() else []
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_it_says_what_is_printed_and_how_it_ended() -> None:
    assert output("print(6 * 7)") == "42\n"
    assert output("import math\nprint(math.factorial(20))") == "2432902008176640000\n"
    assert output("1 / 0").endswith("ZeroDivisionError: division by zero\n\n[ended with status 1]")
    assert "[ended with status 3]" in output("import sys; sys.exit(3)")


def test_processor_time_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "CHILD", python_tool.CHILD.replace('("CPU", 5)', '("CPU", 1)'))
    assert "[ended with status" in output("while True: pass")
    assert "MemoryError" in output("a = bytearray(10**9)")


def test_output_is_bounded() -> None:
    lines = (99 * "a" + "\n") * (python_tool.OUTPUT_BYTES // 100)
    assert output("while True: print('a' * 99)") == f"{lines}\n[cut after {python_tool.OUTPUT_BYTES} bytes]"


def test_wall_time_is_bounded_and_all_that_was_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "WALL_S", 8.0)  # an interpreter may take seconds to start on a busy machine
    code = "import os, time\nos.fork(); os.setsid() if os.getpid() > 1 else 0\nprint('in', flush=True)\ntime.sleep(1e6)"
    text = output(code)
    assert text.startswith("in")  # two processes print, side by side
    assert text.endswith("[ended after 8 s]")
    deadline = time.monotonic() + 60
    while processes_with("RLIMIT_") and time.monotonic() < deadline:
        time.sleep(0.1)  # what was killed may be a while in ending
    assert processes_with("RLIMIT_") == []


def test_there_is_no_network_and_no_file_to_write(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        socket.create_connection(("127.0.0.1", port), 2).close()
        assert "unreachable" in output(code)
    (file := tmp_path / "a").write_text("kept")
    again = "libc.syscall(442, -100, b'/', 0x8000, (ctypes.c_uint64 * 4)(0, 1), ctypes.c_size_t(32))"
    undo = f"import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); print({again}, ctypes.get_errno())"
    for code in (
        f"open({str(file)!r}, 'w')",
        f"import os; os.remove({str(file)!r})",
        f"open({str(file)!r} + 'b', 'w')",
    ):
        for before in ("", f"{undo}\n", f"import ctypes; ctypes.CDLL(None).unshare(0x10020000)\n{undo}\n"):
            assert "Read-only file system" in output(before + code)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "kept"}


def test_where_code_cannot_be_kept_in_bounds_no_conversation_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step would learn from those responses alone that call no tool."""
    problem = Problem(index=0, prompt="6 * 7?", prompt_ids=(1,), answer="42", verifier="", metadata={})
    refused = python_tool.CHILD.replace("if libc.unshare(", "if 1 or libc.unshare(")
    assert refused != python_tool.CHILD
    monkeypatch.setattr(PythonTool, "has_bounds", False, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(python_tool, "CHILD", refused)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no user namespaces"):
                asyncio.run(PythonTool().start(problem))
    asyncio.run(PythonTool().start(problem))
    monkeypatch.setattr(python_tool, "CHILD", refused)
    asyncio.run(PythonTool().start(problem))  # once in a process


def test_code_is_run_and_an_answer_is_scored() -> None:
    problem = Problem(index=0, prompt="6 * 7?", prompt_ids=(1,), answer="42", verifier="", metadata={})

    async def talk() -> tuple[object, ...]:
        tool = PythonTool()
        first = await tool.start(problem)
        return first[1]["content"], await tool.step("So\n```python\nprint(6 * 7)\n```"), await tool.step("# 42")

    assert asyncio.run(talk()) == ("6 * 7?", [{"role": "user", "content": "42\n"}], 1.0)
