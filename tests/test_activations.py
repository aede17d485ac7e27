"""The one-pass collector against a plain computation, and sigma_d."""

import pytest
import torch

from tests.artifacts import identity
from tests.tiny import FAMILIES, ids, plain_states, tiny
from utils.activations import MOMENTS, Stats, collect, collect_moments, token_scaling_spread
from utils.decoder import Decoder
from utils.errors import UserError, WorkError
from utils.hadamard import rotation


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi"])
def test_statistics_equal_a_plain_computation(family):
    model, input_ids = tiny(family), ids(4)
    stats = collect(Decoder(model), input_ids, rotation(64), batch_size=2, progress=False)
    states = plain_states(model, input_ids)
    dense = rotation(64).matrix()
    unit = states / states.norm(dim=-1, keepdim=True)
    cosines = torch.einsum("lbtc,mbtc->btlm", unit, unit)
    over_time = states / states.norm(dim=2, keepdim=True)
    torch.testing.assert_close(stats.l1_raw.double(), states.abs().sum(2).transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.l1_rotated.double(), (states @ dense).abs().sum(2).transpose(0, 1), rtol=1e-5,
                               atol=1e-5)
    torch.testing.assert_close(stats.cosine.double(), cosines.mean(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(stats.cosine_sequence.double(),
                               torch.einsum("lbtc,mbtc->blm", over_time, over_time) / 64, rtol=0, atol=1e-6)
    angles = torch.arccos(cosines.clamp(-1, 1)) / torch.pi
    off_diagonal = ~torch.eye(7, dtype=torch.bool)
    for name, expected in (("angle_all", angles.mean(1)), ("angle_last", angles[:, -1])):
        torch.testing.assert_close(getattr(stats, name).double()[:, off_diagonal], expected[:, off_diagonal], rtol=0,
                                   atol=1e-5)
    assert stats.tokens.tolist() == [17] * 4


@pytest.mark.parametrize("batch_size", [2, 3, 4])
def test_batch_size_changes_nothing(batch_size):
    decoder = Decoder(tiny("gemma3"))
    one, many = (collect(decoder, ids(4), rotation(64), batch_size=b, progress=False) for b in (1, batch_size))
    for name in vars(one):
        torch.testing.assert_close(getattr(one, name), getattr(many, name), rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing():
    decoder, short = Decoder(tiny()), ids(2, 12)
    padded = torch.cat([short, torch.zeros(2, 5, dtype=torch.long)], 1)
    mask = torch.cat([torch.ones(2, 12, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)], 1)
    plain = collect(decoder, short, rotation(64), progress=False)
    masked = collect(decoder, padded, rotation(64), batch_size=2, attention_mask=mask, progress=False)
    for name in vars(plain):
        torch.testing.assert_close(getattr(plain, name), getattr(masked, name), rtol=1e-5, atol=1e-5)


def test_a_no_op_block_has_cosine_one_and_angle_zero():
    stats = collect(Decoder(tiny(no_ops=(2, 3))), ids(), rotation(64), progress=False)
    assert stats.mean("cosine")[2, 4] == pytest.approx(1, abs=1e-6)
    for name in ("angle_all", "angle_last"):
        table = stats.mean(name)
        assert not table.isnan().any() and table[2, 4] < 1e-3 < table[1, 3]


def test_the_axes_of_the_cosine_differ():
    """Channels constant in time: cosine 1 along time, below 1 along channels."""
    states = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).abs().expand(2, 9, 64)
    from utils.activations import _channel_cosines, _token_cosines
    assert _channel_cosines(states)[0, 1] == pytest.approx(1, abs=1e-6)
    assert _token_cosines(states).mean(0)[0, 1] < 0.9


def test_sigma_d_is_the_mean_standard_deviation_of_token_ratios():
    model, input_ids = tiny(), ids(3)
    rows = token_scaling_spread(Decoder(model), input_ids, [(2, 4), (1, 6)], rotation(64), progress=False)
    states, dense = plain_states(model, input_ids), rotation(64).matrix()
    for row, (start, end) in zip(rows, [(2, 4), (1, 6)]):
        for suffix, change in (("", torch.eye(64).double()), ("_rotated", dense)):
            ratio = (states[end] @ change).abs() / (states[start] @ change).abs()
            assert row["sigma_d" + suffix] == pytest.approx(ratio.std(1).mean().item(), rel=1e-3)
            assert row["log_sigma_d" + suffix] == pytest.approx(ratio.log().std(1).mean().item(), rel=1e-3)


def test_sigma_d_leaves_zero_denominators_out():
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] = 0  # X^(0) has a silent channel
    row, = token_scaling_spread(Decoder(model), ids(), [(0, 2)], rotation(64), progress=False)
    assert all(value == value and value < float("inf") for value in row.values())


def test_stats_file_round_trip_and_wrong_files(tmp_path):
    stats = collect(Decoder(tiny()), ids(), rotation(64), progress=False)
    stats.save(tmp_path / "s.safetensors", {"recipe": {"a": 1}, "model": identity()})
    loaded, header = Stats.load(tmp_path / "s.safetensors")
    assert header["recipe"] == {"a": 1} and torch.equal(loaded.l1_raw, stats.l1_raw)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "s.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cut.safetensors"):
        Stats.load(tmp_path / "cut.safetensors")


