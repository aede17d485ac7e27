"""Flags that all scripts share, and the frame in which a script runs: exit code 0 done, 2 wrong input, 1 failure."""

import argparse
import math
import os
import random
import re
import sys
from pathlib import Path

import numpy
import torch

from utils.errors import UserError, WorkError


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        """Where there is no default, the flag's own text says what happens."""
        return action.help if action.default is None else super()._get_help_string(action)


def parser(description, example):
    """ArgumentParser whose --help ends in one working example."""
    return argparse.ArgumentParser(
        description=description, epilog=f"example:\n  {example}", formatter_class=_Help, allow_abbrev=False
    )


def listed(title, entries):
    """{name: text} as a list behind the example in --help, a line each."""
    width = max(map(len, entries)) + 2
    return f"\n\n{title}:\n" + "\n".join(f"  {name:{width}s}{text}" for name, text in entries.items())


def add_model_flags(p):
    """--model and how to load it."""
    group = p.add_argument_group("model")
    group.add_argument("--model", default="smollm2-135m", help="preset, hub id, folder or .gguf file")
    group.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                       help="auto: float32 on CPU, bfloat16 on GPUs that have it, float16 else")
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to run")
    group.add_argument("--device-map", default=None, help="accelerate's placement over several devices, e.g. auto")
    group.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the model")


def add_data_flags(p):
    """--data-dir."""
    p.add_argument("--data-dir", type=Path, default=os.environ.get("LINEARPATCH_DATA") or None,
                   help="local copies of the data sets (also $LINEARPATCH_DATA); then no network is tried")


def add_calibration_flags(p, more_sampling=None):
    """Calibration text and how windows are taken from it; more_sampling: {further choice: what it does}."""
    more_sampling = more_sampling or {}
    group = p.add_argument_group("calibration")
    group.add_argument("--calib-data", default=None,
                       help="corpus[:split] or file; default wiki for the embedded model without --data-dir, else "
                            "wikitext2")
    group.add_argument("--calib-samples", type=positive, default=128, help="windows")
    group.add_argument("--calib-sampling", choices=["random", "first", *more_sampling], default="random",
                       help="random: seeded starts in the first 90 %% of the split; first: consecutive from its start"
                            + "".join(f"; {name}: {text}" for name, text in more_sampling.items()))
    group.add_argument("--seq-len", type=positive, default=2048, help="tokens a window")
    group.add_argument("--seed", type=seed, default=0, help="of every random draw")
    group.add_argument("--batch-size", type=positive, default=1, help="windows a forward pass")


def add_variant_flags(p):
    """--patch and --selection: the variants that one evaluation compares."""
    group = p.add_argument_group("variants (the model itself, called dense, comes first)")
    group.add_argument("--patch", nargs="+", default=[], metavar="[NAME=]FILE", help="patched variants")
    group.add_argument("--selection", nargs="+", default=[], metavar="[NAME=]FILE",
                       help="pruned variants without a patch")
    group.add_argument("--no-dense", action="store_true", help="leave the model itself out")
    group.add_argument("--add", action="store_true",
                       help="keep the rows of other variants and data in --out "
                            "(same model, and same settings for the same data)")


def add_output_flags(p, out_help):
    """--out and --force."""
    p.add_argument("--out", type=Path, default=None, help=out_help)
    p.add_argument("--force", action="store_true", help="recompute even if the artifact is there with the same recipe")


def add_save_model_flags(p, what):
    """--save-model of a patched model, and how it is folded."""
    group = p.add_argument_group("model folder")
    group.add_argument("--save-model", type=Path, help=f"also write {what} as a folder")
    group.add_argument("--fold", choices=["no", "near", "exact"], default="no",
                       help="put the repair into the model's own weights: an ordinary model without a patch, without "
                            "remote code. near: of patches on the stream, up to the spread over tokens of one number "
                            "a norm; exact: of maps on an MLP's output")
    group.add_argument("--fold-tolerance", type=amount, default=0.01,
                       help="relative change of perplexity on held-out windows above which no folder is written")


def parse(p):
    """The arguments of a script with --fold, which is refused without --save-model."""
    args = p.parse_args()
    if args.fold != "no" and not args.save_model:
        p.error("--fold: is of the folder that --save-model names; give that as well")
    return args


