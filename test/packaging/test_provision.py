"""Set-up: one clear line for each way it can fail, and nothing done twice."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pip_run
import provision
import pytest
from provision import Environment

REAL_IS_SATISFIED = provision.is_satisfied
SETUP = Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"


def run_setup(venv: Path, **env: str) -> subprocess.CompletedProcess[str]:
    place = {**os.environ, "VENV": str(venv), "PYTHON": sys.executable, **env}
    return subprocess.run([str(SETUP)], env=place, capture_output=True, text=True)


def test_a_python_that_does_not_start(tmp_path: Path) -> None:
    done = run_setup(tmp_path / "venv", PYTHON="/nonexistent/python3")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "does not start or is not Python 3.11 to 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_no_python_at_all(tmp_path: Path) -> None:
    for tool in ("bash", "env", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    done = run_setup(tmp_path / "venv", PYTHON="", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no Python 3.11 to 3.13 found" in done.stderr


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = run_setup(tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "is no virtual environment" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_too_little_disk_stops_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "NEED_GB", 10**9)
    with pytest.raises(pip_run.SetupError, match="not enough disk: 1000000000 GB are needed at"):
        provision.main(str(tmp_path / "venv"))
    assert not (tmp_path / "venv" / "bin").exists()
    monkeypatch.setattr(provision, "NEED_GB", 0)
    assert provision.require_usable(Environment(folder=tmp_path / "venv"))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ERROR: Could not find a version (from versions: none)", "no network"),
        ("WARNING: Retrying (Retry(total=4)) after connection broken", "no network"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "hash mismatch"),
        ("ERROR: first\nERROR: ResolutionImpossible", "pip failed: ResolutionImpossible"),
    ],
)
def test_pips_log_becomes_one_line(log: str, said: str) -> None:
    assert pip_run.cause(log).startswith(said)
    assert "\n" not in pip_run.cause(log)


def test_a_half_installed_package_is_removed_so_that_pip_sees_it_missing(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.dist-info", "half-1.dist-info"):
        (site / name).mkdir(parents=True)
    (site / "whole-1.dist-info" / "RECORD").touch()
    provision.drop_half_installed(Environment(folder=tmp_path))
    assert [info.name for info in site.iterdir()] == ["whole-1.dist-info"]


class Recorded:
    """A real environment; the phases that cost minutes are only noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        venv.create(folder, with_pip=False)
        self.env = Environment(folder=folder)
        self.phases: list[str] = []
        self.content = {provision.DEPENDENCIES: "a", provision.SOURCES: "b"}
        monkeypatch.setattr(provision, "digest", self.content.__getitem__)
        monkeypatch.setattr(provision, "is_satisfied", lambda env: False)
        for phase in ("create", "install_everything", "install_sources", "update_tree"):
            monkeypatch.setattr(
                provision, phase, lambda *args, phase=phase: self.phases.append(phase)
            )

    def run(self) -> list[str]:
        self.phases.clear()
        provision.main(str(self.env.folder))
        return list(self.phases)

    def install(self, url: str, editable: str) -> None:
        """What pip leaves when somebody installs sglang by hand."""
        info = self.env.site_packages() / "sglang-0.5.23+rdt.1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "RECORD").write_text(url)
        text = f'{{"url": "{url}", "dir_info": {{"editable": {editable}}}}}'
        (info / "direct_url.json").write_text(text)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(tmp_path / "venv", monkeypatch)


def test_the_second_call_does_nothing(recorded: Recorded) -> None:
    assert recorded.run() == ["install_everything"]
    assert recorded.run() == []


def test_changed_sources_reinstall_our_wheel_alone(recorded: Recorded) -> None:
    recorded.run()
    recorded.content[provision.SOURCES] = "changed"
    assert recorded.run() == ["install_sources"]
    assert recorded.run() == []


def test_changed_dependencies_install_everything(recorded: Recorded) -> None:
    recorded.run()
    recorded.content[provision.DEPENDENCIES] = "changed"
    assert recorded.run() == ["install_everything"]


def test_an_environment_that_has_all_dependencies_gets_our_wheel_alone(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "is_satisfied", lambda env: True)
    assert recorded.run() == ["install_sources"]
    assert recorded.run() == []


def test_a_failed_installation_is_tried_again(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(env: Environment) -> None:
        raise pip_run.SetupError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(provision, "install_everything", fail)
        with pytest.raises(pip_run.SetupError):
            recorded.run()
    assert recorded.run() == ["install_everything"]


def test_an_interrupted_creation_is_completed(recorded: Recorded) -> None:
    recorded.env.notes.mkdir()
    recorded.env.write_stamp("making", "")
    assert recorded.run()[0] == "create"


def test_another_sglang_installed_meanwhile_is_replaced(recorded: Recorded) -> None:
    recorded.run()
    recorded.install("file:///elsewhere", "false")
    assert recorded.run() == ["install_sources"]


def test_an_editable_install_of_this_checkout_is_kept(recorded: Recorded) -> None:
    recorded.run()
    recorded.install(provision.ROOT.as_uri(), "true")
    assert recorded.run() == ["update_tree"]


def test_an_editable_install_of_another_checkout_is_replaced(recorded: Recorded) -> None:
    recorded.run()
    recorded.install("file:///elsewhere", "true")
    assert recorded.run() == ["install_sources"]


def test_the_running_environment_is_recognised_as_satisfied() -> None:
    """The one these tests run in was made by the same set-up, or holds the same things."""
    assert provision.is_satisfied(Environment(folder=Path(sys.prefix)))


def test_an_empty_environment_is_not_satisfied(recorded: Recorded) -> None:
    assert not REAL_IS_SATISFIED(recorded.env)
