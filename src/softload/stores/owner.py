"""A process that owns memory of the store: run as a script, it imports nothing of this package and ends when told to.

The directory of this file must not be on the module path (`python -P`): it holds a `mooncake.py` of ours.
"""

from __future__ import annotations

import argparse
import signal
import sys


def main() -> int:
    """Mount a segment at a master, say "ready", and wait for a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", required=True)
    parser.add_argument("--segment", required=True, type=int)
    parser.add_argument("--host", default="127.0.0.1", help="the address that others reach it by")
    arguments = parser.parse_args()
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(arguments.host, "P2PHANDSHAKE", arguments.segment, 1 << 20, "tcp", "", arguments.master)
    if code != 0:
        print(f"setup answered {code}", file=sys.stderr, flush=True)
        return 1
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
