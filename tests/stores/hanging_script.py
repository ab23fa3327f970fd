"""Run by `test_process_exit`: a read hangs on a frozen owner; the script ends in the way that its argument names."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time

# Before softload's own exit function is registered, so that this one runs after it.
at_exit: list[str] = []
atexit.register(lambda: at_exit and subprocess.Popen(at_exit))

from softload.stores import EmbeddedMooncakeStore  # noqa: E402
from softload.testing.store_suite import Buffer  # noqa: E402

SIZE = 1 << 20


def main(ending: str) -> None:
    store = EmbeddedMooncakeStore(segment=32 << 20, lease=1.0, owners=1)
    store.open()
    buffer = Buffer(SIZE)
    store.register(buffer.pointer, SIZE)
    store.put_start(["k"], [SIZE])
    store.put_write(["k"], [buffer.pointer], [SIZE])
    assert list(store.put_end(["k"])) == [0]
    assert list(store.read(["k"], [buffer.pointer], [SIZE])) == [SIZE]
    owner, master = store.cluster.owners[0], store.cluster.master
    assert master is not None
    owner.freeze()
    threading.Thread(target=store.read, args=(["k"], [buffer.pointer], [SIZE]), daemon=True).start()
    while not store.calls_out:
        time.sleep(0.001)
    time.sleep(0.2)  # into the native call: nothing tells when it is there
    print(owner.pid, master.pid, flush=True)
    if ending == "closed":
        store.close()
    if ending == "returns":  # while the interpreter is ending
        at_exit.extend(["sh", "-c", f"sleep 0.05; kill -CONT {owner.pid}"])
    print(time.time(), flush=True)
    if ending == "status":
        sys.exit(7)
    if ending == "raises":
        raise RuntimeError("the script's own")
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


main(sys.argv[1])
