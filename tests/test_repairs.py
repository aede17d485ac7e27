"""Repairs: d, P and the patch file; what each repair says of itself."""

from types import SimpleNamespace

import pytest
import torch

from tests.artifacts import identity
from tests.steps import calibrate, ppl, prune, rows
from tests.tiny import ids, patch_of, plain_states, tiny, variant
from tests.tokenizers_for_tests import tok_nobos
from utils.activations import collect
from utils.artifacts import read_header, read_tensors
from utils.data.windows import calibration_windows
from utils.decoder import Decoder
from utils.errors import WorkError
from utils.evaluation.objectives import window_losses
from utils.hadamard import rotation
from utils.layers import Layers
from utils.model_folder import origin
from utils.modeling_linearpatch import LinearPatch
from utils.repairs import (REPAIRS, Calibration, Repair, random_matrix, read_patch, repair, scale_stderr, scale_vector,
                           write_patch)


@pytest.fixture(scope="module")
def collected():
    model, input_ids = tiny(), ids(6)
    return plain_states(model, input_ids), collect(Decoder(model), input_ids, rotation(64), progress=False)


def dense(d, size=64):
    """P = H diag(d) H^T as a plain product of matrices."""
    matrix = rotation(size).matrix()
    return matrix @ torch.diag(d.double()) @ matrix.T


