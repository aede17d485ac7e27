"""Pieces of a report as Markdown in which every text is text, and the Markdown as one HTML page without other files."""

import base64
import html
import re
from pathlib import Path
from urllib.parse import quote, unquote

from markdown_it import MarkdownIt

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; max-width: 70rem;
  padding: 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ccc; } h3 { margin-bottom: .4rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; } thead th { border-bottom: 2px solid #555; }
td.text { white-space: normal; min-width: 6rem; } img { max-width: 100%; height: auto; } small { color: #444; }
blockquote { border-left: 4px solid #d55e00; margin-left: 0; padding-left: .8rem; } li { overflow-wrap: anywhere; }
"""


def inline(text):
    """Text on one line for Markdown: nothing in it is a tag, a link, emphasis, code or the border of a cell."""
    text = re.sub(r"\s+", " ", str(text)).strip()
    special = r"\\(?=[!-/:-@\[-`{-~])|[`*<|~#]|&(?=[#\w]+;)|(?<=\])[(\[:]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(special, r"\\\g<0>", text)


def plain(text):
    """The same at the beginning of a line: no list, quotation or underline either."""
    return re.sub(r"^(\d*)(?=[-+>=.)])", r"\1\\", inline(text))


def heading(level, text):
    return "#" * level + " " + inline(text)


def note(text):
    """Something that the reader must not miss."""
    return "> " + plain(text)


def items(lines):
    return "\n".join("- " + plain(line) for line in lines)


def table(head, rows):
    lines = ["| " + " | ".join(map(inline, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def figure(path, caption, folder):
    """A picture, linked relative to the report's folder."""
    return f"![{inline(caption)}]({quote(str(path.relative_to(folder)))})"


def html_page(title, text, folder):
    """One HTML page of Markdown; pictures of `folder` are embedded, there is no script and nothing else is loaded."""
    page = MarkdownIt("commonmark", {"html": False}).enable("table")

    def image(renderer, tokens, index, options, env):
        data = base64.b64encode((Path(folder) / unquote(tokens[index].attrs["src"])).read_bytes()).decode()
        caption = html.escape(renderer.renderInlineAsText(tokens[index].children, options, env))
        return f'<img src="data:image/png;base64,{data}" alt="{caption}"><br><small>{caption}</small>'

    def cell(renderer, tokens, index, options, env):
        """Numbers stand to the right, words to the left."""
        if not re.match(r"[-+]?[\d(x]|-?$", tokens[index + 1].content):
            tokens[index].attrSet("class", "text")
        return renderer.renderToken(tokens, index, options, env)

    for name, rule in (("image", image), ("th_open", cell), ("td_open", cell),
                       ("table_open", lambda *_: '<div class="wide"><table>\n'),
                       ("table_close", lambda *_: "</table></div>\n")):
        page.add_render_rule(name, rule)
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
            f"<body>\n{page.render(text)}</body>\n</html>\n")
