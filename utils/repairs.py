"""Repairs: what stands where layers were removed. One class a repair; the patch file, P = H diag(d) H^T, d, its error.

A patch acts as X <- X P on row vectors, at the input of the first module behind the run. The file holds d (C numbers)
for training-free patches, the full matrix for trained or random ones, and a network's weights.
"""

from dataclasses import dataclass, field

import torch

from utils.artifacts import read_tensors, write_tensors
from utils.decoder import Variant
from utils.errors import UserError, WorkError
from utils.hadamard import rotation
from utils.layers import Layers
from utils.modeling_linearpatch import LinearPatch
from utils.networks import ReplacementLayer, SwiGLU, TrainablePatch, activation_of

ESTIMATORS = ("ratio-of-sums", "mean-of-ratios")
BOOTSTRAP_DRAWS = 200
REPAIRS = {}


def repair(name, help):
    """Class decorator: register an instance as the repair of this name. A contributor adds one class here."""

    def register(made):
        made.name, made.help = name, help
        REPAIRS[name] = made()
        return made

    return register


@dataclass
class Calibration:
    """What repairs are fitted from, and how.

    size: C; stats: Stats or None; ridge (None: the repair's own) and rank of fits by least squares; moments(run) ->
    {name: float64 [C, C]}; judge(variants) -> [dict with repair, ppl, ...] on held-out windows.
    """

    size: int
    stats: object = None
    estimator: str = "ratio-of-sums"
    order: str = "released"
    seed: int = 0
    ridge: float | None = None
    rank: int = 64
    moments: object = None
    judge: object = None


@dataclass
class Fit:
    """A fitted repair: its name in REPAIRS, run{i}.* tensors, and what else the header of its file says."""

    repair: str
    tensors: dict
    header: dict = field(default_factory=dict)

    def variant(self, layers):
        """The Variant that this fit makes of the model."""
        modules = REPAIRS[self.repair].modules(self.tensors, self.header, layers)
        return Variant(self.repair, layers, modules, {"repair": self.repair, "stage": "calibrated"})


class Repair:
    """reads: the field of Stats that a fit needs, or None; moments: names of activations.MOMENTS that it needs;
    closed_form: whether calibrate.py can fit it.

    is_matrix: its module is one matrix on the stream, so that it can be scaled, saved inside a model folder, and
    training can start from it. folds: names in folding.FOLDS of the ways in which it goes into the model's own weights.
    options: flags of calibrate.py that its result depends on.
    """

    reads, moments = None, ()
    closed_form = True
    is_matrix = True
    folds = ("near",)
    options = ()

    def fit(self, given, layers):
        """Fit of this repair for every run of `layers`, from a Calibration. Raises WorkError."""
        tensors = {}
        for number, (start, end) in enumerate(layers.runs):
            found = self.fit_run(given, start, end, number)
            tensors |= {f"run{number}.{name}": tensor for name, tensor in found.items()}
        return Fit(self.name, tensors, self.header(given))

    def fit_run(self, given, start, end, number):
        """{name: tensor} of the run [start, end), the number-th."""
        raise TypeError(f"{self.name} is trained, not fitted")

    def header(self, given):
        """What the file says beside the tensors."""
        return {}

    def modules(self, tensors, header, layers, decoder=None):
        """{end of run: module} of a file's tensors. decoder: function that gives the loaded model, where one is needed.

        Raises UserError when a run has no tensor, or one that does not fit.
        """
        modules = {}
        for number, (start, end) in enumerate(layers.runs):
            prefix = f"run{number}."
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if not own:
                raise UserError(f"has no tensor for run {number}, [{start}, {end})")
            if self.is_matrix and not {"d", "weight"} & set(own):
                raise UserError(f"run {number}, [{start}, {end}), has neither d nor weight")
            modules[end] = self.module(own, header, start, decoder)
        return modules

    def module(self, own, header, start, decoder=None):
        """The module of one run from its tensors: a trained matrix, or P of d."""
        return LinearPatch((own["weight"] if "weight" in own else self.matrix(own["d"], header)).float())

    def matrix(self, d, header):
        """P of the scale vector d: [C, C], or [C] for a diagonal one."""
        return d

    def shapes(self, size):
        """{name: legal shapes} of a run's tensors; names that are not there are free."""
        return {"d": [(size,)], "weight": [(size,), (size, size)]}

    def trainable(self, module, decoder, start, args, number):
        """The module to train in place of `module`, for the run that begins at `start`.

        args: flags init, trainable, seed and order of distill.py. Raises UserError.
        """
        size = decoder.hidden_size
        weight = {"patch": lambda: module.weight.detach(), "identity": lambda: torch.ones(size),
                  "random": lambda: random_matrix(size, args.seed + number)}[args.init]()
        return TrainablePatch(weight, args.trainable, args.order, args.seed)

    def training_header(self, config):
        """What the file of a trained one says beside its tensors."""
        return {}


@repair("none", "identity: the pruned model as it is")
class Identity(Repair):
    def fit_run(self, given, start, end, number):
        return {"d": torch.ones(given.size)}


