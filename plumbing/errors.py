"""Errors that the user can fix: one clear line, exit status 2, no traceback."""

import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator


class UserError(ValueError):
    """Something the user can fix. The message says what is wrong, where, and what to do."""


@contextlib.contextmanager
def failure_as(message: str) -> Iterator[None]:
    """Turn any exception that a stranger's file causes in a library into a UserError.

    A panic of Rust code (tokenizers) is a BaseException, as Ctrl-C is.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"{message} ({type(error).__name__}: {first_line})") from None


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Put the place before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def require(package: str, how_to_install: str) -> None:
    """Raise UserError if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed: pip install {how_to_install}")


def run_main(main: Callable[[], None], out_of_memory="use smaller batches or fewer rows") -> None:
    """Call a script's main(); turn what the user can fix into one line and exit status 2."""
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as in `... | head`: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError) as error:
        stop(str(error))
    except (MemoryError, RuntimeError) as error:
        if not re.search("memoryerror|out of ?memory|allocate memory", repr(error).lower()):
            raise  # a bug of ours keeps its traceback
        stop(f"out of memory: {out_of_memory} ({error})")


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that temporary files are removed on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def stop(message: str) -> None:
    print("error:", *message.splitlines(), file=sys.stderr)  # one line
    sys.exit(2)
