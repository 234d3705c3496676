"""A Slurm cluster on virtual hosts: the controller on the first, a node on each. Debian: slurm-wlm, munge."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path

from benchmarks.virtual_hosts import Host, VirtualHosts

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel", "runuser")
UP_S = 60.0
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=20
MinJobAge=3600
KillWait=5
MpiDefault=none
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=600
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing() -> str:
    """Say which programs are not here; empty where all are."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    names = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"Slurm needs {', '.join(names)} (Debian: apt-get install slurm-wlm munge)" if names else ""


class SlurmCluster:
    """Up when it has been made; it ends with its hosts."""

    def __init__(self, hosts: VirtualHosts, folder: Path) -> None:
        """
        Args:
            folder: a new one, which the user munge can reach.
        """
        self.hosts, self.folder = hosts, folder
        nodes = "\n".join(
            f"NodeName={h.name} NodeAddr={h.address} CPUs={os.cpu_count()} RealMemory=4000 State=UNKNOWN"
            for h in hosts.hosts
        )
        first = hosts[0]
        for name in ("state", *(f"spool-{host.name}" for host in hosts.hosts)):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(first=first, folder=folder, nodes=nodes))
        self._key = folder / "munge.key"
        self._key.write_bytes(os.urandom(1024))
        self._key.chmod(0o400)
        os.chown(self._key, pwd.getpwnam("munge").pw_uid, -1)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] += ":/usr/sbin"
        for host in hosts.hosts:
            self._munge(host)
        self.ask("slurmctld")
        for host in hosts.hosts:
            self.ask("slurmd", "-N", host.name, host=host)
        deadline = time.monotonic() + UP_S
        while self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") != str(len(hosts.hosts)):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.3)

    def _munge(self, host: Host) -> None:
        files = [("socket", "/run/munge/socket"), ("pid-file", "/run/munge/pid"), ("seed-file", "/run/munge/seed")]
        options = [f"--{name}={file}" for name, file in [*files, ("log-file", "/run/munge/log")]]
        self.ask("install", "-d", "-o", "munge", "-m", "755", "/run/munge", host=host)
        command = ["runuser", "-u", "munge", "--", "munged", "--force", f"--key-file={self._key}", *options]
        self.ask(*command, host=host)

    def ask(self, *command: str, host: Host | None = None, cwd: Path | None = None, **more: str) -> str:
        """Run a program on a host, by default the first; return what it prints."""
        entered = ["nsenter", "-t", str((host or self.hosts[0]).pid), "--net", "--uts", "--ipc", "--mount", "--pid"]
        done = subprocess.run(
            [*entered, f"--wd={cwd or self.folder}", *command],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def told(self) -> str:
        """Return the end of the controller's log."""
        return (self.folder / "slurmctld.log").read_text()[-4000:]

    def state(self, job: str) -> str:
        """Return a job's state, and behind a blank its nodes."""
        fields = dict(word.split("=", 1) for word in self.ask("scontrol", "show", "job", job).split() if "=" in word)
        return f"{fields['JobState']} {fields.get('NodeList', '')}"

    def left(self) -> list[str]:
        """What runs on the hosts that are on beside Slurm itself."""
        found = [what for host in self.hosts.hosts if host.number not in self.hosts.cut for what in self._others(host)]
        return found

    def _others(self, host: Host) -> list[str]:
        daemons = ("slurmctld", "slurmd ", "munged ", ": slurmscriptd")
        return [what for what in host.processes().values() if not what.removeprefix("/usr/sbin/").startswith(daemons)]