def _number(name, kind, fits, words):
    """argparse type: a number of `kind` for which fits(value) holds."""

    def parse(text):
        value = kind(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {words}, got {value}")
        return value

    parse.__name__ = name  # argparse names it when the text is no number
    return parse


positive = _number("integer", int, lambda value: value >= 1, "at least 1")
non_negative = _number("integer", int, lambda value: value >= 0, "at least 0")
amount = _number("number", float, lambda value: 0 <= value < math.inf, "a finite number of at least 0")
above_zero = _number("number", float, lambda value: 0 < value < math.inf, "a finite number above 0")
seed = _number("integer", int, lambda value: 0 <= value < 2**32, "from 0 to 2**32 - 1")


def check_outputs(args, reads=(), beside=(), **suffixes):
    """Refuse before any work what would lose a file: outputs of another kind, over one another or over an input.

    suffixes: flag=ending for each output file; beside: endings of what is written beside --out; reads: flags of files
    that are read. --save-model must be absent, empty or written by this project, and hold neither the model that is
    read nor any other output. Raises UserError.
    """
    paths = {}
    for flag, suffix in suffixes.items():
        path = getattr(args, flag)
        if path is None:
            continue
        name = f"--{flag.replace('_', '-')} {path}"
        if suffix and path.suffix != suffix:
            raise UserError(f"{name}: the file's name must end in {suffix}")
        if path.is_dir():
            raise UserError(f"{name}: is a folder")
        check_parent(path, name)
        if path.resolve() in paths:
            raise UserError(f"{name}: is also named by {paths[path.resolve()]}")
        paths[path.resolve()] = f"--{flag.replace('_', '-')}"
    written = {**paths, **{args.out.with_suffix(ending).resolve(): "--out" for ending in beside}}
    for flag in reads:
        path = getattr(args, flag)
        if path is not None and path.resolve() in written:
            raise UserError(f"{written[path.resolve()]}: would overwrite --{flag} {path}; choose another name")
    folder = getattr(args, "save_model", None)
    if folder is None:
        return
    check_parent(folder, f"--save-model {folder}")
    if folder.is_symlink() or folder.is_file():
        raise UserError(f"--save-model {folder}: is a {'link' if folder.is_symlink() else 'file'}; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "linearpatch.json").is_file():
        raise UserError(f"--save-model {folder}: is not empty and was not written by this project; choose another")
    inside = [str(path) for path in paths if folder.resolve() in path.parents]
    model = Path(args.model)
    if model.exists() and folder.resolve() in (model.resolve(), *model.resolve().parents):
        inside.append(args.model)
    if inside:
        raise UserError(f"--save-model {folder}: would replace {inside[0]}; choose another folder")


def check_parent(path, name):
    """Raise UserError where the folder of an output cannot be made."""
    first = next(parent for parent in path.absolute().parents if parent.exists())
    if not first.is_dir():
        raise UserError(f"{name}: {first} is no folder")


def parse_layers(text):
    """'23-29', '3,5,7-9' or '[3, 5]' -> sorted list of distinct 0-based layer indices. Raises UserError."""
    if not re.fullmatch(r"\s*\[?[\d\s,\-]+\]?\s*", text):
        raise UserError(f"--layers {text}: expected a list such as 3,5,7-9 (0-based, ends included) or 'paper'")
    layers = []
    for part in text.strip().strip("[]").split(","):
        ends = part.strip().split("-")
        if not all(end.strip().isdigit() for end in ends) or len(ends) > 2 or int(ends[0]) > int(ends[-1]):
            raise UserError(f"--layers {text}: cannot read '{part.strip()}'; expected a number or FIRST-LAST")
        if int(ends[-1]) > 9999:
            raise UserError(f"--layers {text}: no model has a layer {ends[-1].strip()}")
        layers += range(int(ends[0]), int(ends[-1]) + 1)
    if len(set(layers)) != len(layers):
        raise UserError(f"--layers {text}: a layer is named twice")
    return sorted(layers)


def subset(items, limit, seed):
    """A random subset of `limit` items in their own order, drawn by random.Random(seed); all without a limit."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index] for index in sorted(random.Random(seed).sample(range(len(items)), limit))]


def seed_everything(seed):
    """Seed python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def run(main):
    """Call `main()` and leave the process with its exit code; failures are one or two lines, not tracebacks."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)
    try:
        main()
    except UserError as error:
        sys.exit(_fail(error, 2))
    except WorkError as error:
        sys.exit(_fail(error, 1))
    except KeyboardInterrupt:
        sys.exit(_fail("interrupted; finished artifacts are kept and reused by the next call", 130))
    except torch.OutOfMemoryError as error:
        sys.exit(_fail(f"out of memory: lower --batch-size or --seq-len, or use --device-map auto "
                       f"({str(error).splitlines()[0]})", 1))
    except OSError as error:
        sys.exit(_fail(f"{error.filename or 'file'}: {error.strerror or error}", 1))


def _fail(message, code):
    print(f"error: {message}", file=sys.stderr)
    return code
