"""Hosts on one machine, joined by a link that has a rate and a delay, and that can be cut. Linux, as root.

Each host has its own network, name, boot id, processes, /dev/shm, /run and /etc/hosts, in which its own name leads to
127.0.1.1, as Debian has it. The file system is common, as on a cluster. A thread carries packets between the hosts'
TUN devices: a packet leaves when those before it have, and arrives the delay later.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from specactor.rollout import warm_starter

NETWORK = "10.77.0"
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x40000000, 0x400454CA, 1, 0x1000
_MTU = 65_000
_QUEUE_S = 0.5
"""A packet that would wait for longer before it leaves is dropped, as a router does."""
_START_S = 20.0

_BOOT = """
set -e
hostname n{number}
mount -t tmpfs -o size=8g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount --bind {folder}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
touch {folder}/ready
while :; do sleep 3600 & wait $! || :; done
"""
"""Process 1 of a host; as a shell that waits, it reaps what others leave to it."""


def why_not() -> str:
    """Return why there can be no hosts here, in one line; empty where there can."""
    if os.geteuid() != 0:
        return "hosts on one machine need root"
    if missing := [name for name in ("setpriv", "unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"hosts on one machine need {' and '.join(missing)} (Debian: util-linux, iproute2)"
    try:
        with contextlib.closing(_Tun(os.getpid(), "probe0")):
            pass
    except OSError as error:
        return f"hosts on one machine need /dev/net/tun: {error}"
    tried = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"hosts on one machine need namespaces: {done.stderr.strip()}" if done.returncode else ""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a job on such hosts: this one's programs, and a starter of engines per host."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PATH": path, **more}
    found.pop(warm_starter.NAME, None)
    return found


class _Tun:
    """A TUN device in the network of a process."""

    def __init__(self, pid: int, name: str) -> None:
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{pid}/ns/net") as other:
            if _LIBC.setns(other.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
                except OSError:
                    os.close(self.fd)
                    raise
            finally:
                _LIBC.setns(own.fileno(), _CLONE_NEWNET)

    def close(self) -> None:
        os.close(self.fd)


class Host:
    """One host. It is on from its making until `kill`."""

    def __init__(self, number: int, folder: Path, num_hosts: int) -> None:
        self.number, self.name, self.address = number, f"n{number}", f"{NETWORK}.{number + 1}"
        self.folder = folder / f"{self.name}-{uuid.uuid4().hex[:6]}"
        self.folder.mkdir(parents=True)
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        others = [f"{NETWORK}.{k + 1} n{k}\n" for k in range(num_hosts) if k != number]
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n{''.join(others)}")
        script = _BOOT.format(number=number, folder=self.folder)
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        dies = ["setpriv", "--pdeathsig", "KILL"]  # with this process, however it ends
        self._outer = subprocess.Popen(
            [*dies, "unshare", *spaces, "bash", "-c", script, self.name], start_new_session=True
        )
        deadline = time.monotonic() + _START_S
        while not (self.folder / "ready").exists():
            if self._outer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start")
            time.sleep(0.02)
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self.pid = int(children.read_text().split()[0])
        self.tun = _Tun(self.pid, "net0")
        setting = f"ip addr add {self.address}/24 dev net0; ip link set net0 mtu {_MTU} up"
        subprocess.run(["nsenter", "--net", "-t", str(self.pid), "sh", "-ec", setting], check=True)

    def start(
        self, command: Sequence[str], *, log: IO[str] | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program on this host, in the current folder."""
        # SIGKILL of nsenter would leave the program; the host's end ends it.
        entered = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--ipc", "--mount", "--pid", f"--wd={os.getcwd()}"]
        return subprocess.Popen(
            [*entered, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )

    def processes(self) -> dict[int, str]:
        """Return the processes of this host that have not ended, but for its first and that one's: pid here -> what."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns/pid") == space:
                        words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                        state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                        if state not in "ZX" and words != "sleep 3600":
                            found[int(entry.name)] = words
        return found

    def left(self) -> list[str]:
        """Return what programs have left: processes, files in /dev/shm, ports that are listened at."""
        shared = [str(path) for path in Path(f"/proc/{self.pid}/root/dev/shm").iterdir()]
        tables = [Path(f"/proc/{self.pid}/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        ports = [f"port {int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3] == "0A"]
        return [*self.processes().values(), *shared, *ports]

    def kill(self) -> None:
        """Switch the host off: everything there ends at once, and nobody is told."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._outer.pid, signal.SIGKILL)
        self._outer.wait()
        self.tun.close()


class VirtualHosts:
    """A number of hosts and the link between them, as a context."""

    def __init__(self, number: int, *, delay_s: float = 0.0, bits_per_s: float = 0.0) -> None:
        """
        Args:
            delay_s: from one host to another.
            bits_per_s: what a host can send; 0: as fast as this machine carries it.
        """
        self.delay_s, self.s_per_byte = delay_s, 8 / bits_per_s if bits_per_s else 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="virtual-hosts-"))
        self._folder.chmod(0o755)
        self.hosts: list[Host] = []
        self.sent_bytes = [0] * number
        """By each host, to others; all of what it sent, whether it arrived or not."""
        self.cut: set[int] = set()
        """Hosts that nothing reaches, and that reach nobody."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._free_s = [0.0] * number
        """When each host's packets will have left."""
        self._order = itertools.count()
        self._carried: list[tuple[float, int, int, bytes]] = []
        self._carrier = threading.Thread(target=self._carry, name="link", daemon=True)
        try:
            for k in range(number):
                self.hosts.append(Host(k, self._folder, number))
        except BaseException:
            self.close()
            raise
        self._carrier.start()

    def __enter__(self) -> VirtualHosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def kill(self, number: int) -> None:
        """Switch one host off, and leave it off."""
        with self._lock:
            self.hosts[number].kill()
            self.cut.add(number)

    def boot(self, number: int) -> None:
        """Start a host again that was killed: as a machine it is another."""
        host = Host(number, self._folder, len(self.hosts))
        with self._lock:
            self.hosts[number] = host
            self.cut.discard(number)

    def close(self) -> None:
        self._stop.set()
        if self._carrier.is_alive():
            self._carrier.join()
        for host in self.hosts:
            if host.number not in self.cut or host._outer.poll() is None:
                host.kill()
        shutil.rmtree(self._folder)

    def _carry(self) -> None:
        while not self._stop.is_set():
            now = time.monotonic()
            wait_s = min(0.02, max(0.0, self._carried[0][0] - now)) if self._carried else 0.02
            with self._lock:
                on = {host.tun.fd: host.number for host in self.hosts if host._outer.returncode is None}
            ready = select.select(list(on), [], [], wait_s)[0]
            with self._lock:
                for fd in ready:
                    if on[fd] < len(self.hosts) and self.hosts[on[fd]].tun.fd == fd:
                        self._take(on[fd], fd)
                self._deliver()

    def _take(self, number: int, fd: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(fd, _MTU + 100)
            except OSError:  # nothing more, or the host has just ended
                return
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            now = time.monotonic()
            waits_s = self._free_s[number] - now
            if not 0 <= to < len(self.hosts) or {number, to} & self.cut or waits_s > _QUEUE_S:
                continue
            self._free_s[number] = max(now, self._free_s[number]) + len(packet) * self.s_per_byte
            self.sent_bytes[number] += len(packet)
            heapq.heappush(self._carried, (self._free_s[number] + self.delay_s, next(self._order), to, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._carried and self._carried[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._carried)
            if to not in self.cut:
                with contextlib.suppress(OSError):  # its queue is full, or it has just ended
                    os.write(self.hosts[to].tun.fd, packet)
