"""Errors that the user can fix: one clear line, exit status 2, no traceback."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator

from .cpu import use_free_cores


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
        raise UserError(f"{message} ({type(error).__name__}: {first_line(error)})") from None


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Put the place before the message of an error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def run_main(main: Callable[[], None], out_of_memory="use smaller batches or fewer rows") -> None:
    """Call a script's main(); turn what the user can fix into one line and exit status 2."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # a closed one is None
        setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):  # its encoding may lack a character
            stream.reconfigure(errors="replace")
    use_free_cores()
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as in `... | head`: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UserError as error:
        stop(str(error))
    except OSError as error:
        stop(describe(error))
    except (MemoryError, RuntimeError) as error:
        if "No working C++ compiler" in str(error):
            stop("--compile needs a C++ compiler: install one, or leave it out")
        text = f"{type(error).__name__}: {first_line(error)}".lower()
        if not re.search("memoryerror|out of ?memory|allocate memory", text):
            raise  # a bug of ours keeps its traceback
        stop(f"out of memory: {out_of_memory} ({first_line(error)})")


def stop(message: str) -> None:
    print("error:", *message.splitlines(), file=sys.stderr)  # one line
    sys.exit(2)


def describe(error: Exception) -> str:
    """One line, without the number of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return first_line(error)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
