"""Each rule of `check` catches the fault it is for, and names file and remedy."""

import pytest
from forkcopy import ACTOR, FILES, PLAIN, Fork, replace, write_wheel

PATCH = "patches/ray-a-base-class.patch"


def failed_rule(fork: Fork) -> str:
    return fork.fails("check")


def test_a_fresh_repository_without_patches_is_clean(fork: Fork) -> None:
    assert fork("check").endswith("check: ok\n")


def test_a_patch_and_an_overlay_file_are_clean(patched: Fork) -> None:
    patched.overlay("sglang/srt/ray/own/verbs.py", "def pull():\n    return 1\n")
    assert patched("check").endswith("check: ok\n")


def test_a_patch_that_is_not_in_the_series(patched: Fork) -> None:
    (patched.root / "patches" / "stray.patch").write_text("x\n")
    assert "patches/stray.patch: not in the series" in failed_rule(patched)


def test_a_patch_that_is_in_the_series_only(patched: Fork) -> None:
    (patched.root / PATCH).unlink()
    assert "in the series, but there is no such file" in failed_rule(patched)


@pytest.mark.parametrize("field", ["Forwarded", "Remove-When"])
def test_a_missing_field(patched: Fork, field: str) -> None:
    replace(patched.root / PATCH, f"^{field}:.*$", "Something: else")
    assert f"no valid '{field}' line" in failed_rule(patched)


def test_a_forwarded_field_must_say_where(patched: Fork) -> None:
    replace(patched.root / PATCH, "^Forwarded:.*$", "Forwarded: soon")
    assert "no valid 'Forwarded' line" in failed_rule(patched)


def test_two_patches_of_one_file(patched: Fork) -> None:
    patched.commit("ray: another answer", ACTOR, "'pong'", "'PONG'")
    patched("refresh")
    said = failed_rule(patched)
    assert f"python/{ACTOR} is also edited by ray-a-base-class.patch" in said


def test_one_patch_of_two_files(patched: Fork) -> None:
    patched("tree")
    patched.edit("sglang/srt/plain.py", "value_7 = 7", "value_7 = 8")
    patched.git("commit", "-q", "-a", "--amend", "--no-edit")
    patched("refresh")
    assert "edits 2 files" in failed_rule(patched)


def test_more_upstream_lines_than_the_budget(patched: Fork) -> None:
    many = "".join(f"old_{n} = {n}\n" for n in range(300))
    patched.pin(write_wheel(patched.store, FILES | {PLAIN: many}))
    patched.commit("plain: all anew", PLAIN, many, "new = 1\n")
    patched("refresh")
    assert "upstream lines in all, at most 250" in failed_rule(patched)


def test_more_patches_than_the_budget(fork: Fork) -> None:
    names = [f"sglang/srt/part_{n}.py" for n in range(21)]
    fork.pin(write_wheel(fork.store, FILES | dict.fromkeys(names, "a = 1\n")))
    for number, name in enumerate(names):
        fork.commit(f"part: change {number}", name, "a = 1", "a = 2")
    fork("refresh")
    assert "21 patches, at most 20" in failed_rule(fork)


def test_an_overlay_file_that_replaces_upstream(fork: Fork) -> None:
    fork.overlay(PLAIN, "mine = 1\n")
    assert f"python/{PLAIN}: replaces an upstream file" in failed_rule(fork)


@pytest.mark.parametrize("folder", ["python/sglang/srt/own", "examples", "test", "benchmark"])
def test_six_upstream_lines_in_a_row(fork: Fork, folder: str) -> None:
    copied = "# mine\n\n" + "".join(f"    value_{n} = {n}\n\n" for n in range(3, 9))
    file = fork.root / folder / "copy.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("if True:\n" + copied)
    said = failed_rule(fork)
    assert f"{folder}/copy.py:4: repeats 6 lines of upstream's {PLAIN}:4" in said


def test_five_upstream_lines_in_a_row_are_no_copy(fork: Fork) -> None:
    fork.overlay("sglang/srt/own.py", "".join(f"value_{n} = {n}\n" for n in range(5)))
    assert fork("check").endswith("check: ok\n")


def test_six_sorted_imports_are_no_copy(fork: Fork) -> None:
    imports = "".join(f"import {name}\n" for name in ("ast", "csv", "json", "os", "re", "sys"))
    fork.pin(write_wheel(fork.store, FILES | {PLAIN: imports}))
    fork.overlay("sglang/srt/own.py", imports)
    assert fork("check").endswith("check: ok\n")


def test_a_hunk_that_has_moved(patched: Fork) -> None:
    replace(patched.root / PATCH, r"^@@ -4,3 \+4,3 @@", "@@ -3,3 +3,3 @@")
    said = failed_rule(patched)
    assert f"python/{ACTOR}: hunk 1 does not fit upstream at line 3" in said


def test_a_hunk_whose_context_has_changed(patched: Fork) -> None:
    replace(patched.root / PATCH, "^ @ray.remote$", " @ray.remote()")
    said = failed_rule(patched)
    assert r"expected: '@ray.remote()\n'" in said
    assert r"found:    '@ray.remote\n'" in said


def test_a_patched_file_that_does_not_compile(patched: Fork) -> None:
    replace(patched.root / PATCH, r"^\+class.*$", "+class Actor(:")
    assert f"python/{ACTOR}:5: does not compile" in failed_rule(patched)


def test_work_in_the_tree_that_is_not_exported(patched: Fork) -> None:
    patched.commit("plain: eight", PLAIN, "value_7 = 7", "value_7 = 8")
    said = failed_rule(patched)
    assert f"python/{PLAIN}: build/tree and patches/ differ; run refresh" in said
    assert "patches/series: build/tree exports" in said


def test_work_in_the_tree_that_is_not_committed(patched: Fork) -> None:
    patched.edit(PLAIN, "value_7 = 7", "value_7 = 8")
    assert "build/tree has changes that are not committed" in failed_rule(patched)


def test_a_patch_text_that_refresh_would_change(patched: Fork) -> None:
    replace(patched.root / PATCH, r"^(@@ .*@@)$", r"\1 class heading:")
    assert "build/tree exports another text; run refresh" in failed_rule(patched)


def test_a_metadata_line_that_upstream_no_longer_has(fork: Fork) -> None:
    replace(fork.root / "pyproject.toml", r"ray\[default\]>=2.55.1", "ray[default]>=2.54")
    assert "METADATA: upstream has the line" in failed_rule(fork)
