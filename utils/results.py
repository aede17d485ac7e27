"""Result files of the evaluations: one row a variant and corpus, task or subject, reused by what determines it."""

from pathlib import Path

from utils.artifacts import read_json, sha256_json
from utils.errors import UserError


class EarlierRows:
    """Rows that a result file already holds.

    A row's key is 'VARIANT:PROTOCOL', two shortened sha256: what the variant computes, and the model, data and
    settings. Equal keys mean equal rows, so an interrupted call goes on where it stopped. With `add` (--add) the rows
    of other variants and of other data stay in the file as well. data: the field of a row that names its corpus.
    """

    def __init__(self, path, kind, data, source, force=False, add=False):
        content = read_json(path, kind) if Path(path).exists() and not force else {"results": []}
        self.rows = [row for row in content["results"] if isinstance(row.get("key"), str)]
        for row in self.rows:
            losses = row.get("window_nll")
            if kind == "ppl" and not (isinstance(losses, list) and len(losses) == row.get("windows")
                                      and "ppl_ci95" in row and all(isinstance(loss, float) for loss in losses)):
                raise UserError(f"{path}: the losses of {row['variant']} on {row[data]} are damaged; "
                                "--force recomputes")
        self.by_key = {row["key"]: row for row in self.rows}  # one of those that compute the same
        self.data = data
        self.add = add and content.get("model", {}).get("fingerprint") == source.fingerprint

    def find(self, variant, protocol):
        """The row of this variant and protocol under the variant's present name, or None."""
        row = self.by_key.get(key(variant, protocol))
        return None if row is None else {**row, "variant": variant.name}

    def others(self, variants, protocols):
        """Rows to keep under --add; protocols: {corpus: protocol} of this call.

        Of these corpora, rows of variants that this call does not name, and only under the same protocol.
        """
        names, wanted = {variant.name for variant in variants}, {name: _short(p) for name, p in protocols.items()}
        return [row for row in self.rows if self.add and (
            row[self.data] not in wanted or
            (row["variant"] not in names and row["key"].partition(":")[2] == wanted[row[self.data]]))]


def key(variant, protocol):
    """Key of the row of a variant under a protocol (JSON-able dict)."""
    return f"{variant.digest()[:16]}:{_short(protocol)}"


def _short(protocol):
    return sha256_json(protocol)[:16]
