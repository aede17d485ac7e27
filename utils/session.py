"""One call of a script: its model, tokenizer, calibration windows and statistics, each loaded when first needed.

A call whose artifacts are all there loads no weights.
"""

from functools import cached_property, partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from utils.activations import Stats, collect, collect_moments
from utils.artifacts import Stopwatch, read_header, read_json, recipe_difference, reusable
from utils.cli import seed_everything
from utils.data.windows import calibration_windows
from utils.decoder import Variant, find_layers
from utils.errors import UserError
from utils.hadamard import rotation
from utils.layers import Layers
from utils.model_folder import origin
from utils.models import (EMBEDDED, find_model, load_decoder, load_tokenizer, loading, own_class,
                          pick_device, pick_dtype)
from utils.repairs import read_patch


class Session:
    """The model named by a script's flags (utils/cli.py) and what is derived from it. Seeds on creation."""

    def __init__(self, args):
        self.args, self.watch = args, Stopwatch()
        self._windows, self._stats, self._moments = {}, {}, {}
        seed_everything(getattr(args, "seed", 0))
        self.source = find_model(args.model, args.trust_remote_code)
        self.device = pick_device(args.device)
        self.dtype = pick_dtype(args.dtype, self.device)

    @cached_property
    def tokenizer(self):
        return load_tokenizer(self.source, self.args.trust_remote_code)

    @cached_property
    def decoder(self):
        args = self.args
        return load_decoder(self.source, args.dtype, args.device, args.device_map, args.trust_remote_code)

    @cached_property
    def parameters(self):
        """(all, [of each layer]) numbers of parameters, from the config alone; a tied head counts once."""
        with loading(self.source.label, "model"):
            trust = self.args.trust_remote_code
            if self.source.is_ours:
                config, build = own_class(self.source)
            else:
                config = AutoConfig.from_pretrained(self.source.folder, trust_remote_code=trust)
                build = partial(AutoModelForCausalLM.from_config, trust_remote_code=trust)
            with torch.device("meta"):
                model = build(config)
        model.tie_weights()
        _, layers, _ = find_layers(model)
        return (sum(p.numel() for p in model.parameters()),
                [sum(p.numel() for p in layer.parameters()) for layer in layers])

    @property
    def corpora(self):
        """Names of the default corpora, the first one for calibration: embedded ones for the embedded model, unless
        local data sets are given."""
        embedded = self.args.model == EMBEDDED and not self.args.data_dir
        return ("wiki", "news") if embedded else ("wikitext2", "c4", "ptb")

    @property
    def dtype_name(self):
        return str(self.dtype).removeprefix("torch.")

    def check_seq_len(self, seq_len):
        """Raise UserError when windows are longer than the model's positions."""
        name, longest = self.source.positions
        if longest is not None and seq_len > longest:
            raise UserError(f"--seq-len {seq_len}: {self.source.label} has {name} {longest}; give at most {longest}")

    def calibration(self, part="train", samples=None):
        """Windows of the calibration flags; part 'validation' takes them from the last 10 % of the split."""
        args, samples = self.args, samples or self.args.calib_samples
        if (part, samples) not in self._windows:
            self.check_seq_len(args.seq_len)
            self._windows[part, samples] = calibration_windows(
                args.calib_data or self.corpora[0], self.tokenizer, samples, args.seq_len, seed=args.seed,
                sampling=args.calib_sampling, data_dir=args.data_dir, part=part)
        return self._windows[part, samples]

    def stats(self, path, order="released"):
        """(Stats, their recipe, calibration info): read from `path` when its recipe is the same, else collected.

        order: of the Kronecker factors of the rotation that l1_rotated is measured in.
        """
        if (path, order) not in self._stats:
            windows, rotated = self.calibration(), rotation(self.source.shape[1], order=order)
            recipe = {"model": self.source.json(), "token_ids_sha256": windows.info["token_ids_sha256"],
                      "samples": len(windows.ids), "seq_len": windows.ids.shape[1], "dtype": self.dtype_name,
                      "rotation": rotated.info()}
            self._stats[path, order] = self._had_or_collected(path, windows, rotated, recipe), recipe, windows.info
        return self._stats[path, order]

    def windows_recipe(self):
        """(what determines a pass over the calibration windows, calibration info)."""
        windows = self.calibration()
        return {"token_ids_sha256": windows.info["token_ids_sha256"], "windows": len(windows.ids),
                "seq_len": windows.ids.shape[1], "dtype": self.dtype_name}, windows.info

    def moments(self, runs, wanted, skip_first=False):
        """{run: {name: float64 [C, C]}} of the calibration windows, as activations.collect_moments gives them."""
        key = tuple(runs), tuple(wanted), skip_first
        if key not in self._moments:
            self._moments[key] = collect_moments(self.decoder, self.calibration().ids, runs, wanted,
                                                 self.args.batch_size, skip_first)
        return self._moments[key]

    def _had_or_collected(self, path, windows, rotated, recipe):
        if longer := self._longer(path, recipe):
            print(f"{path}: its first {len(windows.ids)} windows are these (--force recomputes)")
            return longer.first(len(windows.ids))
        if reusable(path, "stats", recipe, self.args.force):
            return Stats.load(path)[0]
        stats = collect(self.decoder, windows.ids, rotated, self.args.batch_size)
        stats.save(path, {"recipe": recipe, "model": recipe["model"], "calibration": windows.info,
                          "provenance": self.watch.provenance(self.decoder, lap=True)})
        return stats

    def _longer(self, path, recipe):
        """The Stats at `path` if they are of more windows, the first of which are those of `recipe`; else None."""
        if self.args.force or not path.exists():
            return None
        found = read_header(path, "stats")["recipe"]
        changed = {**found, "samples": recipe["samples"], "token_ids_sha256": recipe["token_ids_sha256"]}
        if not isinstance(found.get("samples"), int) or found["samples"] <= recipe["samples"] or (
                recipe_difference(changed, recipe)):
            return None
        stats, _ = Stats.load(path)  # says so, before any windows are drawn, when they are not as many
        drawn = self.calibration(samples=found["samples"]).info["token_ids_sha256"]
        return stats if drawn == found["token_ids_sha256"] else None

    def read_selection(self, path, name=None):
        """The pruned Variant of a selection made for this model. UserError, also when it changed the kept weights."""
        content = read_json(path, "selection")
        if "widths" in content or content.get("rdsc", "remove") != "remove":
            raise UserError(f"{path}: {content['about']['metric']} changed the weights that stay, which a selection "
                            "cannot hold;\npass the folder of prune.py --save-model as --model instead")
        self.source.check_artifact(content["model"], path)
        return Variant(name or str(path), Layers.of(content, self.source.shape[0], path), about=content["about"])

    def read_patch(self, path, name=None):
        """(Variant, header) of a patch file made for this model. Raises UserError."""
        return read_patch(path, self.source, name, lambda: self.decoder)

    def dense(self, name="dense"):
        """The model itself as a Variant; a folder that this project wrote says itself what it is."""
        return Variant(name, Layers(self.source.shape[0]), about=origin(self.source.folder).get("about"))

    def variants(self):
        """Variants of --selection and --patch behind the model itself, each printed with its depth and sha256.

        Files may be named NAME=FILE; the word dense, or NAME=dense, stands for the model itself. Raises UserError on a
        double name.
        """
        args, found = self.args, {}
        given = [(text, self.read_selection) for text in args.selection]
        given += [(text, lambda *file: self.read_patch(*file)[0]) for text in args.patch]
        for text, read in given if args.no_dense else [("dense", None), *given]:
            name, path = ("dense", text) if text == "dense" else named_file(text)
            if name == "dense" and text != "dense":
                raise UserError(f"{text}: dense is the name of the model itself; choose another")
            if name in found and text != "dense":
                raise UserError(f"two variants are called {name}; name them with NAME=FILE")
            found[name] = self.dense(name) if path == "dense" else read(path, name)
        if not found:
            raise UserError("nothing to evaluate: give --patch or --selection, or drop --no-dense")
        for name, variant in found.items():
            print(f"{name}: {variant.describe(self.source)}, sha256 {variant.sha256()[:12]}")
        return list(found.values())


def named_file(text):
    """(name, path) of NAME=FILE; a file without a name is called by its folder and stem."""
    name, separator, path = text.partition("=")
    if separator and not Path(text).exists():
        return name, path
    return f"{Path(text).parent.name}/{Path(text).stem}".lstrip("/"), text


def default_folder(model):
    """runs/<model>: where a script writes when --out is not given."""
    path = Path(model)
    if path.is_dir():
        return Path("runs") / path.resolve().name
    return Path("runs") / (path.stem if path.suffix == ".gguf" else model.replace("/", "--"))
