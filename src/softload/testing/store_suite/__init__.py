"""The contract of a `PageStore` as a test class: subclass it, supply the fixtures, and a store of one's own is proven.

class TestMyStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[PageStore]: ...     # opened; may be shared between tests

`put_bytes` and `get_bytes` may be overridden where there is a way to the bytes past the store under test.
"""

from __future__ import annotations

from softload.testing.store_suite.base import Buffer
from softload.testing.store_suite.objects import ObjectTests
from softload.testing.store_suite.puts import PutTests
from softload.testing.store_suite.sessions import SessionTests
from softload.testing.store_suite.threads import ThreadTests

__all__ = ["Buffer", "StoreSuite"]


class StoreSuite(ThreadTests, SessionTests, PutTests, ObjectTests):
    """Tests of everything that `PageStore` promises: its docstrings say all that is demanded here.

    Subclasses supply the fixture `store`: opened, of `capacity` bytes, with leases of at most a few seconds. They may
    replace `put_bytes`, `get_bytes` and `wait_lease`.
    """
