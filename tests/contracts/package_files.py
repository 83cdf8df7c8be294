"""The files and metadata each package must carry."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from contracts.workspace import ROOT, Package, shown

FRAGMENT_KINDS = ("added", "changed", "fixed", "removed")
MARKER = "<!-- towncrier release notes start -->"


def file_violations(package: Package) -> list[str]:
    """Missing or empty files: marker of types, licence, changelog with its marker, readme, errors."""
    rows = []
    if not (package.source / "py.typed").is_file():
        rows.append(f"{package.name}: no src/{package.import_name}/py.typed")
    if not (package.source / "errors.py").is_file():
        rows.append(f"{package.name}: no src/{package.import_name}/errors.py")
    for name in ("README.md", "LICENSE"):
        path = package.folder / name
        if not path.is_file() or not path.read_text(encoding="utf-8").strip():
            rows.append(f"{package.name}: no {name}, or an empty one")
    changelog = package.folder / "CHANGELOG.md"
    if not changelog.is_file() or changelog.read_text(encoding="utf-8").count(MARKER) != 1:
        rows.append(f"{package.name}: CHANGELOG.md must hold the line {MARKER} once")
    return rows


def fragment_violations(package: Package) -> list[str]:
    """Changelog fragments: a kind that towncrier knows, a text, and at least one until the first release entry."""
    folder = package.folder / "changelog.d"
    fragments = [path for path in sorted(folder.glob("*")) if not path.name.startswith(".")]
    kinds = ", ".join(FRAGMENT_KINDS)
    rows = []
    for path in fragments:
        parts = path.name.split(".")
        if len(parts) != 3 or parts[1] not in FRAGMENT_KINDS or parts[2] != "md":
            rows.append(f"{shown(path)}: name it <change>.<kind>.md with a kind of {kinds}")
        elif not path.read_text(encoding="utf-8").strip():
            rows.append(f"{shown(path)}: empty; say what changed for a user")
    if not fragments and not has_release(package):
        rows.append(f"{package.name}: no fragment in changelog.d and no release in CHANGELOG.md")
    return rows


def has_release(package: Package) -> bool:
    """Whether the package's changelog has an entry of a release."""
    _, _, notes = (package.folder / "CHANGELOG.md").read_text(encoding="utf-8").partition(MARKER)
    return bool(notes.strip())


def metadata_violations(package: Package) -> list[str]:
    """A static SemVer version, names that agree, licence, readme and towncrier kinds in pyproject.toml."""
    project = package.pyproject["project"]
    tool = package.pyproject.get("tool", {}).get("towncrier", {})
    expected = {
        "name": (project.get("name"), package.name),
        "dynamic": (project.get("dynamic", []), []),
        "license": (project.get("license"), "Apache-2.0"),
        "license-files": (project.get("license-files"), ["LICENSE"]),
        "readme": (project.get("readme"), "README.md"),
        "towncrier.package": (tool.get("package"), package.import_name),
        "towncrier.type": (tuple(row["directory"] for row in tool.get("type", [])), FRAGMENT_KINDS),
    }
    rows = [
        f"{package.name}: {key} is {found!r}, expected {wanted!r}"
        for key, (found, wanted) in expected.items()
        if found != wanted
    ]
    return rows + _version_violations(package.name, project.get("version"))


def _version_violations(name: str, version: str | None) -> list[str]:
    try:
        numbers = Version(version or "").release
    except InvalidVersion:
        return [f"{name}: version is {version!r}, expected a static one such as 0.1.0"]
    return [] if len(numbers) == 3 else [f"{name}: version is {version!r}, expected three numbers"]


def licence_of_the_repository() -> str:
    """The text of the licence at the root."""
    return (ROOT / "LICENSE").read_text(encoding="utf-8")
