"""Repairs: d, P and the patch file; what each repair says of itself."""

import pytest
import torch

from tests.tiny import ids, patch_of, plain_states, tiny
from utils.activations import collect
from utils.decoder import Decoder
from utils.errors import WorkError
from utils.hadamard import rotation
from utils.repairs import scale_stderr, scale_vector


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
