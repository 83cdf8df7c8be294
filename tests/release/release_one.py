"""Release one package: `python tests/release/release_one.py rft-sync 0.2.0`.

Everything happens in a scratch clone of the last commit: version, changelog, frozen interface, commit and tag; wheel
and source distribution, checked; an empty environment with the siblings' wheels of their latest tags, where the
package's unit tests run, with the locked versions and again with the lowest ones. Nothing is uploaded.

Without --write the clone is thrown away: a rehearsal. With it the commit and the tag are taken over at the end, when
all of this has succeeded; pushing them and uploading the files is the workflow's part.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contracts.workspace import ROOT
from release.artefact import Artefact, built, sibling_wheels
from release.commands import CommandError, git
from release.preparation import ReleaseError, package_of, prepare
from release.trial import tried


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to release, and how.

    Attributes:
        root: the repository.
        package: name of the package.
        version: its new version.
        out: folder for the two files.
        date: of the changelog entry.
        move_ranges: move the siblings' ranges in the tree that refuse the new version.
        trials: run the unit tests on the wheel.
        write: take commit and tag over into the repository.
    """

    root: Path
    package: str
    version: str
    out: Path
    date: str
    move_ranges: bool = False
    trials: bool = True
    write: bool = False


def release(plan: Plan) -> Artefact:
    """Carry out a plan.

    Raises:
        ReleaseError: the package cannot be released like this.
        CommandError: a program failed.
    """
    if plan.write and git(plan.root, "status", "--porcelain"):
        raise ReleaseError("the working tree has changes that are not committed: commit them or put them away")
    with tempfile.TemporaryDirectory(prefix="rft-release-") as name:
        folder = Path(name)
        scratch = _clone(plan.root, folder / "clone")
        tag = prepare(scratch, plan.package, plan.version, date=plan.date, move_ranges=plan.move_ranges)
        print(f"{tag}: prepared", flush=True)
        package = package_of(scratch, plan.package)
        artefact = built(package, plan.out)
        siblings = sibling_wheels(scratch, package, folder / "siblings")
        print(
            f"{tag}: built {artefact.wheel.name} and {artefact.source.name}; siblings: {_names(siblings)}", flush=True
        )
        for lowest in (False, True) if plan.trials else ():
            said = tried(scratch, package, artefact.wheel, siblings, folder, lowest=lowest)
            print(f"{tag}: unit tests, {'lowest' if lowest else 'locked'} versions: {said}", flush=True)
        if plan.write:
            git(plan.root, "fetch", "--quiet", str(scratch), f"refs/tags/{tag}:refs/tags/{tag}")
            git(plan.root, "merge", "--quiet", "--ff-only", tag)
    return artefact


def _clone(root: Path, target: Path) -> Path:
    """A clone of the last commit with all tags, whose commits carry the name of whoever works in `root`."""
    git(root, "clone", "--quiet", "--no-checkout", str(root), str(target))
    for name in ("user.name", "user.email"):
        git(target, "config", name, git(root, "config", name))
    git(target, "checkout", "--quiet", "--detach", git(root, "rev-parse", "HEAD"))
    return target


def _names(wheels: Sequence[Path]) -> str:
    return ", ".join(wheel.name.partition("-py3")[0] for wheel in wheels) or "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="name of the package, such as rft-sync")
    parser.add_argument("version", help="its new version, such as 0.2.0")
    parser.add_argument("--write", action="store_true", help="take commit and tag over into this repository")
    parser.add_argument("--out", type=Path, help="keep wheel and source distribution in this folder")
    parser.add_argument("--move-ranges", action="store_true", help="move the siblings' ranges that refuse the version")
    parser.add_argument("--no-trials", action="store_true", help="leave out the unit tests on the wheel")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rft-artefact-") as folder:
        plan = Plan(
            root=ROOT,
            package=options.package,
            version=options.version,
            out=(options.out or Path(folder)).resolve(),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            move_ranges=options.move_ranges,
            trials=not options.no_trials,
            write=options.write,
        )
        try:
            release(plan)
        except (ReleaseError, CommandError) as error:
            print(f"not released: {error}", file=sys.stderr)
            return 1
    print("released: push the commit and the tag" if plan.write else "rehearsed: nothing was changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
