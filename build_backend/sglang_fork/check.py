"""What CI asks of patches/ and the overlay: each rule yields its complaints, none means ok.

Rules on the patch texts come first and need nothing else. The rest compares them with the
upstream wheel and with build/tree, where git has applied the same patches on its own.
"""

import re
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import ownwords, series, tree, udiff, upstream
from .errors import ForkError
from .metadata import metadata
from .project import BUILD, load

MAX_PATCHES = 20
MAX_UPSTREAM_LINES = 250
_FIELDS = {
    "Forwarded": re.compile(r"^Forwarded: (no|not-needed|https?://\S+)$", re.M),
    "Remove-When": re.compile(r"^Remove-When: \S.*$", re.M),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing CI asks."""

    says: str
    """The rule as a sentence, printed by `check`."""
    complaints: Callable[[], Iterator[str]]
    """Yields one text for each breach; may raise ForkError, which is a breach as well."""


def listed() -> Iterator[str]:
    """patches/series and patches/*.patch name the same files, once each."""
    names = series.names()
    on_disk = {file.name for file in series.PATCHES.glob("*.patch")}
    for name in sorted(set(names) - on_disk):
        yield f"patches/{name}: in the series, but there is no such file."
    for name in sorted(on_disk - set(names)):
        yield f"patches/{name}: not in the series; add it there or remove it."
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"patches/{name}: in the series {names.count(name)} times."


def headers() -> Iterator[str]:
    """Each patch says where it was sent and when it can go."""
    for name in series.names():
        head = series.read(name).decode().partition("\ndiff --git ")[0]
        for field, wanted in _FIELDS.items():
            if not wanted.search(head):
                yield f"patches/{name}: no valid {field!r} line; see docs/patches.md."


def one_each() -> Iterator[str]:
    """A patch edits one upstream file, and no two patches the same one."""
    editor: dict[str, str] = {}
    for name in series.names():
        files = [file.path for file in udiff.parse(name, series.read(name))]
        if len(files) > 1:
            yield f"patches/{name}: edits {len(files)} files ({', '.join(files)}); split it."
        for path in files:
            if path in editor:
                yield f"patches/{name}: {path} is also edited by {editor[path]}; join the two."
            editor[path] = name


def budget() -> Iterator[str]:
    """Few patches that repeat little of upstream."""
    names = series.names()
    lines = {
        name: sum(file.upstream_lines for file in udiff.parse(name, series.read(name)))
        for name in names
    }
    if len(names) > MAX_PATCHES:
        yield f"patches/: {len(names)} patches, at most {MAX_PATCHES}; move logic to the overlay."
    if sum(lines.values()) > MAX_UPSTREAM_LINES:
        largest = max(lines, key=lambda name: lines[name])
        yield (
            f"patches/: {sum(lines.values())} upstream lines in all, at most {MAX_UPSTREAM_LINES}; "
            f"the most are in {largest} ({lines[largest]}). Move the seam."
        )


def no_shadow() -> Iterator[str]:
    """The overlay only adds files."""
    with _wheel() as wheel:
        for path in series.shadowing(series.overlay(), wheel.namelist()):
            yield f"python/{path}: replaces an upstream file; patch it instead."


def exact() -> Iterator[str]:
    """Every hunk sits exactly where it says, and the result compiles."""
    with _wheel() as wheel:
        for path, data in series.patched(wheel.read).items():
            if path.endswith(".py"):
                try:
                    compile(data, path, "exec", dont_inherit=True)
                except SyntaxError as error:
                    yield f"python/{path}:{error.lineno}: does not compile: {error.msg}"


def metadata_fits() -> Iterator[str]:
    """Upstream's METADATA has each line that is edited, once."""
    project = load()
    with _wheel() as wheel:
        metadata(wheel.read(f"sglang-{project.base}.dist-info/METADATA"), project)
    yield from ()


def own_words() -> Iterator[str]:
    """No file of ours repeats six upstream lines in a row."""
    with _wheel() as wheel:
        yield from ownwords.copies(wheel, ownwords.our_files())


def appliers_agree() -> Iterator[str]:
    """git, in build/tree, and the strict applier change the same files to the same bytes."""
    tree.materialise()
    if dirty := tree.git("status", "--porcelain").strip():
        yield f"build/tree has changes that are not committed:\n{dirty}"
    with _wheel() as wheel:
        patched = {f"python/{p}": data for p, data in series.patched(wheel.read).items()}
    by_git = set(tree.git("diff", "--name-only", "-z", "upstream", "HEAD").split("\0")) - {""}
    for path in sorted(by_git | set(patched)):
        ours = patched.get(path, b"").decode(errors="surrogateescape")
        if path not in patched or path not in by_git or tree.git("show", f"HEAD:{path}") != ours:
            yield f"{path}: build/tree and patches/ differ; run refresh."


def refresh_is_noop() -> Iterator[str]:
    """build/tree exports exactly the files in patches/."""
    tree.materialise()
    new = tree.exported()
    if list(new) != series.names():
        yield f"patches/series: build/tree exports {list(new)!r}; run refresh."
    for name in set(new) & set(series.names()):
        if series.read(name).decode() != new[name]:
            yield f"patches/{name}: build/tree exports another text; run refresh."


RULES = (
    Rule(says="the series lists every patch once", complaints=listed),
    Rule(says="every patch has Forwarded: and Remove-When:", complaints=headers),
    Rule(says="one patch a file, one file a patch", complaints=one_each),
    Rule(
        says=f"at most {MAX_PATCHES} patches, {MAX_UPSTREAM_LINES} upstream lines",
        complaints=budget,
    ),
    Rule(says="the overlay replaces nothing", complaints=no_shadow),
    Rule(says="every hunk fits exactly and compiles", complaints=exact),
    Rule(says="the metadata edits fit", complaints=metadata_fits),
    Rule(says=f"no file repeats {ownwords.WINDOW} upstream lines", complaints=own_words),
    Rule(says="git applies the series to the same bytes", complaints=appliers_agree),
    Rule(says="refresh would change nothing", complaints=refresh_is_noop),
)


def run() -> int:
    """Print each rule with its complaints; 1 if there were any.

    A missing or wrong upstream wheel ends the check at once: that is no breach of a rule.
    """
    BUILD.mkdir(exist_ok=True)
    upstream.fetch(any_python=True)
    broken = 0
    for rule in RULES:
        start = time.monotonic()
        found = complaints(rule)
        broken += bool(found)
        verdict = "FAIL" if found else "ok"
        print(f"{verdict:4} {rule.says} ({time.monotonic() - start:.1f} s)", flush=True)
        for text in found:
            print("     " + text.replace("\n", "\n     "), flush=True)
    print(f"check: {broken} of {len(RULES)} rules broken" if broken else "check: ok")
    return int(broken > 0)


def complaints(rule: Rule) -> list[str]:
    """What one rule has to say."""
    found: list[str] = []
    try:
        found += rule.complaints()
    except ForkError as error:
        found.append(str(error))
    return found


def _wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(upstream.fetch(any_python=True))
