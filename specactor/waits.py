"""How long one waits, in seconds. PURE. Each name has one meaning wherever it is used, and one reason for its value.

Invariants: signs of life come several times within `SILENT_S`, and twice within `GRACE_S`; who waits for one that has
`GRACE_S` waits longer than that.
"""

from __future__ import annotations

LOOK_EVERY_S = 0.05
"""Between two looks at what tells nobody that it has changed. Nobody notices so little, and a look takes microseconds."""
RETRY_PAUSE_S = 0.5
"""Before what failed is tried again, doubled every further time: a process or a server is back no sooner."""
MOMENT_S = 1.0
"""What takes milliseconds has happened by then, however busy the machine is."""
SIGN_OF_LIFE_S = 2.0
"""Between two signs of life: one or two may be lost or late before somebody thinks of `GRACE_S`, and they cost little:
a packet, or a file's time."""
GRACE_S = 5.0
"""What somebody gets to finish: a batch that reads prompts, a file, an orderly end, a report that others ask for."""
LATE_S = 2 * GRACE_S
"""From here on who was to finish, or to import and begin, is late: it is ended, or others go on without it."""
SILENT_S = 30.0
"""A peer without any sign of life for so long is lost: machines and networks have stalled for seconds and come back."""
ANSWER_S = 60.0
"""Longest wait for an answer: a process may have to import, to build kernels or to finish a long batch before it."""
BULK_S = 300.0
"""Longest wait for somebody who reads or copies gigabytes, as all hosts do from one disk: they differ by minutes."""
