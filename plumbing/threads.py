"""As many threads as there are free cores.

torch's threads (libgomp's) meet hundreds of times in a forward, and those that come first spin
until the last one is there. If another program keeps a core busy, one of two threads is often the
last by the length of a time slice: two threads are then two to four times slower than one.
"""

import os
import time
from pathlib import Path

import torch

INTERVAL = 0.25  # seconds between two looks
STAT = Path("/proc/stat")  # of Linux; elsewhere the number of threads stays torch's
CHOSEN_BY_USER = any(name.startswith(("OMP_", "GOMP_", "MKL_")) for name in os.environ)


def used(stat: str) -> float:
    """Seconds of work of all cores since the machine started, of the text of /proc/stat."""
    user, nice, system, _idle, _waiting, interrupts, softirq = map(int, stat.split()[1:8])
    return (user + nice + system + interrupts + softirq) / os.sysconf("SC_CLK_TCK")


class FreeCores:
    """Sets the number of torch's threads, unless the user or the program around us has."""

    def __init__(self):
        self.most = self.chosen = torch.get_num_threads()
        self.enabled = STAT.exists() and not CHOSEN_BY_USER
        self.then = self.look() if self.enabled else None

    def look(self) -> tuple[float, float]:
        """The time now, and the seconds of work that other programs have had, all cores taken."""
        return time.monotonic(), used(STAT.read_text()) - time.process_time()

    def use(self) -> None:
        """Call it before every forward: it looks at the machine now and then."""
        if not self.enabled or time.monotonic() < self.then[0] + INTERVAL:
            return
        if torch.get_num_threads() != self.chosen:  # somebody else sets it
            self.enabled = False
            return
        began, others_then = self.then
        self.then = now, others = self.look()
        busy_cores = (others - others_then) / (now - began)
        # A program that shares its core with one of our threads gets half of it.
        free = os.cpu_count() - int(busy_cores + 0.6)
        self.chosen = max(1, min(self.most, free))
        torch.set_num_threads(self.chosen)


free_cores = FreeCores()