def test_non_finite_states_stop_the_pass():
    decoder = Decoder(tiny())
    with torch.no_grad():
        decoder.layers[3].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(WorkError, match="non-finite"):
        collect(decoder, ids(), rotation(64), progress=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_collected(family):
    stats = collect(Decoder(tiny(family)), ids(), rotation(64), progress=False)
    assert stats.l1_raw.shape == stats.l1_rotated.shape == (2, 7, 64)


# ----- second moments


def mlp_outputs(model, input_ids):
    """{l: what layer l adds last, float64 [B, T, C]} by hooks of their own: the MLP's output, or of the norm behind."""
    seen = {}
    handles = [getattr(layer, "post_feedforward_layernorm", layer.mlp).register_forward_hook(
        lambda _m, _a, out, index=index: seen.__setitem__(index, out.double()))
        for index, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        model(input_ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "qwen3", "phi3", "mistral"])
@pytest.mark.parametrize("skip", [0, 1])
def test_moments_equal_a_plain_loop(family, skip):
    model, input_ids = tiny(family), ids(3)
    runs, names = [(2, 4), (1, 6), (0, 2)], list(MOMENTS)
    found = collect_moments(Decoder(model), input_ids, runs, names, batch_size=2, skip_first=bool(skip), progress=False)
    states, mlps = plain_states(model, input_ids)[:, :, skip:].flatten(1, 2), mlp_outputs(model, input_ids)
    for start, end in runs:
        x, y = states[start], states[end]
        expected = {"xx": x.T @ x, "xy": x.T @ y, "yy": y.T @ y}
        if start:
            m = mlps[start - 1][:, skip:].flatten(0, 1)
            expected |= {"mm": m.T @ m, "mr": m.T @ (y - x + m)}
        assert found[start, end].keys() == expected.keys()
        for name, value in expected.items():
            assert found[start, end][name].dtype == torch.float64
            torch.testing.assert_close(found[start, end][name], value, rtol=1e-5, atol=1e-4 * value.abs().max())


def test_moments_of_parts_add_up():
    decoder, input_ids = Decoder(tiny()), ids(5)
    whole, one, two = (collect_moments(decoder, part, [(2, 4)], list(MOMENTS), batch_size=size, progress=False)[2, 4]
                       for part, size in ((input_ids, 4), (input_ids[:2], 1), (input_ids[2:], 3)))
    for name, value in whole.items():  # up to the model's own rounding, which depends on the batch
        torch.testing.assert_close(one[name] + two[name], value, rtol=1e-5, atol=1e-6 * value.abs().max())


def test_moments_of_an_mlp_that_is_added_with_the_attention_are_refused():
    decoder = Decoder(tiny("phi"))
    assert decoder.mlps == [None] * 6
    collect_moments(decoder, ids(), [(2, 4)], ["xx"], progress=False)
    with pytest.raises(UserError, match="layer 1 adds its MLP .* together with its attention"):
        collect_moments(decoder, ids(), [(2, 4)], ["mm"], progress=False)


def test_non_finite_moments_stop():
    decoder = Decoder(tiny())
    with torch.no_grad():
        decoder.layers[3].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(WorkError, match=r"non-finite moments of run \[2, 4\)"):
        collect_moments(decoder, ids(), [(2, 4)], ["xy"], progress=False)
