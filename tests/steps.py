"""Steps that many tests share: one call of a script each, with small sizes. `script` is the fixture, `out` a folder."""

import json

CALIB = ("--calib-samples", 4, "--seq-len", 32)


def prune(script, folder, out, text, *more):
    return script("prune", "--model", folder, "--calib-data", text, *CALIB, "--out", out / "selection.json", *more)


def calibrate(script, folder, out, text, *more, name="patch.safetensors"):
    return script("calibrate", "--model", folder, "--selection", out / "selection.json", "--calib-data", text, *CALIB,
                  "--out", out / name, *more)


def ppl(script, folder, out, text, *more):
    return script("eval_ppl", "--model", folder, "--datasets", text, "--seq-len", 32, "--out", out / "ppl.json", *more)


def rows(out):
    return {row["variant"]: row for row in json.loads((out / "ppl.json").read_text())["results"]}
