"""Child processes that do not outlive this one, whatever ends it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Final

__all__ = ["Child"]

# The kernel signals a child when the thread that started it ends, so the order must be given in the child (a hook
# between fork and exec is not safe under threads) and the starting thread must live as long as the process.
_DIE_WITH_PARENT: Final = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])\n"
)

_FREEZE_SECONDS: Final = 5.0

_Order = tuple[list[str], dict[str, str], IO[bytes], "Future[subprocess.Popen[bytes]]"]
_orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
_starter_lock = threading.Lock()
_starter: threading.Thread | None = None


def _start_forever() -> None:
    while True:
        argv, environment, output, started = _orders.get()
        try:
            started.set_result(
                subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
        except OSError as error:
            started.set_exception(error)


def _start(argv: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    global _starter
    with _starter_lock:
        if _starter is None or not _starter.is_alive():  # not alive: we are in a forked copy of the process
            _starter = threading.Thread(target=_start_forever, name="softload-children", daemon=True)
            _starter.start()
    started: Future[subprocess.Popen[bytes]] = Future()
    _orders.put((argv, environment, output, started))
    return started.result()


class Child:
    """A running child process. It is killed by the kernel when this process ends, also by SIGKILL.

    Args:
        argv: program (a path) and arguments.
        environment: variables set on top of this process's.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        # Closed with the last reference: the child has its own handle.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        shim = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        self._process = _start([*shim, *argv], {**os.environ, **(environment or {})}, self._output)

    def __repr__(self) -> str:
        state = "running" if self.alive else f"ended with {self._process.returncode}"
        return f"<Child {self.pid} {state}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a stopped one is alive."""
        return self._process.poll() is None

    def output(self, limit: int = 2000) -> str:
        """The last `limit` bytes of what it wrote."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(0, size - limit)
        return os.pread(self._output.fileno(), limit, start).decode(errors="replace")

    def freeze(self) -> None:
        """Stop it where it is; when this returns no thread of it runs any more."""
        self._process.send_signal(signal.SIGSTOP)
        # The signal takes its time to reach every thread, and one that still runs would answer.
        until = time.monotonic() + _FREEZE_SECONDS
        while self.alive and not _is_stopped(self.pid) and time.monotonic() < until:
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it now, also a stopped one; again is no change."""
        self._process.kill()
        self._process.wait()
        if not self._output.closed:
            self._output.close()


def _is_stopped(pid: int) -> bool:
    states = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(task.read_text().rpartition(")")[2].split()[0])
        except FileNotFoundError:  # the thread has ended
            continue
    return all(state in "TtZX" for state in states)
