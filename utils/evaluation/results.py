"""Result files of the evaluations: one row a variant and part (a corpus, task or subject), made where it is missing."""

from utils.artifacts import REMEDY, read_json, sha256_json, write_json
from utils.errors import UserError


class ResultFile:
    """The file that an evaluation writes (--out), with the rows that it holds already.

    A row's `sha256` is 'VARIANT:RECIPE', both shortened: of what the variant computes, and of the model, data and
    settings. Equal ones mean equal rows, so an interrupted call goes on where it stopped, and a variant may be renamed.
    With --add the rows of other variants and parts stay in the file as well, also with --force, which reuses none.
    """

    def __init__(self, args, kind, field, session, variants, recipes, reuse=True):
        """field: the one of a row that names its part; recipes: {part: JSON-able dict}, in the file's order.

        reuse: False to make all rows anew. Raises UserError on a foreign or damaged file that is not to be replaced.
        """
        self.path, self.kind, self.field, self.session, self.variants = args.out, kind, field, session, variants
        recipes = {part: sha256_json(recipe)[:16] for part, recipe in recipes.items()}
        computes = {variant.name: variant.sha256()[:16] for variant in variants}
        self.sha256 = {(part, name): f"{computes[name]}:{recipes[part]}" for part in recipes for name in computes}
        earlier = self._earlier(args)
        found = {row["sha256"]: row for row in earlier} if reuse and not args.force else {}
        self.rows, self.missing = {}, {part: [] for part in recipes}
        for part in recipes:
            for variant in variants:
                if row := found.get(self.sha256[part, variant.name]):
                    self.put(part, variant, row)
                else:
                    self.missing[part].append(variant)
        # of the parts of this call, other variants' rows stay under the same recipe only: they would not be comparable
        self.others = [row for row in earlier if args.add and (row[field] not in recipes or (
            row["variant"] not in computes and row["sha256"].endswith(f":{recipes[row[field]]}")))]
        if self.rows:
            print(f"{self.path}: {len(self.rows)} of {len(self.sha256)} rows reused (--force recomputes)")

    def _earlier(self, args):
        """Rows of the file as it is; none of one that is not there or is to be replaced."""
        if not self.path.exists() or (args.force and not args.add):
            return []
        content = read_json(self.path, self.kind, "--force without --add recomputes it" if args.add else REMEDY)
        model, source = content["model"], self.session.source
        if args.add and content["results"] and model["sha256"] != source.sha256:
            raise UserError(f"{self.path}: made for another model ({model['label']}), whose rows --add cannot keep; "
                            "choose another --out")
        return content["results"]

    def put(self, part, variant, values):
        """Take the row of `variant` on `part`: values, and what rows of all kinds say."""
        own = {"variant": variant.name, self.field: part, "about": variant.about, "removed": list(variant.removed),
               "dtype": self.session.dtype_name, "sha256": self.sha256[part, variant.name]}
        self.rows[part, variant.name] = {**own, **values, **own}  # own ones first, and not those of a renamed row

    def rows_of(self, part):
        """{variant name: row} of the rows that there are."""
        return {variant.name: self.rows[part, variant.name] for variant in self.variants
                if (part, variant.name) in self.rows}

    @property
    def results(self):
        """All rows: those kept for others, then part by part in the order of the variants."""
        return self.others + [row for part in self.missing for row in self.rows_of(part).values()]

    def evaluate(self, more=lambda results: {}):
        """Yield every (part, variants without a row); what the caller has `put` is written before the next one.

        more(results): what the file says beside its rows. A killed call goes on behind the last finished part.
        """
        computed, last = any(self.missing.values()), [*self.missing][-1]
        for part, missing in self.missing.items():
            yield part, missing
            if missing or part == last:
                self.content = {
                    "model": self.session.source.json(), "results": self.results, **more(self.results),
                    "provenance": self.session.watch.provenance(self.session.decoder if computed else None)}
                write_json(self.path, self.kind, self.content)
