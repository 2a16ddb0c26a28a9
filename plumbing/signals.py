"""What a signal does: stop a loop between two steps, or end a command that has temporary files."""

import contextlib
import os
import signal
import sys

from .processes import say


class StopSignal:
    """Ctrl-C, SIGTERM, a hang-up: the first asks to stop after the step, the second stops at once.

    With several processes every signal only asks: torchrun itself sends two.
    """

    def __init__(self):
        self.number = 0
        self.former = {}
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self.former[number] = signal.signal(number, self.remember)

    def remember(self, number: int, frame: object) -> None:
        self.number = number
        if "LOCAL_RANK" not in os.environ:
            self.restore()
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a print
            say("stopping after this step")

    def restore(self) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that temporary files are removed on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
