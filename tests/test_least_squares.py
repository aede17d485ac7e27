"""Repairs by least squares against numpy, closed forms and brute force, on states made up for it."""

from types import SimpleNamespace

import numpy
import pytest
import torch

from tests.steps import CALIB
from tests.tiny import ids, logits_of, plain_states, tiny, variant
from tests.tokenizers_for_tests import tok_nobos
from utils.activations import collect_moments
from utils.artifacts import read_tensors
from utils.data.windows import calibration_windows
from utils.decoder import Decoder
from utils.errors import UserError, WorkError
from utils.hadamard import rotation
from utils.layers import Layers
from utils.repairs import REPAIRS, Calibration, LeastSquares, scale_vector

ON_STREAM = [name for name, found in REPAIRS.items() if isinstance(found, LeastSquares) and found.is_matrix]
SIZE, TOKENS, RUN = 16, 400, (2, 5)


def states(seed=0, noise=0.3):
    """(X, Y) float64 [TOKENS, SIZE]: channels of different size and correlated, Y a linear map of X with noise."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(TOKENS, SIZE) @ (torch.eye(SIZE) + 0.3 * draw(SIZE, SIZE)) * torch.linspace(0.3, 3, SIZE)
    return x, x @ (1.3 * torch.eye(SIZE) + 0.2 * draw(SIZE, SIZE)) + noise * draw(TOKENS, SIZE)


def calibration(x, y, ridge=0.0, **more):
    """The Calibration of one run of states [tokens, C]."""
    turned = [part @ rotation(SIZE).matrix() for part in (x, y)]
    l1 = torch.ones(1, 7, SIZE).double()
    l1[0, RUN[0]], l1[0, RUN[1]] = (part.abs().sum(0) for part in turned)
    moments = {"xx": x.T @ x, "xy": x.T @ y, "yy": y.T @ y}
    return Calibration(SIZE, SimpleNamespace(l1_rotated=l1), ridge=ridge, moments=lambda run: moments, **more)


def fitted(name, given):
    """The matrix of a repair, float64 [C, C]."""
    found = REPAIRS[name]
    tensors = found.fit_run(given, *RUN, 0)
    weight = tensors.get("weight")
    weight = found.matrix(tensors["d"], found.header(given)) if weight is None else weight
    return (torch.diag(weight) if weight.ndim == 1 else weight).double()


def loss(x, y, weight):
    return (x @ weight - y).square().sum().item()


@pytest.mark.parametrize("seed", range(3))
def test_fit_losses_are_ordered(seed):
    x, y = states(seed)
    given = calibration(x, y)
    found = [loss(x, y, fitted(name, given)) for name in ("ghosted", "symmetric", "least-squares-diagonal", "scalar")]
    found.append(loss(x, y, torch.eye(SIZE).double()))
    assert found == sorted(found) and found[0] < 0.9 * found[-1]
    d = scale_vector(given.stats.l1_rotated, *RUN)
    assert found[2] <= loss(x, y, rotation(SIZE).conjugate(d).double())  # LinearPatch is one of the diagonals
    ranks = [loss(x, y, fitted("low-rank", calibration(x, y, rank=rank))) for rank in (1, 4, 8, SIZE)]
    assert ranks == sorted(ranks, reverse=True) and ranks[-1] == pytest.approx(found[0])


@pytest.mark.parametrize("name", ON_STREAM)
@pytest.mark.parametrize("ridge", [0.0, 1e-3, None])
def test_an_identity_block_gives_the_identity(name, ridge):
    x, _ = states()
    torch.testing.assert_close(fitted(name, calibration(x, x, ridge)), torch.eye(SIZE).double(), rtol=0,
                               atol=1e-6)


def test_ghosted_is_ordinary_least_squares_and_finds_a_planted_map():
    x, y = states()
    torch.testing.assert_close(fitted("ghosted", calibration(x, y)), torch.from_numpy(
        numpy.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0]), rtol=1e-8, atol=1e-8)
    x, y = states(noise=0)
    planted = torch.from_numpy(numpy.linalg.pinv(x.numpy())) @ y
    torch.testing.assert_close(fitted("ghosted", calibration(x, y)), planted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(x @ planted, y, rtol=1e-8, atol=1e-8)


def test_the_ridge_is_rows_that_ask_for_the_identity():
    """Ridge regression is least squares with further rows sqrt(r) I -> sqrt(r) I; for the symmetric map as well."""
    x, y = states()
    rows = (1e-2 * x.square().sum(0).mean()).sqrt() * torch.eye(SIZE)
    longer, wanted = torch.cat([x, rows]), torch.cat([y, rows])
    for name in ("ghosted", "symmetric", "scalar", "least-squares-diagonal"):
        torch.testing.assert_close(fitted(name, calibration(x, y, 1e-2)), fitted(name, calibration(longer, wanted)),
                                   rtol=1e-6, atol=1e-6)


def test_symmetric_is_the_best_of_all_symmetric_ones():
    x, y = states()
    found = fitted("symmetric", calibration(x, y))
    assert torch.equal(found, found.T)
    basis = []
    for i in range(SIZE):
        for j in range(i + 1):
            one = torch.zeros(SIZE, SIZE).double()
            one[i, j] = one[j, i] = 1
            basis.append(one)
    design = torch.stack([(x @ one).flatten() for one in basis], 1)
    numbers = numpy.linalg.lstsq(design.numpy(), y.flatten().numpy(), rcond=None)[0]
    torch.testing.assert_close(found, sum(n * one for n, one in zip(numbers, basis)), rtol=1e-7, atol=1e-7)


def test_scalar_and_diagonal_are_regressions_of_one_variable():
    x, y = states()
    given, h = calibration(x, y), rotation(SIZE).matrix()
    c = numpy.linalg.lstsq(x.reshape(-1, 1).numpy(), y.flatten().numpy(), rcond=None)[0].item()
    torch.testing.assert_close(fitted("scalar", given), c * torch.eye(SIZE).double(), rtol=1e-10, atol=0)
    d = torch.tensor([numpy.linalg.lstsq((x @ h)[:, [k]].numpy(), (y @ h)[:, k].numpy(), rcond=None)[0].item()
                      for k in range(SIZE)]).double()
    torch.testing.assert_close(fitted("least-squares-diagonal", given), h @ d.diag() @ h.T, rtol=1e-6, atol=1e-6)


def test_bures_keeps_second_moments_and_is_positive():
    x, y = states()
    found = fitted("bures", calibration(x, y))
    torch.testing.assert_close(found @ (x.T @ x) @ found, y.T @ y, rtol=1e-8, atol=1e-6)
    assert torch.equal(found, found.T) and torch.linalg.eigvalsh(found).min() > 0
    independent = torch.linalg.qr(x)[0] * torch.linspace(1, 3, SIZE)  # diagonal moments: ratios of lengths
    scaled = independent * torch.linspace(0.5, 2, SIZE)
    torch.testing.assert_close(fitted("bures", calibration(independent, scaled)),
                               torch.diag(torch.linspace(0.5, 2, SIZE)).double(), rtol=1e-6, atol=1e-8)


def test_low_rank_is_the_best_of_its_rank():
    """Against alternating least squares from random starts, for LinearPatch plus rank 2."""
    x, y = states()
    given = calibration(x, y, rank=2)
    found, patch = fitted("low-rank", given), rotation(SIZE).conjugate(scale_vector(given.stats.l1_rotated, *RUN))
    assert torch.linalg.matrix_rank(found - patch.double(), rtol=1e-6) == 2
    rest, least = y - x @ patch.double(), loss(x, y, found)
    for seed in range(3):
        right = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(seed)).double()
        for _ in range(200):
            left = torch.linalg.lstsq(x, rest @ torch.linalg.pinv(right)).solution
            right = torch.linalg.lstsq(x @ left, rest).solution
        assert least <= loss(x, rest, left @ right) * (1 + 1e-9)
        assert loss(x, rest, left @ right) == pytest.approx(least, rel=1e-4)


def test_a_singular_fit_asks_for_a_ridge():
    x = torch.zeros(TOKENS, SIZE).double()
    for name in ("scalar", "bures"):
        with pytest.raises(WorkError, match="raise --ridge"):
            fitted(name, calibration(x, x))


def mlp_map(m, r, ridge):
    """T of outputs M [tokens, C] and targets R [tokens, C]."""
    moments = {"mm": m.T @ m, "mr": m.T @ r}
    return REPAIRS["replaceme"].fit_run(Calibration(SIZE, ridge=ridge, moments=lambda run: moments), *RUN, 0)["weight"]


def test_replaceme_is_ridge_regression_toward_zero():
    m, r = states()
    amount = 1e-3 * m.square().sum(0).mean()
    rows = amount.sqrt() * torch.eye(SIZE).double()
    found = mlp_map(m, r, None)
    expected = numpy.linalg.lstsq(torch.cat([m, rows]).numpy(), torch.cat([r, 0 * rows]).numpy(), rcond=None)[0]
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-8, atol=1e-8)
    assert (m.T @ (m @ found - r) + amount * found).abs().max() < 1e-8 * (m.T @ r).abs().max()
    torch.testing.assert_close(mlp_map(m, m, 0.0), torch.eye(SIZE).double(), rtol=0, atol=1e-8)
    assert mlp_map(m, r, 1e12).abs().max() < 1e-9
    with pytest.raises(UserError, match=r"run \[0, 3\): has no layer before it"):
        REPAIRS["replaceme"].fit_run(Calibration(SIZE), 0, 3, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_replaceme_of_removed_no_ops_is_the_identity(family):
    """Gemma's no-ops: its norm behind each sub-layer is 1 + w with w = -1."""
    model = tiny(family, no_ops=(2, 3))
    with torch.no_grad():
        for index in (2, 3):
            for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
                if family == "gemma3":
                    getattr(model.model.layers[index], name).weight.fill_(-1)
    decoder, layers = Decoder(model.double()), Layers(6, (2, 3))
    moments = collect_moments(decoder, ids(8, 20), layers.runs, ["mm", "mr"], progress=False)
    fit = REPAIRS["replaceme"].fit(Calibration(64, ridge=0.0, moments=moments.get), layers)
    torch.testing.assert_close(fit.tensors["run0.weight"], torch.eye(64).double(), rtol=0, atol=1e-6)
    one = fit.variant(layers)
    assert one.modules[4].host == 1 and one.steps() == [0, one.modules[4], 4, 5]
    torch.testing.assert_close(logits_of(decoder, one, ids()), logits_of(decoder, variant("v", (2, 3)), ids()))


