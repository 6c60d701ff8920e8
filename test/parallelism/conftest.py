import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import families

from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context


@pytest.fixture(autouse=True)
def a_process_that_published_nothing() -> Iterator[None]:
    """Each test publishes into a context of its own, so that none finds what another one left."""
    with use_context(RuntimeContext(parallel=ParallelContext())):
        yield


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the config of a family, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = families.write_config(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder
