"""Exceptions for misuse and for closed resources.

A failing store is never an exception: it is a `PageStatus` in a report. What is raised here is a mistake of the caller
(`ValueError` and its kin say what was expected and what came) or the use of something that has ended.
"""

__all__ = ["LandingMemoryError", "LoaderClosedError", "SoftloadError", "StoreSetupError"]


class SoftloadError(Exception):
    """Base class of the library's own exceptions."""


class LandingMemoryError(SoftloadError):
    """The machine does not have as much landing memory as the config asks for; the message names the size."""


class LoaderClosedError(SoftloadError):
    """The loader or store was used before it was opened or after it was closed."""


class StoreSetupError(SoftloadError):
    """A store could not be set up: no library, no answer from its master, or none in time. The message says why."""