def test_one_pass_serves_all_selections_and_repairs(script, folders, tmp_path, text, monkeypatch):
    passes = []
    monkeypatch.setattr("utils.session.collect_moments", lambda *a: passes.append(a[2:4]) or collect_moments(*a))
    outs = [tmp_path / name / "selection.json" for name in ("one", "two")]
    for out, layers in zip(outs, ("2-3", "1,3-4")):
        assert script("prune", "--model", folders("llama"), "--layers", layers, "--out", out)[0] == 0
    code, _, err = script("calibrate", "--model", folders("llama"), "--selection", *outs, "--repair", "ghosted",
                          "bures", "replaceme", "--calib-data", text, *CALIB, "--batch-size", 3, "--exclude-first-token")
    assert code == 0, err
    runs = [(1, 2), (2, 4), (3, 5)]
    assert passes == [(runs, ["mm", "mr", "xx", "xy", "yy"])]
    windows = calibration_windows(str(text), tok_nobos(), 4, 32).ids
    states = plain_states(tiny(), windows)[:, :, 1:].flatten(1, 2)
    for out, removed in zip(outs, ([(2, 4)], [(1, 2), (3, 5)])):
        header, tensors = read_tensors(out.with_name("patch_ghosted.safetensors"), "patch")
        assert header["recipe"]["exclude_first_token"] is True and header["recipe"]["ridge"] is None
        for number, (start, end) in enumerate(removed):
            x, y = states[start], states[end]
            ridge = 1e-6 * x.square().sum(0).mean() * torch.eye(64)
            expected = torch.linalg.solve(x.T @ x + ridge, x.T @ y + ridge)
            torch.testing.assert_close(tensors[f"run{number}.weight"].double(), expected, rtol=1e-3, atol=1e-3)
