"""A report as a list of blocks, written as Markdown or as one HTML page that needs no other file."""

import base64
import html
import re
from dataclasses import dataclass
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; max-width: 70rem;
  padding: 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ccc; } h3 { margin-bottom: .4rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; } thead th { border-bottom: 2px solid #555; }
td.text { white-space: normal; min-width: 6rem; } img { max-width: 100%; height: auto; } figure { margin: 1rem 0; }
figcaption { font-size: .9rem; color: #444; } code { background: #f2f2f2; padding: 0 .2rem; overflow-wrap: anywhere; }
p.note { border-left: 4px solid #d55e00; padding-left: .8rem; }
"""


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `code` in backquotes. note: something that the reader must not miss."""

    text: str
    note: bool = False


@dataclass(frozen=True)
class Items:
    lines: tuple


@dataclass(frozen=True)
class Table:
    head: tuple
    rows: tuple


@dataclass(frozen=True)
class Figure:
    path: Path
    caption: str


def markdown(blocks, folder):
    """The blocks as Markdown; figures are linked relative to `folder`."""
    return "\n\n".join(_markdown(block, Path(folder)) for block in blocks) + "\n"


def _markdown(block, folder):
    if isinstance(block, Heading):
        return "#" * block.level + " " + block.text
    if isinstance(block, Text):
        return f"> {block.text}" if block.note else block.text
    if isinstance(block, Items):
        return "\n".join(f"- {line}" for line in block.lines)
    if isinstance(block, Figure):
        return f"![{block.caption}]({block.path.relative_to(folder)})"
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in (block.head, *block.rows)]
    return "\n".join([lines[0], "|" + "---|" * len(block.head), *lines[1:]])


def _cell(value):
    return str(value).replace("|", "\\|").replace("\n", " ")


def html_page(title, blocks):
    """One HTML page, figures embedded, no script and nothing loaded from elsewhere."""
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(title)}</title>\n"
            f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(map(_html, blocks)) + "\n</body>\n</html>\n")


def _html(block):
    if isinstance(block, Heading):
        return f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p{' class=note' if block.note else ''}>{_inline(block.text)}</p>"
    if isinstance(block, Items):
        return "<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in block.lines) + "</ul>"
    if isinstance(block, Figure):
        data = base64.b64encode(block.path.read_bytes()).decode()
        caption = _inline(block.caption)
        return (f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(block.caption)}">'
                f"<figcaption>{caption}</figcaption></figure>")
    head = "".join(f"<th{_kind(cell)}>{_inline(str(cell))}</th>" for cell in block.head)
    body = "".join("<tr>" + "".join(f"<td{_kind(cell)}>{_inline(str(cell))}</td>" for cell in row) + "</tr>"
                   for row in block.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _kind(cell):
    """Numbers stand to the right, words to the left."""
    return "" if re.match(r"^[-+]?[\d(x]|^-?$", str(cell)) else ' class="text"'


def _inline(text):
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
