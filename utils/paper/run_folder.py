"""The artifacts of one run directory, runs/<preset>: what reports read.

Files of other kinds are passed over, damaged ones raise UserError with their path.
"""

from functools import cached_property
from pathlib import Path

from utils.artifacts import content_of, read_header, read_json
from utils.errors import UserError
from utils.paper.experiments import paper


class Run:
    """What a run directory holds, read when asked for."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.preset = self.folder.resolve().name
        self._rows = {}

    @cached_property
    def selections(self):
        """[(path, selection)], fewest layers first."""
        found = [(path, read_json(path, "selection")) for path in sorted(self.folder.glob("n*/**/selection.json"))]
        return sorted(found, key=lambda entry: entry[1]["about"]["n"])

    @cached_property
    def patches(self):
        """[(path, header)] of the final patch files."""
        return [(path, read_header(path, "patch")) for path in sorted(self.folder.glob("n*/**/*.safetensors"))
                if not path.name.endswith((".checkpoint.safetensors", ".last.safetensors")) and _is(path, "patch")]

    @cached_property
    def evaluations(self):
        """{kind: [content, ...]} of the evaluation files in the directory itself."""
        found = {kind: [] for kind in ("ppl", "qa", "mmlu", "overhead")}
        for path in sorted(self.folder.glob("*.json")):
            for kind in found:
                if _is(path, kind):
                    found[kind].append(read_json(path, kind))
        return found

    @cached_property
    def model(self):
        """Identity of the model that the directory is about: that of its selections, patches or evaluations."""
        holders = [s for _, s in self.selections] + [h for _, h in self.patches]
        holders += [content for kind in ("ppl", "qa", "mmlu") for content in self.evaluations[kind]]
        if not holders:
            raise UserError(f"{self.folder}: holds no artifacts; run 'bash run_all.sh {self.preset}' first")
        return holders[0]["model"]

    def rows(self, kind):
        """Rows of all evaluation files of a kind. Of other models only those with narrowed or merged layers."""
        if kind not in self._rows:
            found = {}
            for content in self.evaluations[kind]:
                own = content["model"].get("sha256") == self.model["sha256"]
                for row in content["results"]:
                    if own or row["about"]["stage"] in ("merged", "narrowed"):
                        place = row["variant"], *(row.get(name) for name in ("dataset", "task", "subject"))
                        if place in found and found[place] != row:
                            raise UserError(f"{self.folder}: two result files have different rows for "
                                            f"{row['variant']}; remove one of them")
                        found[place] = row
            self._rows[kind] = list(found.values())
        return self._rows[kind]

    @cached_property
    def figures(self):
        """{name: path} of the pictures. Raises UserError on a file that is none."""
        paths = sorted(self.folder.glob("figures/figure_*.png"))
        for path in paths:
            if path.read_bytes()[:8] != b"\x89PNG\r\n\x1a\n":
                raise UserError(f"{path}: is no PNG picture; remove it, or draw it again with --force")
        return {path.stem.removeprefix("figure_"): path for path in paths}

    @cached_property
    def artifacts(self):
        """[(path, content or header)] of everything with a provenance, oldest first."""
        paths = [*self.folder.glob("*"), *self.folder.glob("n*/**/*")]
        paths = [p for p in paths if p.suffix in (".json", ".safetensors")
                 and not p.name.endswith((".last.safetensors", ".checkpoint.safetensors"))]
        found = [(path, content_of(path)) for path in sorted(paths, key=lambda p: (p.stat().st_mtime, p))]
        return [(path, content) for path, content in found if content and "provenance" in content]

    @cached_property
    def in_paper(self):
        """Whether the paper prints results for this preset."""
        return any(row["model"] == self.preset for row in paper()["results"])

    @cached_property
    def variants(self):
        """{name: about} of all evaluated variants."""
        return {row["variant"]: row["about"] for kind in ("ppl", "qa", "mmlu") for row in self.rows(kind)}

    @cached_property
    def depths(self):
        """Every number of removed layers that has been evaluated, least first."""
        return sorted({about["n"] for about in self.variants.values() if about["n"]})


def _is(path, kind):
    content = content_of(path)
    return content is not None and content["format"].startswith(f"linearpatch/{kind}@")
