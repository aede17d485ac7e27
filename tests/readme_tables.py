"""The README's tables of metrics, repairs, corpora and presets from the registries: `python -m tests.readme_tables`.

Writes each between <!-- NAME --> and <!-- end NAME -->; tests/test_readme.py fails where the README says otherwise.
"""

import argparse
import re
from pathlib import Path

from utils.baselines import BASELINES
from utils.data.corpora import corpora_table
from utils.metrics import METRICS
from utils.models import PRESETS
from utils.paper.experiments import PRESETS as SIZES
from utils.repairs import REPAIRS

README = Path(__file__).resolve().parent.parent / "README.md"


def metrics():
    rows = [(f"`{m.name}`", m.help, m.reads, "{}, {}".format(*m.protect), sizes(m.calibration))
            for m in METRICS.values()]
    rows += [(f"`{name}`", b.help, "windows", "-", sizes(b.calibration)) for name, b in BASELINES.items()]
    return ("`prune.py --metric`", "method", "reads", "layers that stay (first, last)", "windows, tokens, seed"), rows


def sizes(calibration):
    return "{calib_samples}, {seq_len}, {seed}".format(**calibration)


def repairs():
    rows = [(f"`{name}`", r.help, "`calibrate.py --repair`" if r.closed_form else "`distill.py --replace`",
             "yes" if r.is_matrix else "no", ", ".join(r.folds) or "-") for name, r in REPAIRS.items()]
    return ("repair", "what stands where layers were", "made by", "fine-tuned, saved in a folder", "`--fold`"), rows


def corpora():
    head, *rows = corpora_table()
    return head, rows


def presets():
    rows = [(f"`{name}`", model, ", ".join(map(str, SIZES[name]["every"]))) for name, model in PRESETS.items()]
    return ("preset", "model", "numbers of removed layers in its tables"), rows


TABLES = {"metrics": metrics, "repairs": repairs, "corpora": corpora, "presets": presets}


def markdown(name):
    """One table as it stands in the README, with its marks."""
    head, rows = TABLES[name]()
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([f"<!-- {name} -->", lines[0], "|" + "---|" * len(head), *lines[1:], f"<!-- end {name} -->"])


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    text = README.read_text(encoding="utf-8")
    for name in TABLES:
        text = re.sub(rf"<!-- {name} -->.*?<!-- end {name} -->", lambda _: markdown(name), text, flags=re.S)
    README.write_text(text, encoding="utf-8")
    print(f"wrote the tables of {README}")


if __name__ == "__main__":
    main()
