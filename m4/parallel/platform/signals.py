"""Ctrl-C, SIGTERM and SIGHUP end the program at every moment, within seconds.

A handler raises in the main thread, before its next bytecode. Python swallows what is raised in its
callbacks (garbage collection, a destructor): it is raised again. A module in C++ that is half
imported crashes: it is raised after the import. C++ (a compilation, a wait for another process)
returns to Python late: a thread ends a process that does not end by itself. What must not be cut
off stands within `held`, as the training loop's last save; only a second Ctrl-C ends that.
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
# Until the thread ends the process: where Python has not run since the signal, or after a second
# Ctrl-C; and where an exception is on its way through the program, which removes and closes.
_STUCK_SECONDS = 3.0
_CLOSING_SECONDS = 15.0
_PERIOD_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1


class Stopped(KeyboardInterrupt):
    """One of NUMBERS came; `status` is the program's exit status, as shells have it."""

    status = 128 + signal.SIGINT


@dataclasses.dataclass
class _State:
    first: int | None = None
    raised: bool = False
    thrown: bool = False  # the program knows by an exception of this module
    swallowed: bool = False
    # Conditions of the `held` blocks that the main thread is in.
    holds: list[Callable[[], bool]] = dataclasses.field(default_factory=list)


_state = _State()


def install() -> dict[int, Any]:
    """Makes NUMBERS raise Stopped in the main thread, and returns the replaced handlers.

    Signals that came while they were `blocked` count too; those that were ignored (nohup) stay so.
    """
    sys.unraisablehook = _unraisable
    before = {number: signal.signal(number, _stop) for number in not_ignored()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    return before


def not_ignored() -> list[int]:
    """Returns those of NUMBERS that the program was not started to ignore."""
    return [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]


def notice(number: int) -> None:
    """Notes that another handler has taken the signal and will end the program by itself."""
    if _state.first is None:
        _state.first = number
    _state.raised = True


def watch() -> None:
    """Starts the thread that ends a process which does not end by itself."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Blocks NUMBERS, so that none is lost between two handlers.

    They stay blocked in the program that replaces this process (exec), until it calls `install`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def held(condition: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Keeps one signal, which the block notices, from ending it while the condition is true."""
    _state.holds.append(condition)
    try:
        yield
    finally:
        _state.holds.remove(condition)


def end_with(parent: int) -> None:
    """Has this process killed when its parent ends, however that ends, or has ended already.

    On Linux the kernel does it, elsewhere a thread that looks every second.
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
    """Raises Stopped if a signal has come, before a worker's next task."""
    if _state.first is not None:
        raise _stopped()


def _stopped() -> Stopped:
    error = Stopped()
    error.status = 128 + (_state.first or signal.SIGINT)
    return error


def status_of(error: BaseException) -> int | None:
    """Returns the exit status where a signal caused the error, else None.

    An exception in an import or in C++ may come out as another error: after a signal all errors but
    a training loop's, which ends by itself, count as its consequences.
    """
    if _state.thrown and not isinstance(error, SystemExit):
        return 128 + (_state.first or signal.SIGINT)
    return Stopped.status if isinstance(error, KeyboardInterrupt) else None


def message(error: BaseException) -> str:
    """Returns the message for such an error, in one line."""
    said = str(error) if isinstance(error, KeyboardInterrupt) else ""
    more = "" if isinstance(error, KeyboardInterrupt) else f" ({type(error).__name__}: {error})"
    return said or " ".join(f"interrupted; run the same command to resume{more}".split())


def _stop(number: int, frame: FrameType | None) -> None:
    if _state.raised and number != signal.SIGINT:
        return  # only a second Ctrl-C interrupts what the first signal has begun
    if _within_extension(frame):
        _state.first, _state.swallowed = _state.first or number, True
        return
    notice(number)
    _state.thrown = True
    # C++ that called Python may not be left by an exception: it aborts.
    ctypes.CDLL(None).signal(signal.SIGABRT, _end)
    raise _stopped()


def _within_extension(frame: FrameType | None) -> bool:
    """Tells if a module in C++ is being imported: half of jaxlib would crash the interpreter."""
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
            time.sleep(_PERIOD_SECONDS)  # what has swallowed it ends
            # Not SIGINT, which would be a second Ctrl-C.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if first is None:
            continue
        if interrupts < 2 and any(holds() for holds in [*_state.holds]):
            since = time.monotonic()
        closing = interrupts < 2 and _state.raised
        if time.monotonic() - since > (_CLOSING_SECONDS if closing else _STUCK_SECONDS):
            notice(first)
            _end(first)
