"""Result files of the evaluations: one row a variant and corpus, task or subject, reused by what determines it."""

import hashlib
import json
from pathlib import Path

from utils.artifacts import read_json


class EarlierRows:
    """Rows that a result file already holds.

    A row's key is 'VARIANT:PROTOCOL', two shortened sha256: what the variant computes, and the model, data and
    settings. Equal keys mean equal rows, so an interrupted call goes on where it stopped. With `add` (--add) the rows
    of other variants under the same protocols stay in the file as well.
    """

    def __init__(self, path, kind, force=False, add=False):
        rows = read_json(path, kind)["results"] if Path(path).exists() and not force else []
        self.rows = {row["key"]: row for row in rows if "key" in row}
        self.add = add

    def find(self, variant, protocol):
        """The row of this variant and protocol under the variant's present name, or None."""
        row = self.rows.get(key(variant, protocol))
        return None if row is None else {**row, "variant": variant.name}

    def others(self, variants, protocols):
        """Rows of variants that this call does not name, of the given protocols only; none without `add`."""
        names, wanted = {variant.name for variant in variants}, {_short(protocol) for protocol in protocols}
        return [row for name, row in self.rows.items()
                if self.add and row["variant"] not in names and name.partition(":")[2] in wanted]


def key(variant, protocol):
    """Key of the row of a variant under a protocol (JSON-able dict)."""
    return f"{variant.digest()[:16]}:{_short(protocol)}"


def _short(protocol):
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:16]
