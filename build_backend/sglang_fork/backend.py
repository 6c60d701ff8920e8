"""The PEP 517 and PEP 660 hooks: what pip, build and uv call.

Each hook is one call into the package. A failure that a person can put right leaves as plain
text, without a traceback.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from . import sdist, upstream, wheel
from .errors import ForkError
from .project import load

_Settings = dict[str, Any] | None
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _plainly(hook: Callable[_P, _T]) -> Callable[_P, _T]:
    @functools.wraps(hook)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return hook(*args, **kwargs)
        except ForkError as error:
            raise SystemExit(str(error)) from error

    return run


@_plainly
def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """pip, but only where a download is needed and no pip can be reached."""
    return [] if upstream.stored() or upstream.reachable_pip() else ["pip"]


@_plainly
def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """The complete wheel."""
    return wheel.build(Path(wheel_directory), editable=False)


@_plainly
def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """A wheel that only points at build/tree."""
    return wheel.build(Path(wheel_directory), editable=True)


@_plainly
def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    """Our own files."""
    return sdist.build(Path(sdist_directory))


@_plainly
def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: _Settings = None
) -> str:
    """The dist-info, so that pip can resolve before it builds."""
    project = load()
    for member in wheel.dist_info(project):
        file = Path(metadata_directory) / member.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(member.data)
    return f"sglang-{project.version}.dist-info"


get_requires_for_build_editable = get_requires_for_build_wheel
prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel
