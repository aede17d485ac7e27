"""The patch of one run: the scale vector d, its error, P = H diag(d) H^T, and the patch file.

P acts as X <- X P on row vectors, at the input of the first module behind the run. The file holds d (C numbers) for
training-free patches and the full matrix for trained or random ones.
"""

import torch

from utils.artifacts import read_tensors, write_tensors
from utils.errors import UserError, WorkError
from utils.hadamard import rotation
from utils.modeling_linearpatch import LinearPatch
from utils.networks import ReplacementLayer, SwiGLU
from utils.selection import kept_layers, runs_of
from utils.variants import Variant

SCALINGS = ("hadamard", "diagonal", "none", "random")
ESTIMATORS = ("ratio-of-sums", "mean-of-ratios")
BOOTSTRAP_DRAWS = 200


def scale_vector(l1, start, end, estimator="ratio-of-sums"):
    """d float64 [C] of the run [start, end) from per-sample L1 norms float32 [N, L+1, C].

    ratio-of-sums (the paper, section 3.2): both norms over all tokens of all samples; runs telescope exactly.
    mean-of-ratios (the released code): the ratio of each sample, averaged. Raises WorkError when an entry is not
    finite or a channel is silent before the run.
    """
    before, after = l1[:, start].double(), l1[:, end].double()
    if estimator == "ratio-of-sums":
        before, after = before.sum(0, keepdim=True), after.sum(0, keepdim=True)
    # A channel that is zero on both sides keeps scale 1; one that appears out of nothing has no scale.
    silent = before == 0
    if (silent & (after > 0)).any():
        channel = int((silent & (after > 0)).nonzero()[0, 1])
        raise WorkError(f"run [{start}, {end}): channel {channel} is zero before the run and not after it, so it has "
                        "no scale; use more calibration text")
    d = torch.where(silent, 1.0, after / before.clamp(min=torch.finfo(torch.float64).tiny)).mean(0)
    if not torch.isfinite(d).all():
        raise WorkError(f"run [{start}, {end}): d has non-finite entries")
    return d


def scale_stderr(l1, start, end, estimator="ratio-of-sums", seed=0, draws=BOOTSTRAP_DRAWS):
    """Bootstrap standard error of d over calibration samples, float64 [C]; zeros when there is one sample."""
    before, after = l1[:, start].double(), l1[:, end].double()
    samples = len(before)
    if samples == 1:
        return torch.zeros(before.shape[1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(samples, (draws, samples), generator=generator)
    weights = torch.zeros(draws, samples, dtype=torch.float64).scatter_add_(
        1, picks, torch.ones(draws, samples, dtype=torch.float64))
    tiny = torch.finfo(torch.float64).tiny
    if estimator == "ratio-of-sums":
        replicates = (weights @ after) / (weights @ before).clamp(min=tiny)
    else:
        replicates = weights @ (after / before.clamp(min=tiny)) / samples
    return replicates.std(0)


def patch_module(scaling, d=None, weight=None, order="released"):
    """LinearPatch of one run: hadamard d -> P = H diag(d) H^T, diagonal d -> diag(d), or a given matrix [C, C]."""
    if weight is not None:
        return LinearPatch(weight.float())
    if scaling == "hadamard":
        return LinearPatch(rotation(len(d), order=order).conjugate(d))
    return LinearPatch(d.float())


def random_matrix(hidden_size, seed):
    """The randomly initialised P of the ablation: independent normal entries of variance 1/C, float32 [C, C]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(hidden_size, hidden_size, generator=generator) / hidden_size**0.5


def write_patch(path, tensors, content):
    """Write a patch file. tensors: run{i}.d, run{i}.d_stderr, run{i}.weight (float32); content: its header."""
    write_tensors(path, "patch", {name: tensor.float() for name, tensor in tensors.items()}, content)


def read_patch(path, source, name=None, decoder=None):
    """Variant of a patch file for the model `source`, with its header as `about`. Raises UserError.

    decoder: function without arguments that gives the loaded Decoder; called only for a file with a decoder layer.
    """
    header, tensors = read_tensors(path, "patch")
    source.check_artifact(header.get("model", {}), path)
    num_layers, hidden_size = source.shape
    removed = checked_layers(header, num_layers, path)
    if header["scaling"].removesuffix("+ft") not in (*SCALINGS, "ffn", "layer"):
        raise UserError(f"{path}: scaling {header['scaling']} is unknown here")
    if header.get("hadamard_order", "released") not in ("released", "paper"):
        raise UserError(f"{path}: hadamard_order {header['hadamard_order']} is unknown here")
    for field, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: {field} has non-finite entries")
    patches = {}
    for index, (start, end) in enumerate(runs_of(removed)):
        prefix = f"run{index}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        legal = {"d": [(hidden_size,)], "weight": [(hidden_size,), (hidden_size, hidden_size)]}
        for field, shapes in legal.items():
            if field in own and tuple(own[field].shape) not in shapes:
                raise UserError(f"{path}: run{index}.{field} has shape {list(own[field].shape)}, "
                                f"the model's hidden size is {hidden_size}")
        if any(key.startswith(("ffn.", "layer.")) for key in own):
            patches[end] = _network(own, header, start, hidden_size, decoder, f"{path}: run {index}")
        elif "weight" in own or "d" in own:
            patches[end] = patch_module(header.get("scaling"), own.get("d"), own.get("weight"),
                                        header.get("hadamard_order", "released"))
        else:
            raise UserError(f"{path}: has no tensor for run {index}, [{start}, {end})")
    return Variant(name or str(path), removed, patches, header)


def _network(own, header, start, hidden_size, decoder, place):
    """The replacement network of a run from its tensors. Raises UserError where they do not fit the model."""
    try:
        if any(key.startswith("layer.") for key in own):
            state = {key.removeprefix("layer."): value for key, value in own.items()}
            return ReplacementLayer.from_state(decoder(), start, state)
        gate, up, down = (own[f"ffn.{name}"] for name in ("gate", "up", "down"))
        if not gate.shape == up.shape == down.T.shape == (len(gate), hidden_size):
            raise UserError(f"{place}: its network has shapes {[list(t.shape) for t in (gate, up, down)]}, the model's "
                            f"hidden size is {hidden_size}")
        return SwiGLU(gate, up, down, header["activation"])
    except (KeyError, RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()[:120]
        raise UserError(f"{place}: its network does not fit the model ({reason})") from None


def checked_layers(content, num_layers, path):
    """`removed` of an artifact as a tuple of distinct layers of the model. Raises UserError."""
    removed = content.get("removed")
    if (not isinstance(removed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in removed)
            or len(set(removed)) != len(removed) or len(removed) >= num_layers):
        raise UserError(f"{path}: field 'removed' is no list of distinct layers from 0 to {num_layers - 1}: {removed}")
    return tuple(sorted(removed))


def layer_lists(num_layers, removed):
    """What every artifact says about its layers: removed, kept and runs, all 0-based, runs half-open."""
    return {"removed": sorted(removed), "kept": kept_layers(num_layers, removed),
            "runs": [list(run) for run in runs_of(removed)]}
