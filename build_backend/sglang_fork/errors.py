"""The ways a build can fail, one type each, so that each has a message of its own.

They are ordinary exceptions inside the package. The two ways in, the build hooks and the
command line, turn them into one plain text without a traceback.
"""


class ForkError(Exception):
    """Anything a person can put right: the text says what failed and what to do."""


class ProjectError(ForkError):
    """pyproject.toml, upstream.txt and upstream's own metadata disagree."""


class UnavailableError(ForkError):
    """The upstream wheel is not stored here and could not be downloaded."""


class HashMismatchError(ForkError):
    """A wheel is here, but it is not one of those that upstream.txt pins."""


class PatchError(ForkError):
    """A patch that cannot be applied exactly as written."""


class OverlayError(ForkError):
    """A file under python/ that may not be there."""


class TreeError(ForkError):
    """build/tree is in a state that must not be overwritten."""


class ReleaseError(ForkError):
    """The checkout is not one that a release can be cut from, or two builds of it differ."""
