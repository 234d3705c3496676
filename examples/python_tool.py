"""An environment with a Python tool: code in a response is run in a child process, and its output is what comes next.

    {"prompt": "How many primes are below 1000?", "answer": "168", "verifier": "examples.python_tool:PythonTool"}

The child has bounds on processor time, memory, wall time and output; it has no network, neither writes nor removes
files, and whatever it starts ends with it. It reads what its user may read but for /tmp and /run, where other processes
have their sockets, so run it as a user who may read little. What it prints is untrusted: it reaches the model as text,
and cannot become a special token. A child ends with its call; an environment that keeps one for a whole conversation
ends it in `async def close(self)`.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence

from specactor.data.chat import Message
from specactor.data.verifiers import get_verifier
from specactor.types import Problem

CPU_S, WALL_S, MEMORY_BYTES, OUTPUT_BYTES = 5, 10.0, 2**29, 2000
NO_NAMESPACES = 97
"""Exit status where the system has no user namespaces for this user, or cannot make all files read-only in one."""

CHILD = f"""
import ctypes, os, resource, signal, sys
libc = ctypes.CDLL(None)
if libc.unshare(0x10000000 | 0x40000000 | 0x20000000 | 0x20000 | 0x8000000):  # user, network, process, mount, IPC
    os._exit({NO_NAMESPACES})
# All mounts read-only, which needs Linux 5.12; nobody's sockets; and then no right to undo that, nor to get it back.
read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
failed = libc.syscall(442, -100, b"/", 0x8000, read_only, ctypes.c_size_t(32))
for folder in (b"/tmp", b"/run"):
    failed = failed or os.path.isdir(folder) and libc.mount(b"none", folder, b"tmpfs", ctypes.c_ulong(1), None)
if failed or libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), bytes(24)) or libc.prctl(38, 1, 0, 0, 0):
    os._exit({NO_NAMESPACES})
if pid := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 127)
libc.prctl(1, signal.SIGKILL)  # dies with its parent; and with it, the first of its namespace, all that it started
code = sys.stdin.read()
for kind, most in (("CPU", {CPU_S}), ("AS", {MEMORY_BYTES}), ("FSIZE", 0), ("CORE", 0), ("NPROC", 64)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
exec(compile(code, "<tool>", "exec"), {{"__name__": "__main__"}})
"""


async def run_python(code: str) -> str:
    """What the code prints, and how it ended if not well. Raises RuntimeError where it cannot be kept in bounds."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-u", "-c", CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={},
        cwd="/",
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    output, ending = b"", ""
    try:
        async with asyncio.timeout(WALL_S):
            with contextlib.suppress(ConnectionError):
                child.stdin.write(code.encode("utf-8", "replace"))
                await child.stdin.drain()
                child.stdin.close()
            while len(output) <= OUTPUT_BYTES and (part := await child.stdout.read(OUTPUT_BYTES)):
                output += part
            if len(output) <= OUTPUT_BYTES and (status := await child.wait()):
                ending = f"\n[ended with status {status}]"
            elif len(output) > OUTPUT_BYTES:
                ending = f"\n[cut after {OUTPUT_BYTES} bytes]"
    except TimeoutError:
        ending = f"\n[ended after {WALL_S:g} s]"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    if child.returncode == NO_NAMESPACES:
        raise RuntimeError(
            "this system has no user namespaces for this user, or a Linux before 5.12: the tool would have a network, "
            "and could remove files"
        )
    return output[:OUTPUT_BYTES].decode("utf-8", "replace") + ending


class PythonTool:
    """A response with a block of Python is answered with what that prints; one without is scored, as a number."""

    has_bounds = False  # whether this process has tried

    async def start(self, problem: Problem) -> Sequence[Message]:
        if not PythonTool.has_bounds:  # else a step would learn from the responses that call no tool alone
            await run_python("")
            PythonTool.has_bounds = True
        self.problem = problem
        rule = "Code between ```python and ``` is run, and you see its output. Then answer with # and a number."
        return [{"role": "system", "content": rule}, {"role": "user", "content": problem.prompt}]

    async def step(self, response: str) -> Sequence[Message] | float:
        code = re.search(r"```python\n(.*?)```", response, re.DOTALL)
        if code is None:
            return get_verifier("number")(response, self.problem)
        return [{"role": "user", "content": await run_python(code[1])}]
