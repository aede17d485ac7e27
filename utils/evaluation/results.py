"""Result files of the evaluations: one row a variant and corpus, task or subject, reused by what determines it."""

import re
from pathlib import Path

from utils.artifacts import read_json, sha256_json
from utils.errors import UserError


class EarlierRows:
    """Rows that a result file already holds.

    A row's key is 'VARIANT:PROTOCOL', two shortened sha256: what the variant computes, and the model, data and
    settings. Equal keys mean equal rows, so an interrupted call goes on where it stopped. With `add` (--add) the rows
    of other variants and of other data stay in the file as well, also with `force`, which reuses none. data: the field
    of a row that names its corpus. Raises UserError on a foreign or damaged file, unless it is to be replaced.
    """

    def __init__(self, path, kind, data, source, force=False, add=False, reuse=True):
        replaced = force and not add or not Path(path).exists()
        content = {"results": []} if replaced else read_json(path, kind)
        self.rows = [row for row in content["results"] if isinstance(row.get("key"), str)]
        for row in self.rows:
            if not (_losses_fit(row) if kind == "ppl" else _items_fit(row, kind)):
                raise UserError(f"{path}: the {'losses' if kind == 'ppl' else 'numbers'} of {row['variant']} on "
                                f"{row[data]} are damaged; --force without --add recomputes")
        # one of those that compute the same
        self.by_key = {row["key"]: row for row in self.rows} if reuse and not force else {}
        self.data = data
        self.add = add
        if add and content["results"] and content["model"].get("fingerprint") != source.fingerprint:
            raise UserError(f"{path}: made for another model ({content['model'].get('label')}), whose rows --add "
                            "cannot keep; choose another --out")

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


def _losses_fit(row):
    losses = row.get("window_nll")
    return (isinstance(losses, list) and len(losses) == row.get("windows") and "ppl_ci95" in row
            and all(isinstance(loss, float) for loss in losses))


def _items_fit(row, kind):
    """Whether a row of qa.json or mmlu.json has all that averages, differences and tables are made of."""
    n, picks = row.get("n"), row.get("predicted" if kind == "mmlu" else "predictions", {})
    names = [("accuracy", "items", "stderr")] if kind == "mmlu" else [
        (metric, f"{metric}_items", f"{metric}_stderr") for metric in ("acc", "acc_norm") if metric in row]
    if kind == "mmlu":
        fits = isinstance(row.get("category"), str) and isinstance(picks, dict) and set(picks) == set("ABCD")
    else:
        fits = row["metric"] in [name for name, *_ in names] and row["value"] == row[row["metric"]] and (
            isinstance(picks, dict) and (bool(picks) or not row.get("constant")))
    return (fits and type(n) is int and all(type(count) is int for count in picks.values())
            and sum(picks.values()) in ({n} if kind == "mmlu" else {0, n})
            and all(re.fullmatch("[01]+", str(row.get(items))) and len(row[items]) == n
                    and isinstance(row[value], (int, float)) and abs(row[value] * n - row[items].count("1")) < 0.5
                    and isinstance(row.get(error), (int, float, type(None))) and error in row
                    for value, items, error in names))


def key(variant, protocol):
    """Key of the row of a variant under a protocol (JSON-able dict)."""
    return f"{variant.digest()[:16]}:{_short(protocol)}"


def _short(protocol):
    return sha256_json(protocol)[:16]
