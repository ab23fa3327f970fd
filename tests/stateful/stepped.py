"""The machine where loads of a few objects are admitted in steps, as those of many are.

Such a load goes on once its first layers are known to be good and the others to be there. What becomes of these before
it is known where they are is what this adds to the other rules.
"""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from softload import PageStatus, admission, health, unit_copies, unit_layers

from .machine import CHAINS, LIES, NUMBER, PARTS, LoaderMachine

THRESHOLDS = (
    (admission, "_ASKED_APART", 2),
    (admission, "_REST_AT_A_TIME", 5),
    (unit_layers, "_COPIED_ALONG", 0),
    (unit_copies, "_TOGETHER_BYTES", 0),
    (health, "_DOUBT_SECONDS", 0.0),
)
"""As if every object were large and the load had hundreds; after a failure the next one is admitted in steps again."""


ONLY = st.sampled_from([".g2", ".g1", ".d", "draft"])
MEANWHILE = st.sampled_from(["spoil", "lie", "evict", "reuse", "read", "load", "ask", "nothing"])
END = st.sampled_from(["time", "cancel", "release", "release", "release", "reopen", "nothing"])
LIE = st.sampled_from([*LIES, None])


class SteppedMachine(LoaderMachine):
    """Begins with such a load, and has two rules more."""

    def open(self) -> None:
        for module, name, value in THRESHOLDS:
            self._stack.enter_context(patch.object(module, name, value))
        super().open()

    @initialize(
        stored=st.lists(st.tuples(CHAINS, st.sampled_from([6, 6, 3])), min_size=1, max_size=3),
        only=ONLY,
        fenced=st.booleans(),
        meanwhile=MEANWHILE,
        end=END,
        lie=LIE,
        which=NUMBER,
    )
    def start(
        self,
        stored: list[tuple[int, int]],
        only: str,
        fenced: bool,
        meanwhile: str,
        end: str,
        lie: PageStatus | None,
        which: int,
    ) -> None:
        """While nothing has failed yet."""
        super().start(stored)
        self.hang_in_an_admission(stored[:1], only, None, fenced, meanwhile, end, lie, which)

    @precondition(lambda self: len(self.store._holding) < 2)
    @rule(
        parts=PARTS,
        only=ONLY,
        deadline=st.sampled_from([None, 2.0]),
        fenced=st.sampled_from([False, False, True]),
        meanwhile=MEANWHILE,
        end=END,
        lie=LIE,
        which=NUMBER,
    )
    def hang_in_an_admission(
        self,
        parts: list[tuple[int, int]],
        only: str,
        deadline: float | None,
        fenced: bool,
        meanwhile: str,
        end: str,
        lie: PageStatus | None,
        which: int,
    ) -> None:
        """Loads that go on before it is known where all of them is, and something that happens to it meanwhile."""
        self.hold("descriptors", only, 0)
        self.load(parts, deadline, fenced)
        self.check()
        if meanwhile == "spoil" and self.memory._objects:
            self.spoil(which, "foreign", 0)
        elif meanwhile == "lie" and not self.script.pending:
            self.answer_wrongly("descriptors", lie)
        elif meanwhile == "evict" and len(self.memory._objects) > 9:
            self.evict(which, 2, True)
        elif meanwhile == "reuse" and self.memory._objects:
            self.evict_and_reuse(which, 2)
        elif meanwhile == "read":
            self.hold("read", ".g2", 0)
        elif meanwhile == "load":
            self.load(parts, None, False)
        elif meanwhile == "ask":
            self._release(["descriptors"])
            self.load(parts, None, False)
        self.check()
        if end == "cancel" and self.users:
            self.cancel(len(self.users) - 1)
        elif end == "time":
            self.pass_time(6.0)
        elif end == "release":
            self.release_all()
        elif end == "reopen" and len(self.cache) > 1:
            self.reopen(False)
        self.check()

    @precondition(lambda self: len(self.store._holding) < 2)
    @rule(
        parts=PARTS,
        meanwhile=st.sampled_from(["spoil", "lie", "evict", "reuse", "read", "ask"]),
        lie=LIE,
        which=NUMBER,
    )
    def lose_some_in_an_admission(
        self, parts: list[tuple[int, int]], meanwhile: str, lie: PageStatus | None, which: int
    ) -> None:
        """The same, more often, where it ends by itself."""
        self.hang_in_an_admission(parts, ".g2", None, False, meanwhile, "release", lie, which)
