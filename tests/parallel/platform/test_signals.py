"""Signals end the program at every moment: nothing swallows them, and nothing is cut off."""

import signal
import subprocess
import sys

import pytest

# The work of a job stands at the end; `interrupt` sends a signal while it runs.
PROGRAM = """
import ctypes, gc, os, signal, sys, threading, time
import m4.cli.main
from m4.__main__ import main
from m4.parallel.platform import signals

signals._STUCK_SECONDS, signals._CLOSING_SECONDS = 0.3, 0.6
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)

def interrupt(number, seconds=0.1):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

def wait_in_c():
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def work(arguments):
    signals.watch()
{work}
    return 0

m4.cli.main.main = work
sys.exit(main())
"""
ENDED = "m4: interrupted; run the same command to resume\n"


def run(work: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(work="\n".join(f"    {line}" for line in work.splitlines()))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_closes_what_is_open_and_ends_the_program(number: signal.Signals) -> None:
    done = run(f"interrupt({number:d})\ntry: time.sleep(60)\nfinally: print('closed')")
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "closed\n", ENDED)


@pytest.mark.parametrize(
    "swallowing",
    [
        # Python prints and drops what is raised there: JAX has such a callback, and destructors.
        "def collected(*_):\n"
        "    gc.callbacks.clear()\n"
        "    signal.raise_signal(2)\n"
        "    time.sleep(60)\n"
        "gc.callbacks.append(collected)\n"
        "gc.collect()",
        "class It:\n    def __del__(self): signal.raise_signal(2)\nit = It()\ndel it",
    ],
)
def test_a_swallowed_signal_is_raised_again(swallowing: str) -> None:
    indented = "\n".join(f"    {line}" for line in swallowing.splitlines())
    done = run(f"try:\n{indented}\n    time.sleep(60)\nfinally: print('closed')")
    assert (done.returncode, done.stdout, done.stderr) == (130, "closed\n", ENDED)


@pytest.mark.parametrize(
    "stuck", ["wait_in_c()", "while True:\n    try: time.sleep(60)\n    except BaseException: pass"]
)
def test_a_program_that_does_not_end_by_itself_is_ended(stuck: str) -> None:
    done = run(f"interrupt(15)\n{stuck}")
    assert (done.returncode, done.stderr) == (143, ENDED)


def test_a_signal_waits_for_the_import_of_a_module_in_cpp() -> None:
    """Half of jaxlib, with its other half missing, crashes when the interpreter ends."""
    done = run(
        "from importlib.machinery import ExtensionFileLoader\n"
        "class It(ExtensionFileLoader):\n"
        "    def exec_module(self, module):\n"
        "        signal.raise_signal(15)\n"
        "        time.sleep(0.12)\n"
        "        print('imported')\n"
        "It('x', 'x').exec_module(None)\n"
        "time.sleep(60)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "imported\n", ENDED)


def test_an_error_that_the_signal_became_has_its_status() -> None:
    """The import of jaxlib makes an ImportError of an exception that a handler raises in it."""
    raised = "try: signal.raise_signal(15)\nexcept BaseException: raise ImportError('x') from None"
    done = run(raised)
    assert (done.returncode, done.stderr) == (143, f"{ENDED.rstrip()} (ImportError: x)\n")


def test_an_abort_by_an_exception_in_cpp_has_the_signal_s_status() -> None:
    done = run("try: signal.raise_signal(2)\nexcept BaseException: os.abort()")
    assert (done.returncode, done.stderr) == (130, ENDED)


HELD = """
with signals.held():
    try: wait_in_c()
    finally: print('saved')
"""


def test_what_is_held_is_not_cut_off() -> None:
    unlock = "threading.Timer(1.5, libc.pthread_mutex_unlock, (mutex,)).start()"
    done = run(f"interrupt(15)\n{unlock}\n{HELD}")
    assert (done.returncode, done.stdout, done.stderr) == (143, "saved\n", ENDED)


def test_a_second_ctrl_c_ends_what_is_held() -> None:
    done = run(f"interrupt(2)\ninterrupt(2, 0.2)\n{HELD}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", ENDED)


def test_what_is_ignored_stays_ignored() -> None:
    """A program that nohup starts ignores SIGHUP."""
    code = PROGRAM.format(work="    interrupt(1)\n    time.sleep(0.4)")
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = subprocess.run([sys.executable, "-c", ignoring + code], timeout=60)
    assert done.returncode == 0


def test_no_signal_is_lost_while_the_program_replaces_itself() -> None:
    """The signal comes before exec, and there is no handler yet after it."""
    again = "from m4.__main__ import main; import sys; sys.exit(main())"
    code = (
        "import os, signal, sys\n"
        "from m4.parallel.platform import signals\n"
        "signals.install()\n"
        "with signals.blocked():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', {again!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", ENDED)


def test_a_worker_does_not_outlive_its_parent() -> None:
    worker = (
        "import os, time\n"
        "from m4.parallel.platform.signals import end_with\n"
        "end_with(os.getppid())\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}])\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the worker is there
        process.kill()
        assert process.stdout.read() == "", "the worker closes its end"
