"""The strict applier takes a patch that fits exactly and nothing else."""

import pytest

from sglang_fork import udiff
from sglang_fork.errors import PatchError

SOURCE = b"one\ntwo\nthree\nfour\nfive\nsix\n"
PATCH = b"""Subject: words
rename and Binary in prose are not headers

diff --git a/python/sglang/x.py b/python/sglang/x.py
index 1..2 100644
--- a/python/sglang/x.py
+++ b/python/sglang/x.py
@@ -2,3 +2,3 @@ anything
 two
-three
+THREE
 four
"""
RESULT = b"one\ntwo\nTHREE\nfour\nfive\nsix\n"


def apply(source: bytes, patch: bytes = PATCH) -> bytes:
    (file,) = udiff.parse("a.patch", patch)
    assert file.path == "python/sglang/x.py"
    return udiff.apply(source, file.hunks, "a.patch: x.py")


def test_an_exact_patch_applies() -> None:
    assert apply(SOURCE) == RESULT


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param(b"zero\n" + SOURCE, "one", id="moved by a line"),
        pytest.param(SOURCE.replace(b"four", b"FOUR"), "FOUR", id="context changed"),
        pytest.param(SOURCE.replace(b"three", b"3"), "3", id="removed line changed"),
        pytest.param(RESULT, "THREE", id="already applied"),
        pytest.param(SOURCE.replace(b"two\n", b"two \n"), "two ", id="trailing space"),
        pytest.param(SOURCE.replace(b"three\n", b"three\r\n"), r"three\\r", id="line ending"),
        pytest.param(b"one\n", "<end of file>", id="file too short"),
    ],
)
def test_anything_else_is_refused_with_what_was_found(source: bytes, found: str) -> None:
    with pytest.raises(PatchError, match=f"(?s)does not fit upstream at line.*found: .*{found}"):
        apply(source)


def test_the_error_names_patch_line_and_both_texts() -> None:
    with pytest.raises(PatchError) as raised:
        apply(SOURCE.replace(b"three", b"3"))
    text = str(raised.value)
    assert text.startswith("a.patch: x.py: hunk 1 does not fit upstream at line 3\n")
    assert r"expected: 'three\n'" in text
    assert r"found:    '3\n'" in text


def test_several_hunks_keep_their_places_when_the_first_adds_lines() -> None:
    patch = PATCH + b"@@ -5,2 +5,3 @@\n five\n+5.5\n six\n"
    grown = patch.replace(b"@@ -2,3 +2,3 @@", b"@@ -2,3 +2,4 @@").replace(b"+THREE", b"+3\n+THREE")
    grown = grown.replace(b"+5,3", b"+6,3")
    assert apply(SOURCE, grown) == b"one\ntwo\n3\nTHREE\nfour\nfive\n5.5\nsix\n"


def test_a_wrong_place_in_the_new_file_is_refused() -> None:
    with pytest.raises(PatchError, match="says its new text starts at line 9"):
        apply(SOURCE, PATCH.replace(b"+2,3", b"+9,3"))


def test_an_addition_at_the_end_cannot_be_applied_twice() -> None:
    patch = PATCH[: PATCH.index(b"@@")] + b"@@ -6 +6,2 @@\n six\n+seven\n"
    once = apply(SOURCE, patch)
    assert once == SOURCE + b"seven\n"
    with pytest.raises(PatchError, match="no context on one side"):
        apply(once, patch)


def test_a_missing_final_newline_is_part_of_the_text() -> None:
    marker = b"\\ No newline at end of file\n"
    patch = (
        PATCH[: PATCH.index(b"@@")]
        + b"@@ -5,2 +5,2 @@\n five\n-six\n"
        + marker
        + b"+SIX\n"
        + marker
    )
    assert apply(SOURCE[:-1], patch) == SOURCE.replace(b"six\n", b"SIX")
    with pytest.raises(PatchError, match="does not fit"):
        apply(SOURCE, patch)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"index 1..2 100644", b"new file mode 100644", "may only edit"),
        (b"index 1..2 100644", b"deleted file mode 100644", "may only edit"),
        (b"index 1..2 100644", b"rename from y", "may only edit"),
        (b"index 1..2 100644", b"old mode 100644", "may only edit"),
        (b"--- a/python/sglang/x.py", b"--- /dev/null", "may only edit"),
        (b"@@ -2,3 +2,3 @@", b"@@ -2,9 +2,9 @@", "not a hunk line"),
        (b"@@ -2,3 +2,3 @@", b"@@ -2,2 +2,3 @@", "longer than its header|not a hunk line"),
        (b"@@ -2,3 +2,3 @@ anything\n two\n-three\n+THREE\n four\n", b"", "no hunks"),
        (b" two\n-three\n", b"", "not a hunk line"),
    ],
)
def test_a_malformed_or_wider_patch_is_refused(old: bytes, new: bytes, reason: str) -> None:
    assert old in PATCH
    with pytest.raises(PatchError, match=reason):
        udiff.parse("a.patch", PATCH.replace(old, new))


def test_a_hunk_without_context_has_no_exact_place() -> None:
    patch = PATCH[: PATCH.index(b"@@")] + b"@@ -2,0 +3 @@\n+new\n"
    with pytest.raises(PatchError, match="-U1"):
        udiff.parse("a.patch", patch)


def test_a_patch_without_a_diff_is_refused() -> None:
    with pytest.raises(PatchError, match="no diff in it"):
        udiff.parse("a.patch", b"Subject: nothing\n")


def test_upstream_lines_are_context_and_removed_ones() -> None:
    assert udiff.parse("a.patch", PATCH)[0].upstream_lines == 3
