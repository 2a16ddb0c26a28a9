"""What any such program needs; a reader of the method may skip it. Nothing here imports the core.

Every file imports this package before torch (pyproject.toml sorts it first): what it sets is for
the seconds in which torch is imported.
"""

import signal
import sys
from pathlib import Path


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
