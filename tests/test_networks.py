"""What is trained in the place of a run: parametrisations of the patch, and LLM-Streamline's networks."""

import pytest
import torch

from tests.tiny import tiny
from utils.decoder import Decoder
from utils.errors import UserError
from utils.networks import SwiGLU, TrainablePatch

START = torch.eye(64) + torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) / 40


@pytest.mark.parametrize("trainable, free", [("full", 4096), ("symmetric", 4096), ("diagonal-hadamard", 64),
                                             ("diagonal", 64), ("low-rank:3", 384)])
def test_parametrisations_start_where_they_should_and_export_what_they_compute(trainable, free):
    symmetric = (START + START.T) / 2
    patch = TrainablePatch(symmetric, trainable)
    assert sum(p.numel() for p in patch.parameters()) == free
    x = torch.randn(3, 5, 64)
    if trainable in ("full", "symmetric", "low-rank:3"):
        torch.testing.assert_close(patch(x), x @ symmetric, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for parameter in patch.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    matrix = patch.matrix()
    torch.testing.assert_close(patch(x), x * matrix if matrix.ndim == 1 else x @ matrix, rtol=1e-4, atol=1e-4)


def test_unknown_parametrisation():
    with pytest.raises(UserError, match="--trainable low-rank:0"):
        TrainablePatch(START, "low-rank:0")


def test_the_ffn_is_the_models_own_mlp_without_a_residual():
    decoder = Decoder(tiny())
    mlp = decoder.layers[2].mlp
    net = SwiGLU(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, "silu")
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(net(x), mlp(x), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in net.parameters()) == 3 * 64 * 128
