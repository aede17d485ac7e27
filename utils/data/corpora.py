"""Texts: a corpus name or a file -> rows of text and the string that joins them.

A corpus is NAME or NAME:SPLIT, or a path. Splits and joins are those of the paper's released loader (section 4.1):

| name                  | calibration | evaluation | rows -> text                                               |
|-----------------------|-------------|------------|------------------------------------------------------------|
| wikitext2             | train       | test       | two newlines between all rows, empty ones included         |
| ptb                   | train       | validation | two newlines between stripped sentences                    |
| ptb-new               | train       | test       | one space between stripped sentences                       |
| c4                    | train       | validation | separate documents: random crops of the long ones          |
| c4-new                | train       | validation | as c4; evaluation: first 1100 documents, spaces between    |
| wiki, news            | train       | test       | embedded, no network; two newlines between articles        |
| .txt .raw             | file        | file       | as it is                                                   |
| .jsonl .json .parquet | file        | file       | field `text`: as c4; evaluation: two newlines between them |

All but .parquet may be packed with gzip. With a data folder (--data-dir or $LINEARPATCH_DATA) the named corpora are
read from it and the network is never used; without one, single files are fetched from the Hugging Face hub.
"""

import gzip
import json
import os
import re
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from utils.data import wheels as embedded
from utils.errors import UserError

SPLITS = ("train", "validation", "test")
EVALUATION_SPLIT = {
    "wikitext2": "test",
    "ptb": "validation",
    "ptb-new": "test",
    "c4": "validation",
    "c4-new": "validation",
    "wiki": "test",
    "news": "test",
}
BLANK_LINE = "\n\n"
C4_NEW_DOCUMENTS = 1100
SUFFIXES = (".txt", ".raw", ".jsonl", ".json", ".parquet")

# Files below the data folder, the first one that is there is read; each may also carry or lack ".gz".
LOCAL = {
    ("wikitext2", "train"): ("wikitext2/wiki.train.raw", "wikitext2/wiki.train.head.raw"),
    ("wikitext2", "validation"): ("wikitext2/wiki.valid.raw",),
    ("wikitext2", "test"): ("wikitext2/wiki.test.raw",),
    ("ptb", "train"): ("ptb/ptb.train.txt",),
    ("ptb", "validation"): ("ptb/ptb.valid.txt",),
    ("ptb", "test"): ("ptb/ptb.test.txt",),
    ("c4", "train"): ("c4/c4-train.00000-of-01024.json.gz", "c4/excerpts.jsonl.gz"),
    ("c4", "validation"): ("c4/c4-validation.00000-of-00008.json.gz", "c4/train_sample.jsonl.gz"),
}
STAND_INS = {  # said in `source` when such a file is read
    "wiki.train.head.raw": "only the first part of the train split",
    "excerpts.jsonl": "passages cut short, not the paper's shard",
    "train_sample.jsonl": "a sample of whole documents, not the paper's shard",
}
# repository, revision, file, column
HUB = {
    "wikitext2": ("Salesforce/wikitext", "main", "wikitext-2-raw-v1/{split}-00000-of-00001.parquet", "text"),
    "ptb": ("ptb-text-only/ptb_text_only", "refs/convert/parquet", "penn_treebank/{split}/0000.parquet", "sentence"),
    "c4": ("allenai/c4", "main", "en/{shard}.json.gz", "text"),
}
C4_SHARD = {"train": "c4-train.00000-of-01024", "validation": "c4-validation.00000-of-00008"}


@dataclass(frozen=True)
class Text:
    """Text of one split. kind "stream": the rows with `join` between them; "documents": rows that stay apart."""

    name: str  # corpus name, or the path of a file
    split: str | None  # None for a file
    source: str  # file below the data folder, or repository@revision/file, or package
    kind: str
    rows: list
    join: str | None  # None for documents

    def text(self):
        """The whole stream as one str."""
        return self.join.join(self.rows)


def load_text(spec, purpose, data_dir=None):
    """Read the corpus `spec` for `purpose` ("calibration" or "evaluation") as a Text.

    Raises UserError naming the file, line or remedy when the corpus is unknown, absent, empty or malformed.
    """
    name, split = _parse(spec)
    if name not in EVALUATION_SPLIT:
        return _read_user_file(spec, purpose)
    split = split or ("train" if purpose == "calibration" else EVALUATION_SPLIT[name])
    if name in ("wiki", "news"):
        return _embedded(name, split)
    family = name.removesuffix("-new")
    if (family, split) not in LOCAL:
        raise UserError(f"{spec}: c4 has no test split; use c4:train or c4:validation")
    data_dir = data_dir or os.environ.get("LINEARPATCH_DATA")
    rows, source = _local_rows(family, split, data_dir) if data_dir else _hub_rows(family, split)
    if family == "c4":
        return _c4(name, split, source, rows, purpose)
    return Text(name, split, source, "stream", rows, " " if name == "ptb-new" else BLANK_LINE)