@repair("diagonal", "d on the raw channels")
class Diagonal(Repair):
    reads, options = "l1_raw", ("estimator",)

    def fit_run(self, given, start, end, number):
        l1 = getattr(given.stats, self.reads)
        return {"d": scale_vector(l1, start, end, given.estimator),
                "d_stderr": scale_stderr(l1, start, end, given.estimator, given.seed)}


@repair("hadamard", "LinearPatch: P = H diag(d) H^T, d on the rotated channels")
class Hadamard(Diagonal):
    reads, options = "l1_rotated", ("estimator", "hadamard_order")

    def header(self, given):
        return {"hadamard_order": given.order, "rotation": rotation(given.size, order=given.order).info()}

    def matrix(self, d, header):
        return rotation(len(d), order=header.get("hadamard_order", "released")).conjugate(d)  # eq. (7)


@repair("random", "a random P (ablation)")
class Random(Repair):
    def fit_run(self, given, start, end, number):
        return {"weight": random_matrix(given.size, given.seed + number)}


@repair("auto", "the best of none, diagonal and hadamard on held-out calibration windows")
class Auto(Repair):
    reads, options = "l1_rotated", ("estimator", "hadamard_order", "auto_windows")
    choices = ("none", "diagonal", "hadamard")

    def fit(self, given, layers):
        fits = {name: REPAIRS[name].fit(given, layers) for name in self.choices}
        seen = given.judge([fit.variant(layers) for fit in fits.values()])
        best = fits[min(seen, key=lambda row: row["ppl"])["repair"]]
        best.header["auto"] = seen
        return best


class LeastSquares(Repair):
    """A matrix fitted by second moments, on the stream to Y = X^(end) from X = X^(start): S = X^T X, B = X^T Y.

    Regularised by a ridge toward the identity, `ridge` times the mean of the diagonal of the first of `moments`, most
    of which is the attention sink's. solve(given, run, ridge float64 [C, C], **moments) gives float64 [C, C] or, for a
    diagonal, [C].
    """

    moments, options, ridge = ("xx", "xy"), ("ridge", "exclude_first_token"), 1e-6

    def fit_run(self, given, start, end, number):
        found, eye = given.moments((start, end)), torch.eye(given.size, dtype=torch.float64)
        moments = {name: found[name].cpu() for name in self.moments}
        ridge = (self.ridge if given.ridge is None else given.ridge) * moments[self.moments[0]].diagonal().mean()
        weight = self.solve(given, (start, end), ridge * eye, **moments)
        if not torch.isfinite(weight).all():
            raise WorkError(f"run [{start}, {end}): the fit of {self.name} is not finite; raise --ridge")
        return {"weight" if weight.ndim == 2 else "d": weight}


@repair("scalar", "one number, by least squares: c = tr(B) / tr(S)")
class Scalar(LeastSquares):
    def solve(self, given, run, ridge, xx, xy):
        return ((xy + ridge).trace() / (xx + ridge).trace()).expand(given.size).clone()


@repair("least-squares-diagonal", "d on the rotated channels by least squares, not by magnitudes")
class LeastSquaresDiagonal(LeastSquares):
    options = ("ridge", "exclude_first_token", "hadamard_order")
    header, matrix = Hadamard.header, Hadamard.matrix

    def solve(self, given, run, ridge, xx, xy):
        h = rotation(given.size, order=given.order).matrix()
        before, cross = (h.T @ (part + ridge) @ h for part in (xx, xy))
        return cross.diagonal() / before.diagonal()


@repair("symmetric", "the best symmetric P by least squares: S P + P S = B + B^T")
class Symmetric(LeastSquares):
    def solve(self, given, run, ridge, xx, xy):
        values, vectors = torch.linalg.eigh(xx + ridge)
        target = vectors.T @ (xy + xy.T - 2 * xx) @ vectors  # for P - I
        found = torch.eye(given.size).double() + vectors @ (target / (values[:, None] + values)) @ vectors.T
        return (found + found.T) / 2


@repair("ghosted", "Ghosted Layers: the best P of all by least squares")
class Ghosted(LeastSquares):
    def solve(self, given, run, ridge, xx, xy):
        return torch.eye(given.size).double() + torch.linalg.solve(xx + ridge, xy - xx)


@repair("low-rank", "LinearPatch plus the best matrix of rank --rank behind it, by least squares")
class LowRank(LeastSquares):
    reads, options = "l1_rotated", ("ridge", "rank", "exclude_first_token", "estimator", "hadamard_order")
    header = Hadamard.header

    def solve(self, given, run, ridge, xx, xy):
        """Reduced-rank regression of the residual Y - X P: the top right singular vectors of the fitted values."""
        d = scale_vector(getattr(given.stats, self.reads), *run, given.estimator)
        patch, before = rotation(given.size, order=given.order).conjugate(d).double(), xx + ridge
        rest = torch.linalg.solve(before, xy - xx @ patch)
        _, _, right = torch.linalg.svd(torch.linalg.cholesky(before).T @ rest)
        top = right[:given.rank].T
        return patch + rest @ top @ top.T


