"""Build a release of the last commit into `dist/`, check it, and list what a person does next.

    make release REPOSITORY=https://github.com/you/performer

The tree has a placeholder where the repository's address belongs: `project.urls` of pyproject.toml,
README, CONTRIBUTING and CITATION.cff. A copy of the commit gets the address in its place, and the
README's links become absolute, so that they work on the page of a package index. The copy is built,
`twine check` reads its metadata and renders the README, and the wheel is installed in a fresh
environment, where the README's Python runs.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

import performer
from tests.support.pages import code

ADDRESSED = "pyproject.toml", "README.md", "CONTRIBUTING.md", "CITATION.cff"
LINK = re.compile(
    r"(?<=\]\()(?!https?:|#)[^)\s]+|(?<=src=\")(?!https?:)[^\"]+|(?<=srcset=\")(?!https?:)[^\"]+"
)
PICTURES = ".svg", ".png"
NEXT = """
{wheel} and {source} are ready. What is left:
  1. git tag v{version} {commit} && git push {repository} v{version}   (the README links to it)
  2. python -m twine upload {wheel} {source}
  3. a release of the tag at {repository}/releases, with the section {version} of CHANGELOG.md"""


def placeholder(tree: Path) -> str:
    """Return the address that stands in pyproject.toml for that of the repository."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def fill(tree: Path, repository: str, version: str) -> None:
    """Write the address into a tree, and make the README's links absolute.

    Raises:
        ValueError: for an address that is none, or a link to nothing.
    """
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
        raise ValueError(
            f"REPOSITORY={repository!r} is no address of a repository: call"
            " make release REPOSITORY=https://github.com/you/performer"
        )
    before = placeholder(tree)
    for name in ADDRESSED:
        text = (tree / name).read_text()
        if before not in text:
            raise ValueError(f"{name} has no {before}: where is the repository's address?")
        (tree / name).write_text(text.replace(before, repository))

    def absolute(link: re.Match) -> str:
        path, mark, section = link[0].partition("#")
        if not (tree / path).exists():
            raise ValueError(f"README.md links to {path}, which does not exist")
        kind = "raw" if path.endswith(PICTURES) else "blob"
        return f"{repository}/{kind}/v{version}/{path}{mark}{section}"

    readme = tree / "README.md"
    readme.write_text(LINK.sub(absolute, readme.read_text()))


def run(*words: object, cwd: Path | None = None) -> str:
    """Run a command, and return what it prints; CalledProcessError if it fails."""
    given = [str(x) for x in words]
    done = subprocess.run(given, stdout=subprocess.PIPE, text=True, check=True, cwd=cwd)
    return done.stdout.strip()


def main(repository: str) -> None:
    """Build, check and list what is left."""
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"a release is made of a commit; these files differ from the last one:\n{changed}")
    version = performer.__version__
    folder = Path(tempfile.mkdtemp(prefix="release-"))
    tree, fresh, dist = folder / "tree", folder / "fresh", Path("dist").resolve()
    run("git", "archive", f"--output={folder / 'tree.tar'}", "HEAD")
    with tarfile.open(folder / "tree.tar") as archive:
        archive.extractall(tree, filter="data")
    try:
        fill(tree, repository, version)
    except ValueError as error:
        sys.exit(str(error))
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", f"--outdir={dist}", tree)
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, source))
    print("installing the wheel in a fresh environment")
    venv.create(fresh, with_pip=True)
    run(fresh / "bin" / "pip", "install", "--quiet", f"{wheel}[vit]")
    print(run(fresh / "bin" / "performer-vit", "--version", cwd=folder))
    print("running the README's Python there")
    program = "\n".join(code((tree / "README.md").read_text(), "python"))
    run(fresh / "bin" / "python", "-c", program, cwd=folder)
    given = dict(repository=repository, version=version, commit=run("git", "rev-parse", "HEAD"))
    print(
        NEXT.format(
            wheel=wheel.relative_to(Path.cwd()), source=source.relative_to(Path.cwd()), **given
        )
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
