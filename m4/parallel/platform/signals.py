"""Ctrl-C, SIGTERM and SIGHUP end the program within seconds, at any moment.

A handler raises in the main thread, before its next bytecode. Python swallows what is raised in
callbacks (garbage collection, a destructor), so it is raised again. A half-imported module in C++
would crash, so it is raised after the import. C++ code (a compilation, a wait for another process)
returns to Python late, so a thread ends a process that does not end by itself. Work that must not
be cut off, such as the training loop's last save, runs within `held`; only a second Ctrl-C ends it.
"""

import contextlib
import ctypes
import dataclasses
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds until the thread ends the process: if Python has not run since the signal or after a
# second Ctrl-C, and if an exception is on its way through the program, which cleans up.
_STUCK_SECONDS = 3.0
_CLOSING_SECONDS = 15.0
_PERIOD_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1


class Stopped(KeyboardInterrupt):
    """A signal of NUMBERS came; `status` is the exit status by a shell's convention."""

    status = 128 + signal.SIGINT


@dataclasses.dataclass
class _State:
    first: int | None = None
    raised: bool = False
    thrown: bool = False  # the program was told by an exception of this module
    swallowed: bool = False
    # Conditions of the main thread's active `held` blocks.
    holds: list[Callable[[], bool]] = dataclasses.field(default_factory=list)


_state = _State()


def install() -> dict[int, Any]:
    """Makes NUMBERS raise Stopped in the main thread, and returns the replaced handlers.

    Signals that came while `blocked` also count; ignored signals (nohup) stay ignored.
    """
    sys.unraisablehook = _unraisable
    before = {number: signal.signal(number, _stop) for number in not_ignored()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    return before


def not_ignored() -> list[int]:
    """Returns the signals of NUMBERS that were not ignored when the program started."""
    return [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]


def notice(number: int) -> None:
    """Records that another handler took the signal and will end the program."""
    if _state.first is None:
        _state.first = number
    _state.raised = True


def watch() -> None:
    """Starts the thread that ends the process if it does not end by itself."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Blocks NUMBERS, so that no signal is lost between two handlers.

    They stay blocked in a program that replaces this process (exec), until it calls `install`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def held(condition: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Keeps a signal, which the block notices itself, from ending it while the condition holds."""
    _state.holds.append(condition)
    try:
        yield
    finally:
        _state.holds.remove(condition)


def end_with(parent: int) -> None:
    """Makes this process end with its parent, however that ends, or if it has ended already.

    On Linux the kernel does it, elsewhere a thread that checks every second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent had ended before this call
        os._exit(1)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def check() -> None:
    """Raises Stopped if a signal has come; called before a worker's next task."""
    if _state.first is not None:
        raise _stopped()


def _stopped() -> Stopped:
    error = Stopped()
    error.status = 128 + (_state.first or signal.SIGINT)
    return error


def status_of(error: BaseException) -> int | None:
    """Returns the exit status if a signal caused the error, otherwise None.

    An exception in an import or in C++ may turn into another error, so after a signal all errors
    count as its consequences, except those of a training loop, which ends by itself.
    """
    if _state.thrown and not isinstance(error, SystemExit):
        return 128 + (_state.first or signal.SIGINT)
    return Stopped.status if isinstance(error, KeyboardInterrupt) else None


def message(error: BaseException) -> str:
    """Returns a one-line message for such an error."""
    said = str(error) if isinstance(error, KeyboardInterrupt) else ""
    more = "" if isinstance(error, KeyboardInterrupt) else f" ({type(error).__name__}: {error})"
    return said or " ".join(f"interrupted; run the same command to resume{more}".split())


def _stop(number: int, frame: FrameType | None) -> None:
    if _state.raised and number != signal.SIGINT:
        return  # only a second Ctrl-C interrupts the clean-up after the first signal
    if _within_extension(frame):
        _state.first, _state.swallowed = _state.first or number, True
        return
    notice(number)
    _state.thrown = True
    # An exception must not leave C++ code that called Python: it would abort.
    ctypes.CDLL(None).signal(signal.SIGABRT, _end)
    raise _stopped()


def _within_extension(frame: FrameType | None) -> bool:
    """Returns whether a C++ module is being imported, as half of jaxlib would crash Python."""
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _end(_number: int) -> None:
    os.write(2, b"m4: interrupted; run the same command to resume\n")
    os._exit(128 + (_state.first or signal.SIGINT))


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _state.raised, _state.swallowed = False, True
    else:
        sys.__unraisablehook__(unraisable)


def _watch(reader: int) -> None:
    first, interrupts, since = _state.first, 0, time.monotonic()
    while True:
        waiting = first is not None or _state.swallowed
        if select.select([reader], [], [], _PERIOD_SECONDS if waiting else None)[0]:
            for number in os.read(reader, 4096):
                if number in NUMBERS and (first is None or number == signal.SIGINT):
                    first, since = first or number, time.monotonic()
                    interrupts += number == signal.SIGINT
        if _state.swallowed:
            _state.swallowed = False
            time.sleep(_PERIOD_SECONDS)  # after the code that swallowed it
            # Not SIGINT, which would count as a second Ctrl-C.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if first is None:
            continue
        if interrupts < 2 and any(holds() for holds in [*_state.holds]):
            since = time.monotonic()
        closing = interrupts < 2 and _state.raised
        if time.monotonic() - since > (_CLOSING_SECONDS if closing else _STUCK_SECONDS):
            notice(first)
            _end(first)