@repair("bures", "the symmetric positive P that keeps second moments: S^-1/2 (S^1/2 Y^T Y S^1/2)^1/2 S^-1/2")
class Bures(LeastSquares):
    moments = ("xx", "yy")

    def solve(self, given, run, ridge, xx, yy):
        values, vectors = torch.linalg.eigh(xx + ridge)
        root, inverse = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
        values, vectors = torch.linalg.eigh(root @ (yy + ridge) @ root)
        found = inverse @ (vectors * values.clamp(min=0).sqrt() @ vectors.T) @ inverse
        return (found + found.T) / 2


class MLPMap(LinearPatch):
    """M <- M T on the output of the MLP of layer `host`, [..., C]; weight: T, float32 [C, C]."""

    def __init__(self, weight, host):
        super().__init__(weight)
        self.host = host


@repair("replaceme", "ReplaceMe: the best matrix on the output of the MLP before the run, by least squares")
class ReplaceMe(LeastSquares):
    """T = (M^T M + r I)^-1 M^T R, R = X^(end) - (X^(start) - M): the ridge is toward 0, as published."""

    moments, ridge, is_matrix, folds = ("mm", "mr"), 1e-3, False, ("exact",)

    def fit_run(self, given, start, end, number):
        self.host(start, end)
        return super().fit_run(given, start, end, number)

    def solve(self, given, run, ridge, mm, mr):
        return torch.linalg.solve(mm + ridge, mr)

    def module(self, own, header, start, decoder=None):
        return MLPMap(own["weight"].float(), self.host(start))

    def host(self, start, end="..."):
        """The layer before a run. Raises UserError where there is none."""
        if start == 0:
            raise UserError(f"run [0, {end}): has no layer before it, on whose MLP {self.name} could act")
        return start - 1


class Network(Repair):
    """A trained network in the place of each run, the baselines of LLM-Streamline."""

    closed_form = is_matrix = False
    folds = ()

    def module(self, own, header, start, decoder=None):
        try:
            return self.rebuilt(own, header, start, decoder)
        except (KeyError, RuntimeError, TypeError) as error:
            reason = str(error).strip().splitlines()[-1].strip()[:120]
            raise UserError(f"its network does not fit the model ({reason})") from None

    def shapes(self, size):
        return {}


@repair("ffn", "LLM-Streamline's network: a SwiGLU of the shape of the model's MLP, trained from a random start")
class FeedForward(Network):
    def rebuilt(self, own, header, start, decoder):
        gate, up, down = (own[f"ffn.{name}"] for name in ("gate", "up", "down"))
        if not gate.shape == up.shape == down.T.shape == (len(gate), header["model"]["hidden_size"]):
            raise UserError(f"its network has shapes {[list(t.shape) for t in (gate, up, down)]}, the model's hidden "
                            f"size is {header['model']['hidden_size']}")
        return SwiGLU(gate, up, down, header["activation"])

    def trainable(self, module, decoder, start, args, number):
        return SwiGLU.random(decoder.config, args.seed + number)

    def training_header(self, config):
        return {"activation": activation_of(config)}


@repair("layer", "LLM-Streamline's layer: a copy of the first removed layer, trained")
class Layer(Network):
    def rebuilt(self, own, header, start, decoder):
        state = {key.removeprefix("layer."): value for key, value in own.items()}
        return ReplacementLayer.from_state(decoder(), start, state)

    def trainable(self, module, decoder, start, args, number):
        return ReplacementLayer(decoder.layers[start], start)


# ----- the scale vector


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
    # section 3.2: d_k = ||Z^(end)_k||_1 / ||Z^(start)_k||_1
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


def random_matrix(hidden_size, seed):
    """The randomly initialised P of the ablation: independent normal entries of variance 1/C, float32 [C, C]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(hidden_size, hidden_size, generator=generator) / hidden_size**0.5


# ----- the patch file


def write_patch(path, tensors, content):
    """Write a patch file. tensors: run{i}.d, run{i}.d_stderr, run{i}.weight (float32), ...; content: its header."""
    write_tensors(path, "patch", {name: tensor.float() for name, tensor in tensors.items()}, content)


def read_patch(path, source, name=None, decoder=None):
    """(Variant, header) of a patch file for the model `source`. Raises UserError.

    decoder: function without arguments that gives the loaded Decoder; called only for a file with a decoder layer.
    """
    header, tensors = read_tensors(path, "patch")
    source.check_artifact(header["model"], path)
    depth, size = source.shape
    layers, about = Layers.of(header, depth, path), header["about"]
    if about["repair"] not in REPAIRS:
        raise UserError(f"{path}: repair {about['repair']} is unknown here")
    made = REPAIRS[about["repair"]]
    for field_name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: {field_name} has non-finite entries")
        legal = made.shapes(size).get(field_name.partition(".")[2])
        if legal is not None and tuple(tensor.shape) not in legal:
            raise UserError(f"{path}: {field_name} has shape {list(tensor.shape)}, the model's hidden size is {size}")
    try:
        return Variant(name or str(path), layers, made.modules(tensors, header, layers, decoder), about), header
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