def _parse(spec):
    """(name, split or None) of NAME or NAME:SPLIT; (path, None) for anything else."""
    name, colon, split = spec.rpartition(":")
    if not colon or name not in EVALUATION_SPLIT:
        return spec, None
    if split not in SPLITS:
        raise UserError(f"{spec}: {split!r} is no split; use one of {', '.join(SPLITS)}")
    return name, split


def _c4(name, split, source, rows, purpose):
    if name == "c4-new" and purpose == "evaluation":
        return Text(name, split, source, "stream", rows[:C4_NEW_DOCUMENTS], " ")
    if source.startswith("c4/excerpts"):  # no document in it is whole, so crops of long ones cannot be drawn
        return Text(name, split, source, "stream", rows, BLANK_LINE)
    return Text(name, split, source, "documents", rows, None)


def _embedded(name, split):
    """Articles of one split: of every ten, in the order of the file, the ninth is validation and the tenth test."""
    articles = [text for _, text in embedded.wiki_articles()] if name == "wiki" else embedded.news_documents()
    wanted = {"train": range(8), "validation": (8,), "test": (9,)}[split]
    rows = [text for index, text in enumerate(articles) if index % 10 in wanted]
    package, version, member, _ = embedded.WIKI if name == "wiki" else embedded.NEWS
    return Text(name, split, f"{package}=={version}, {Path(member).name}", "stream", rows, BLANK_LINE)


# --- named corpora: data folder or hub


def _local_rows(family, split, data_dir):
    """(rows, source) of a named corpus from the data folder."""
    names = LOCAL[family, split]
    for name in names:
        stem = name.removesuffix(".gz")
        for candidate in (stem, stem + ".gz"):
            path = Path(data_dir) / candidate
            if path.is_file():
                note = STAND_INS.get(Path(stem).name)
                return _rows(family, path), candidate + (f" ({note})" if note else "")
    looked_for = " or ".join(str(Path(data_dir) / name) for name in names)
    raise UserError(
        f"{family}: the {split} split needs {looked_for}, which is not there\n"
        'put the file there, or use the embedded corpora wiki and news; see README, section "Data"'
    )


def _rows(family, path):
    if family == "c4":
        return _records(path)
    lines = split_lines(_decoded(path))
    if family == "ptb":
        return [line.strip() for line in lines if line.strip()]
    return ["" if line.isspace() else line for line in lines]  # as in wikitext-2-raw-v1


def split_lines(text):
    """Lines with their "\\n"; other line separators of Unicode do not end a line."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _hub_rows(family, split):
    """(rows, source) of a named corpus from the one file of the hub that holds the split."""
    repository, revision, pattern, column = HUB[family]
    filename = pattern.format(split=split, shard=C4_SHARD.get(split))
    path = hub_file(family, repository, revision, filename, " or ".join(LOCAL[family, split]))
    rows = _records(path) if family == "c4" else _parquet_column(path, column)
    if family == "ptb":
        rows = [row.strip() for row in rows]
    commit = path.parts[path.parts.index("snapshots") + 1]
    return rows, f"{repository}@{commit}/{filename}"


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
        raise UserError(
            f"{label}: {filename} of {repository} cannot be had from the hub ({type(error).__name__})\n"
            f"put {local} into a folder and name it by --data-dir or $LINEARPATCH_DATA, "
            'or use the embedded corpora wiki and news; see README, section "Data"'
        ) from None


# --- files


def _read_user_file(spec, purpose):
    path = Path(spec)
    if not os.path.exists(spec):
        known = ", ".join(EVALUATION_SPLIT)
        raise UserError(f"{spec}: neither a corpus ({known}) nor an existing file")
    if path.is_dir():
        raise UserError(f"{spec}: a folder; name one file ({' '.join(SUFFIXES)})")
    suffix = _suffix(path)
    if suffix not in SUFFIXES or path.name.endswith(".parquet.gz"):
        raise UserError(f"{spec}: unknown kind of file; a text is {' '.join(SUFFIXES)}, all but .parquet also with .gz")
    if suffix in (".txt", ".raw"):
        return Text(spec, None, spec, "stream", [_decoded(path)], "")
    rows = _parquet_column(path, "text") if suffix == ".parquet" else _records(path)
    if purpose == "calibration":
        return Text(spec, None, spec, "documents", rows, None)
    return Text(spec, None, spec, "stream", rows, BLANK_LINE)


def _suffix(path):
    return Path(path.name.removesuffix(".gz")).suffix


def _open(path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


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
        with _open(path) as file:
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
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as folder:
        try:
            table = Dataset.from_parquet(str(path), cache_dir=folder)
        except Exception as error:  # the library wraps what it meets in errors of many kinds
            raise UserError(f"{path}: not a readable parquet file ({type(error).__name__})") from None
        if column not in table.column_names:
            raise UserError(f"{path}: no column {column!r}; it has {', '.join(table.column_names)}")
        rows = list(table[column])
        del table  # before its folder goes
    for number, row in enumerate(rows):
        if not isinstance(row, str):
            raise UserError(f"{path}: row {number} of column {column!r} is not a string")
    if not rows:
        raise UserError(f"{path}: no rows in it")
    return rows
