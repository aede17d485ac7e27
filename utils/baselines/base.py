"""How prune.py runs a method that changes kept weights: selection.json, and the model folder of --save-model."""

from utils.artifacts import read_json, reusable, sha256_json, write_json
from utils.layers import count_for_ratio
from utils.model_folder import origin


class Baseline:
    """One call of such a method. A subclass has `select`, `check`, `report` and `save`, and makes recipe and windows.

    help: for --metric; calibration: the published one; name, n: for `about`; stage: what the kept layers became.
    """

    help, calibration = "", {"calib_samples": 10, "seq_len": 64, "seed": 0}

    def __init__(self, args, session):
        self.args, self.session = args, session
        total, per_layer = session.parameters
        self.n = args.n_prune if args.ratio is None else count_for_ratio(args.ratio, total, per_layer)
        self.about = {"metric": args.metric, "n": self.n, "repair": "none", "stage": self.stage}

    @classmethod
    def check_flags(cls, p, args):
        """Leave with exit code 2 when flags do not fit."""

    def run(self):
        """Write selection.json unless its recipe is the same, print it, and write the folder unless it is its own."""
        args, session = self.args, self.session
        stored = reusable(args.out, "selection", self.recipe, args.force)
        content = read_json(args.out, "selection") if stored else {
            "model": session.source.json(), "about": self.about, **self.select(),
            "calibration": self.windows.info, "recipe": self.recipe}
        sha256 = sha256_json({name: value for name, value in content.items() if name != "provenance"})
        folder_is_there = stored and args.save_model and origin(args.save_model).get("selection_sha256") == sha256
        if stored and not folder_is_there:
            self.check(content, args.out)
        elif not stored:
            write_json(args.out, "selection", {**content, "provenance": session.watch.provenance(session.decoder)})
        for line in self.report(content):
            print(line)
        parameters = content["parameters"]
        print(f"parameters {parameters['before']:,} -> {parameters['before'] - parameters['removed']:,} "
              f"({parameters['ratio_percent']:.2f} %)")
        print(f"wrote {args.out}")
        if folder_is_there:
            print(f"{args.save_model}: reused (made from this selection; --force writes it anew)")
        elif args.save_model:
            described = self.save(content, {"base_model": session.source.json(), "seed": args.seed,
                                            "calibration": self.windows.info, "selection_sha256": sha256})
            print(f"wrote {args.save_model} ({described})")