def test_ratio_of_sums_and_mean_of_ratios(collected):
    states, stats = collected
    rotated = states @ rotation(64).matrix()
    before, after = rotated[2].abs().sum(1), rotated[4].abs().sum(1)  # [samples, C]
    torch.testing.assert_close(scale_vector(stats.l1_rotated, 2, 4), after.sum(0) / before.sum(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(scale_vector(stats.l1_rotated, 2, 4, "mean-of-ratios"), (after / before).mean(0),
                               rtol=1e-5, atol=0)


def test_patched_states_have_the_l1_norms_of_the_states_behind_the_run(collected):
    states, stats = collected
    d = scale_vector(stats.l1_rotated, 1, 4)
    patch = patch_of("hadamard", d)
    after = (patch(states[1].float()).double() @ rotation(64).matrix()).abs().sum((0, 1))
    torch.testing.assert_close(after, (states[4] @ rotation(64).matrix()).abs().sum((0, 1)), rtol=1e-4, atol=0)


def test_runs_telescope(collected):
    _, stats = collected
    one, two, both = (scale_vector(stats.l1_rotated, *run) for run in ((1, 3), (3, 5), (1, 5)))
    torch.testing.assert_close(one * two, both, rtol=1e-12, atol=0)
    torch.testing.assert_close(dense(one) @ dense(two), dense(both), rtol=0, atol=1e-12)


def test_unit_scale_is_the_identity():
    torch.testing.assert_close(patch_of("hadamard", torch.ones(48)).weight, torch.eye(48), rtol=0, atol=1e-6)


def test_the_matrix_is_symmetric_with_eigenvalues_d(collected):
    d = scale_vector(collected[1].l1_rotated, 2, 4)
    weight = patch_of("hadamard", d).weight.double()
    assert torch.equal(weight, weight.T)
    torch.testing.assert_close(weight, dense(d), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.linalg.eigvalsh(weight), d.sort().values, rtol=1e-5, atol=1e-6)


def test_removed_no_ops_need_no_scale():
    stats = collect(Decoder(tiny(no_ops=(2, 3))), ids(), rotation(64), progress=False)
    for l1 in (stats.l1_raw, stats.l1_rotated):
        torch.testing.assert_close(scale_vector(l1, 2, 4), torch.ones(64).double(), rtol=0, atol=1e-6)


def test_the_definition_of_d_under_a_massive_activation():
    """One token of 3000 in both states: the ratio of sums follows it, as the paper's definition does (1.203)."""
    generator = torch.Generator().manual_seed(0)
    before = torch.rand(2048, 64, generator=generator) + 0.5
    after = 1.5 * before
    before[0, 3] = after[0, 3] = 3000
    l1 = torch.stack([before.sum(0), after.sum(0)])[None]
    d = scale_vector(l1, 0, 1)
    assert d[3] == pytest.approx(1.203, abs=2e-3)
    torch.testing.assert_close(d[torch.arange(64) != 3], torch.full((63,), 1.5).double(), rtol=1e-5, atol=0)


def test_bootstrap_error_is_that_of_a_ratio_of_means():
    generator = torch.Generator().manual_seed(1)
    before = torch.rand(400, 8, generator=generator) + 1
    after = before * (2 + 0.3 * torch.randn(400, 8, generator=generator))
    l1 = torch.stack([before, after], 1)
    d = scale_vector(l1, 0, 1)
    residual = after.double() - d * before.double()
    delta_method = residual.std(0) / before.double().mean(0) / 400**0.5
    torch.testing.assert_close(scale_stderr(l1, 0, 1), delta_method, rtol=0.25, atol=0)
    assert torch.equal(scale_stderr(l1, 0, 1), scale_stderr(l1, 0, 1))


def test_a_channel_out_of_nothing_has_no_scale():
    l1 = torch.ones(3, 2, 4)
    l1[:, 0, 2] = 0
    with pytest.raises(WorkError, match="channel 2"):
        scale_vector(l1, 0, 1)
    l1[:, 1, 2] = 0
    assert scale_vector(l1, 0, 1)[2] == 1


# ----- the registry


@pytest.mark.parametrize("name", REPAIRS)
def test_every_repair_says_what_it_is(name, script):
    found = REPAIRS[name]
    assert found.name == name and found.help and found.reads in (None, "l1_raw", "l1_rotated")
    # lines of the help may end at a hyphen
    shown = "".join(script("calibrate" if found.closed_form else "distill", "--help")[1].split())
    assert "".join(f"{name} {found.help}".split()) in shown
    assert found.closed_form or not found.is_matrix


@pytest.mark.parametrize("order", ["released", "paper"])
@pytest.mark.parametrize("name", ["none", "diagonal", "hadamard", "random"])
def test_a_fit_survives_its_file_and_is_what_it_says(name, order, tmp_path):
    """Two runs, hidden size 48: the modules of the file, of the fit, and dense products."""
    rotated = rotation(48, order=order)
    stats = collect(Decoder(tiny(hidden_size=48)), ids(4), rotated, progress=False)
    layers = Layers(6, (1, 3, 4))
    fit = REPAIRS[name].fit(Calibration(48, stats, order=order, seed=5), layers)
    one = fit.variant(layers)
    assert one.about == {"metric": None, "n": 3, "repair": name, "stage": "calibrated"} and list(one.modules) == [2, 5]
    about = {"metric": "list", "n": 3, "repair": name, "stage": "calibrated"}
    write_patch(tmp_path / "p.safetensors", fit.tensors, {
        "model": identity(hidden_size=48), "about": about, **layers.json(), **fit.header, "recipe": {}})
    source = SimpleNamespace(shape=(6, 48), check_artifact=lambda found, path: None)
    read, header = read_patch(tmp_path / "p.safetensors", source, "P")
    assert (read.name, read.layers, read.about) == ("P", layers, about)
    assert (header.get("hadamard_order") == order) is (name == "hadamard")
    for number, (start, end) in enumerate(layers.runs):
        d = {"diagonal": scale_vector(stats.l1_raw, start, end),
             "hadamard": scale_vector(stats.l1_rotated, start, end)}.get(name, torch.ones(48).double())
        basis = rotated.matrix() if name == "hadamard" else torch.eye(48).double()
        expected = random_matrix(48, 5 + number).double() if name == "random" else basis @ d.diag() @ basis.T
        for module in (one.modules[end], read.modules[end]):
            weight = module.weight.double()
            torch.testing.assert_close(weight if weight.ndim == 2 else weight.diag(), expected, rtol=0, atol=1e-5)


def test_auto_takes_the_best_of_the_judge_and_keeps_what_was_seen(collected):
    layers, asked = Layers(6, (2, 3)), []
    for best in ("none", "diagonal", "hadamard"):
        def judge(variants):
            asked.append([v.about["repair"] for v in variants])
            return [{"repair": name, "ppl": 1.0 + (name != best)} for name in asked[-1]]  # noqa: B023

        given = Calibration(64, collected[1], judge=judge)
        fit, alone = REPAIRS["auto"].fit(given, layers), REPAIRS[best].fit(given, layers)
        assert fit.repair == best and fit.header["auto"] == judge(REPAIRS[name].fit(given, layers).variant(layers)
                                                                  for name in asked[-1])
        assert fit.tensors.keys() == alone.tensors.keys()
        assert all(torch.equal(fit.tensors[name], alone.tensors[name]) for name in alone.tensors)
    assert asked == 6 * [["none", "diagonal", "hadamard"]]


def test_trained_repairs_cannot_be_fitted():
    for name, found in REPAIRS.items():
        if not found.closed_form:
            with pytest.raises(TypeError, match=f"{name} is trained"):
                found.fit(Calibration(64), Layers(6, (2,)))


@pytest.mark.parametrize("name", [name for name, found in REPAIRS.items() if found.closed_form])
def test_every_fitted_repair_is_evaluated_and_saved_and_trained(name, script, folders, tmp_path, text):
    found, patch = REPAIRS[name], tmp_path / "patch.safetensors"
    prune(script, folders("llama"), tmp_path, text, "--layers", "1,3-4")
    more = ("--save-model", tmp_path / "m") if found.is_matrix else ()
    code, printed, err = calibrate(script, folders("llama"), tmp_path, text, "--repair", name, "--rank", 8, *more)
    assert code == 0 and printed.count("repair ") >= 2, err
    assert ppl(script, folders("llama"), tmp_path, text, "--patch", f"it={patch}")[0] == 0
    about = read_header(patch, "patch")["about"]
    assert rows(tmp_path)["it"]["about"] == about and about["stage"] == "calibrated"
    code, _, err = script("distill", "--model", folders("llama"), "--patch", patch, "--train-data", text,
                          "--train-samples", 2, "--val-samples", 1, "--seq-len", 32, "--out",
                          tmp_path / "ft.safetensors")
    assert code == (0 if found.is_matrix else 2), err
    if found.is_matrix:
        assert ppl(script, tmp_path / "m", tmp_path / "own", text)[0] == 0
        assert rows(tmp_path / "own")["dense"]["ppl"] == pytest.approx(rows(tmp_path)["it"]["ppl"], rel=1e-5)
        assert origin(tmp_path / "m")["about"] == about


def test_a_repair_is_one_class(script, folders, tmp_path, text):
    """Registered by the decorator, it is in --help and works in calibrate.py, eval_ppl.py, distill.py and folders."""
    try:
        @repair("toy", "one number for all channels")
        class Toy(Repair):
            reads = "l1_raw"

            def fit_run(self, given, start, end, number):
                sizes = getattr(given.stats, self.reads).double().sum((0, 2))
                return {"d": (sizes[end] / sizes[start]).expand(given.size)}

        assert "toy one number for all channels" in " ".join(script("calibrate", "--help")[1].split())
        prune(script, folders("llama"), tmp_path, text, "--layers", "2-3")
        code, printed, err = calibrate(script, folders("llama"), tmp_path, text, "--repair", "toy", "--save-model",
                                       tmp_path / "m")
        assert code == 0 and "repair toy" in printed, err
        header, tensors = read_tensors(tmp_path / "patch.safetensors", "patch")
        about = {"metric": "list", "n": 2, "repair": "toy", "stage": "calibrated"}
        windows = calibration_windows(str(text), tok_nobos(), 4, 32).ids
        sizes = plain_states(tiny(), windows).abs().sum((1, 2, 3))
        torch.testing.assert_close(tensors["run0.d"].double(), (sizes[4] / sizes[2]).expand(64), rtol=1e-5, atol=0)
        assert header["about"] == about == origin(tmp_path / "m")["about"]
        assert header["recipe"]["repair"] == "toy" and "hadamard_order" not in header
        assert ppl(script, folders("llama"), tmp_path, text, "--patch", f"toy={tmp_path}/patch.safetensors")[0] == 0
        assert ppl(script, tmp_path / "m", tmp_path / "own", text)[0] == 0
        row, own = rows(tmp_path)["toy"], rows(tmp_path / "own")["dense"]
        assert row["about"] == own["about"] == about and row["ppl"] == pytest.approx(own["ppl"], rel=1e-6)
        one = variant("toy", (2, 3), {4: LinearPatch(tensors["run0.d"])})
        tokens = torch.tensor([4 + int(word[1:]) for word in text.read_text().split()])[:93 * 32].view(93, 32)
        expected = window_losses(Decoder(tiny()), [one], tokens, progress=False).mean().item()
        assert row["nll_mean"] == pytest.approx(expected, rel=1e-5)
        code, _, err = script("distill", "--model", folders("llama"), "--patch", tmp_path / "patch.safetensors",
                              "--train-data", text, "--train-samples", 2, "--val-samples", 1, "--seq-len", 32, "--out",
                              tmp_path / "ft.safetensors")
        assert code == 0, err
        assert read_header(tmp_path / "ft.safetensors", "patch")["about"] == {**about, "stage": "distilled"}
    finally:
        REPAIRS.pop("toy", None)
    code, _, err = ppl(script, folders("llama"), tmp_path, text, "--patch", f"new={tmp_path}/patch.safetensors")
    assert code == 2 and "repair toy is unknown here" in err
