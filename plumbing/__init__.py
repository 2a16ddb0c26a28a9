"""What any such program needs; a reader of the method may skip it. Nothing here imports the core.

Every file imports this package before torch (pyproject.toml sorts it first), because two settings
work only then.
"""

import os
import signal
import sys
from pathlib import Path

# Threads that wait for each other spin before they sleep. With another busy program on the machine
# the default, a very long spin, makes decoding several times slower.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def is_own_command() -> bool:
    """Was a script of this project started, and not a program that imports it?"""
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if main_file is None:
        return False
    root = Path(__file__).resolve().parent.parent
    folders = Path(main_file).resolve().parents
    return folders[0] == root or root / "apps" in folders or root / "bench" in folders


# Importing torch takes seconds. Ctrl-C ends that quietly; errors.run_main gives it back to Python.
if is_own_command() and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
