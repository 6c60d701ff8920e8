"""The dev loop: build/tree follows patches/, refresh follows build/tree, and no work is lost."""

from pathlib import Path

from forkcopy import ACTOR, FILES, PLAIN, Fork, replace, write_wheel

PATCH = "ray-a-base-class.patch"


def test_a_commit_becomes_a_patch_named_by_its_subject(patched: Fork) -> None:
    text = (patched.root / "patches" / PATCH).read_text()
    assert (patched.root / "patches" / "series").read_text() == f"{PATCH}\n"
    assert "From: sglang-rdt maintainers <maintainers@example.invalid>\n" in text
    assert "Date:" not in text
    assert "A Person" not in text
    assert "\nSubject: ray: a base class\n" in text
    assert "\n@@ -4,3 +4,3 @@\n" in text


def test_a_second_refresh_changes_nothing(patched: Fork) -> None:
    assert patched("refresh") == "refreshed: nothing to do\n"


def test_a_rebuilt_tree_exports_the_same_text(patched: Fork) -> None:
    before = (patched.root / "patches" / PATCH).read_bytes()
    patched.tree.rename(patched.root / "build" / "old-tree")
    patched("tree")
    assert patched("refresh") == "refreshed: nothing to do\n"
    assert (patched.root / "patches" / PATCH).read_bytes() == before


def test_the_users_git_settings_and_hooks_environment_do_not_count(
    patched: Fork, tmp_path: Path
) -> None:
    (tmp_path / ".gitconfig").write_text(
        "[diff]\n noprefix = true\n algorithm = patience\n context = 9\n"
        "[format]\n signature = me\n from = true\n[commit]\n gpgSign = true\n"
    )
    env = {"HOME": str(tmp_path), "GIT_DIR": "/nonexistent", "GIT_INDEX_FILE": "/nonexistent"}
    assert patched("refresh", **env) == "refreshed: nothing to do\n"
    assert patched("check", **env).endswith("check: ok\n")


def test_the_tree_follows_a_changed_series(patched: Fork) -> None:
    replace(patched.root / "patches" / PATCH, r"^\+class.*$", "+class Actor(dict):")
    patched("tree")
    assert "class Actor(dict):" in (patched.tree / "python" / ACTOR).read_text()
    (patched.root / "patches" / "series").write_text("")
    (patched.root / "patches" / PATCH).unlink()
    patched("tree")
    assert (patched.tree / "python" / ACTOR).read_text() == FILES[ACTOR]


def test_nothing_is_overwritten_when_both_sides_have_changed(patched: Fork) -> None:
    patched.commit("plain: eight", PLAIN, "value_7 = 7", "value_7 = 8")
    replace(patched.root / "patches" / PATCH, r"^\+class.*$", "+class Actor(dict):")
    for command in ("tree", "refresh"):
        assert "build/tree has work of its own" in patched.fails(command)
    assert "value_7 = 8" in (patched.tree / "python" / PLAIN).read_text()
    assert "dict" in (patched.root / "patches" / PATCH).read_text()


def test_refresh_asks_for_a_commit_first(patched: Fork) -> None:
    patched.edit(PLAIN, "value_7 = 7", "value_7 = 8")
    assert "not committed" in patched.fails("refresh")


def test_a_dropped_commit_removes_its_patch(patched: Fork) -> None:
    patched.git("reset", "-q", "--hard", "upstream")
    assert PATCH in patched("refresh")
    assert not (patched.root / "patches" / PATCH).exists()


def test_a_patch_that_does_not_fit_leaves_the_tree_as_it_was(patched: Fork) -> None:
    replace(patched.root / "patches" / PATCH, "^ @ray.remote$", " @ray.remote()")
    assert "does not fit upstream" in patched.fails("tree")
    assert "class Actor(object):" in (patched.tree / "python" / ACTOR).read_text()


def test_overlay_packages_are_linked_whole_and_files_one_by_one(fork: Fork) -> None:
    fork.overlay("sglang/srt/ray/own/verbs.py", "a = 1\n")
    single = fork.overlay("sglang/srt/ray/single.py", "a = 1\n")
    fork("tree")
    ray = fork.tree / "python/sglang/srt/ray"
    assert (ray / "own").is_symlink()
    assert (ray / "single.py").is_symlink()
    fork.overlay("sglang/srt/ray/own/later.py", "b = 1\n")
    assert (ray / "own" / "later.py").read_text() == "b = 1\n"
    assert fork.git("status", "--porcelain") == ""
    single.unlink()
    fork("tree")
    assert not (ray / "single.py").is_symlink()


def test_a_new_pin_rebuilds_a_tree_without_work_of_its_own(patched: Fork) -> None:
    patched.pin(write_wheel(patched.store, FILES | {PLAIN: "value = 0\n"}))
    patched("tree")
    assert (patched.tree / "python" / PLAIN).read_text() == "value = 0\n"
    assert "class Actor(object):" in (patched.tree / "python" / ACTOR).read_text()


def test_try_rebases_the_series_onto_a_moved_upstream(patched: Fork, tmp_path: Path) -> None:
    newer = FILES | {ACTOR: "import os\nimport sys\n" + FILES[ACTOR]}
    wheel = write_wheel(tmp_path / "newer", newer, version="0.5.24")
    assert "applies" in patched("try", str(wheel))
    text = (patched.root / "build/try-patches" / PATCH).read_text()
    assert "@@ -6,3 +6,3 @@" in text
    assert (patched.root / "build/try-patches/series").read_text() == f"{PATCH}\n"


def test_try_says_where_the_series_conflicts(patched: Fork, tmp_path: Path) -> None:
    newer = FILES | {ACTOR: FILES[ACTOR].replace("class Actor:", "class Actor(Base):")}
    wheel = write_wheel(tmp_path / "newer", newer, version="0.5.24")
    said = patched.fails("try", str(wheel))
    assert "CONFLICT" in said
    assert ACTOR in said
