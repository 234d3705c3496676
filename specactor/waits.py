"""How long one waits, in seconds. PURE. Each name has one meaning wherever it is used, and one reason for its value.

Invariants: several signs of life come within `SILENT_S`, and two within `GRACE_S`; who waits for somebody that has
`GRACE_S` waits longer than that.
"""

from __future__ import annotations

LOOK_EVERY_S = 0.1
"""Between two looks at what tells nobody that it has changed. It is too short to be noticed, and long beside what
a look costs."""
RETRY_PAUSE_S = 0.5
"""Before what failed is tried again, doubled every further time. A process or a server is not back any sooner."""
MOMENT_S = 1.0
"""What usually takes milliseconds has happened by then, however busy the machine is."""
SIGN_OF_LIFE_S = 2.0
"""Between two signs of life. One may be lost or late, and another comes within `GRACE_S`; they cost a packet, or a
file's time."""
GRACE_S = 5.0
"""What a process gets to finish: a batch that reads prompts takes seconds, as do a file and an orderly end."""
LATE_S = 2 * GRACE_S
"""Who was to finish, or to import and begin, is late from then on: it is ended, or others go on without it."""
SILENT_S = 30.0
"""Without a word for so long, a peer is lost, and a server is not there. Both do stall for seconds, and come back."""
ANSWER_S = 60.0
"""Longest wait for an answer. A process may have to import, to build kernels or to finish a long batch before it."""
BULK_S = 300.0
"""Longest wait for somebody who reads or copies gigabytes: hosts that read from one disk differ by minutes."""
