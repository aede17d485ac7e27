"""Wiki markup -> text: the articles of the Wikipedia dump in the wheel."""

import bz2
import json
import re
from xml.etree import ElementTree

from tqdm import tqdm

from utils.artifacts import atomic_path
from utils.data.wheels import WIKI, cache_dir

STRIP_VERSION = 2  # raise it when article_text changes: stripped articles are cached under this number
ARTICLE_NAMESPACE = "0"
DROPPED_TAGS = {"ref", "references", "table", "gallery", "timeline", "math", "source", "syntaxhighlight"}
DROPPED_LINKS = {"file", "image", "media", "category"}
DROPPED_SECTIONS = {"references", "notes", "footnotes", "citations", "sources", "bibliography", "further reading",
                    "external links", "see also", "notes and references", "gallery"}
# Removed or replaced before parsing: faster, and the parser loses no paragraph over a malformed reference.
REFERENCE = re.compile(r"<ref[^>/]*/>|<ref[^>]*>.*?</ref\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
TEXT_TEMPLATE = re.compile(
    r"\{\{\s*(convert|lang|nowrap|transl|small|smaller|vanchor|angbr)\s*\|([^{}\[\]]*)\}\}", re.IGNORECASE)
LEFTOVERS = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|<[a-z/!]|__[A-Z]+__|^[|!]", re.MULTILINE)


def wiki_articles():
    """English Wikipedia articles as a list of str, markup stripped; redirects and other pages left out.

    Text: paragraphs separated by blank lines, headings as in WikiText (" = Title = ", " = = Section = = ").
    The first call takes about 10 s, later ones read a file in the cache.
    """
    dump = WIKI.unpacked()
    cached = cache_dir() / f"wiki-{WIKI.sha256[:12]}-v{STRIP_VERSION}.jsonl"
    if cached.exists():
        return [json.loads(line)[1] for line in cached.read_text(encoding="utf-8").splitlines()]
    pages = tqdm(list(_pages(dump)), desc="stripping wiki markup", unit=" articles", disable=None)
    articles = [(title, article_text(title, markup)) for title, markup in pages]
    try:
        with atomic_path(cached) as temporary:
            temporary.write_text("".join(json.dumps(article) + "\n" for article in articles), encoding="utf-8")
    except OSError:
        pass  # a read-only or full cache folder costs time, not correctness
    return [text for _, text in articles]


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
