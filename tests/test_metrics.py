"""Metrics against plain computations, what they keep, and prune.py with each of them; a metric is one function."""

import json
import sys
import weakref

import pytest
import torch

from tests.steps import CALIB, prune
from tests.tiny import FAMILIES, ids, patch_of, plain_states, tiny, token_text, variant
from tests.tokenizers_for_tests import tok_nobos
from utils.activations import Stats, collect
from utils.data.windows import calibration_windows, describe
from utils.decoder import Decoder, run_variants
from utils.errors import UserError
from utils.hadamard import rotation
from utils.metrics import (METRICS, Evidence, choose, last, protected_layers, lowest, magnitude, metric, taylor_scores,
                           uniform)
from utils.repairs import scale_vector

WINDOWS = ids(5, 24, seed=3)


def select(stats, name, n_prune, protect_first=None, protect_last=None):
    return choose(name, Evidence(6, lambda: stats), n_prune, protect_first, protect_last)


def stats_with(cosine, layers=6):
    table = torch.as_tensor(cosine, dtype=torch.float32)
    empty = torch.zeros(1, layers + 1, 4)
    angle = torch.arccos(table.clamp(-1, 1))[None] / torch.pi
    return Stats(empty, empty, table[None], table[None], angle, angle, torch.tensor([5]))


def collected(no_ops):
    return collect(Decoder(tiny(no_ops=no_ops)), ids(), rotation(64), progress=False)


@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if metric.reads == "stats"])
def test_a_no_op_block_is_chosen(metric):
    selection = select(collected((2, 3)), metric, 2)
    assert selection.layers.removed == (2, 3)


def test_protected_layers_are_never_chosen():
    stats = collected((4, 5))
    assert select(stats, "cosine", 2).layers.removed != (4, 5)  # default range 1 <= start <= L-n-1
    assert select(stats, "cosine", 2, protect_last=0).layers.removed == (4, 5)
    assert select(stats, "shortgpt", 2).layers.removed == (4, 5)
    assert select(collected((2, 3)), "cosine", 2, protect_first=3).layers.removed[0] >= 3
    with pytest.raises(UserError, match="only 1 of 6"):
        select(stats, "cosine", 2, protect_first=3, protect_last=2)


def test_every_candidate_has_a_score_and_ties_go_to_the_first():
    selection = select(stats_with(torch.ones(7, 7)), "cosine", 2)
    assert [(c["start"], c["end"]) for c in selection.scores] == [(1, 3), (2, 4), (3, 5)]
    assert selection.layers.removed == (1, 2)


def test_negative_cosines_still_have_a_best():
    table = -torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) - 0.1
    table[3, 5] = -0.01
    assert select(stats_with(table), "cosine", 2).layers.removed == (3, 4)


def test_shortgpt_is_not_contiguous_and_keeps_its_order():
    table = torch.zeros(7, 7)
    for layer, value in enumerate([0.1, 0.9, 0.2, 0.95, 0.3, 0.99]):
        table[layer, layer + 1] = value
    selection = select(stats_with(table), "shortgpt", 3)
    assert selection.order == (5, 3, 1) and selection.layers.removed == (1, 3, 5)
    assert selection.layers.runs == [(1, 2), (3, 4), (5, 6)]


def test_one_layer_by_cosine_is_one_layer_by_block_influence():
    stats = collected(())
    assert select(stats, "cosine", 1, 0, 0).layers.removed == select(stats, "shortgpt", 1).layers.removed


def full_backward(model, windows):
    """Taylor scores from one backward pass through the whole model at once, float64."""
    model = model.double().requires_grad_(True)
    logits = model(windows, use_cache=False).logits[:, :-1].reshape(-1, 128)
    torch.nn.functional.cross_entropy(logits, windows[:, 1:].reshape(-1)).backward()
    return [sum((p * p.grad).abs().sum().item() for name, p in layer.named_parameters() if not name.endswith("bias"))
            for layer in model.model.layers]


# ----- taylor


@pytest.mark.parametrize("family", FAMILIES)
def test_taylor_equals_a_full_backward(family):
    expected = full_backward(tiny(family), WINDOWS)
    for batch_size in (1, 2, 5):
        found = taylor_scores(Decoder(tiny(family)), WINDOWS, batch_size, progress=False)
        assert found == pytest.approx(expected, rel=1e-5)


def test_taylor_sums_batches_inside_the_absolute_value():
    apart = sum(torch.tensor(taylor_scores(Decoder(tiny()), window[None], progress=False)) for window in WINDOWS) / 5
    together = torch.tensor(taylor_scores(Decoder(tiny()), WINDOWS, progress=False))
    assert (together < 0.95 * apart).all()


def test_taylor_does_not_depend_on_the_order_of_windows():
    found = [taylor_scores(Decoder(tiny()), windows, 2, progress=False) for windows in (WINDOWS, WINDOWS.flip(0))]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_taylor_follows_the_scale_of_the_loss(monkeypatch):
    plain = taylor_scores(Decoder(tiny()), WINDOWS, progress=False)
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr("utils.gradients.nn.functional.cross_entropy", lambda *a, **k: 8 * real(*a, **k))
    assert taylor_scores(Decoder(tiny()), WINDOWS, progress=False) == pytest.approx([8 * s for s in plain], rel=1e-6)


def test_a_layer_without_effect_has_no_taylor_score():
    scores = taylor_scores(Decoder(tiny(no_ops=(1, 3))), WINDOWS, progress=False)
    assert scores[1] == scores[3] == 0 and all(scores[layer] > 0 for layer in (0, 2, 4, 5))


def test_taylor_in_half_precision_adds_up_in_float32():
    windows = ids(12, 24, seed=5)
    expected = full_backward(tiny(), windows)
    found = taylor_scores(Decoder(tiny().bfloat16()), windows, progress=False)
    assert found == pytest.approx(expected, rel=0.05)


def test_taylor_leaves_no_gradients_behind():
    decoder = Decoder(tiny())
    taylor_scores(decoder, WINDOWS, progress=False)
    assert all(not p.requires_grad and p.grad is None for p in decoder.model.parameters())


def test_taylor_keeps_one_layer_of_gradients(monkeypatch):
    decoder, made, alive = Decoder(tiny()), [], []
    zeros, run = torch.zeros_like, decoder.layer

    def tracked(*args, **kwargs):
        made.append(weakref.ref(tensor := zeros(*args, **kwargs)))
        return tensor

    def counting(batch, index, hidden):
        if hidden.requires_grad:
            alive.append(sum(ref() is not None and ref().ndim == 2 for ref in made))
        return run(batch, index, hidden)

    monkeypatch.setattr("utils.gradients.torch.zeros_like", tracked)
    monkeypatch.setattr(decoder, "layer", counting)
    taylor_scores(decoder, WINDOWS, 5, progress=False)
    assert alive == [7] * 6  # the matrices of one layer


# ----- weights, chance, depth


def test_magnitudes_are_sums_of_absolute_weights():
    model = tiny("qwen2")
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            for name, p in layer.named_parameters():
                p.fill_(7.0 if name.endswith("bias") else -(index + 1.0))
    counts = sum(p.numel() for name, p in model.model.layers[0].named_parameters() if not name.endswith("bias"))
    assert magnitude(Evidence(6, decoder=lambda: Decoder(model))) == [counts * (index + 1.0) for index in range(6)]


def test_random_layers_are_seeded_nested_and_fair():
    orders = {seed: lowest(uniform(Evidence(12, seed=seed)), 10, 1, 1).order for seed in range(200)}
    assert orders[3] == lowest(uniform(Evidence(12, seed=3)), 10, 1, 1).order and len(set(orders.values())) > 190
    assert lowest(uniform(Evidence(12, seed=3)), 4, 1, 1).order == orders[3][:4]
    assert sorted(orders[3]) == list(range(1, 11))
    first = [order[0] for order in orders.values()]
    assert all(5 <= first.count(layer) <= 40 for layer in range(1, 11))


def test_last_takes_the_deepest_layers_but_the_last():
    assert lowest(last(Evidence(8)), 3, 0, 1).order == (6, 5, 4)


# raw Taylor orders of LLaMA-2-7B and Llama-3-8B that the authors of Shortened LLaMA published
LLAMA2 = [0, 28, 27, 25, 29, 26, 24, 23, 21, 22, 30, 20, 19, 18, 17, 14, 16, 13, 12, 15, 31, 11,
          10, 1, 9, 8, 7, 6, 5, 2, 4, 3]
LLAMA3 = [24, 25, 26, 28, 29, 23, 27, 22, 20, 19, 21, 30, 18, 17, 16, 13, 14, 15, 12, 11, 10,
          9, 8, 7, 6, 5, 31, 4, 3, 0, 2, 1]


@pytest.mark.parametrize("raw, table", [(LLAMA2, [28, 27, 25, 29, 26, 24, 23, 21, 22]),
                                        (LLAMA3, [24, 25, 26, 28, 29, 23, 27])])
def test_protection_gives_the_rows_of_table_7(raw, table):
    first, last = protected_layers("taylor+", len(table), 32)
    assert (first, last) == (4, 2)
    scores = [float(raw.index(layer)) for layer in range(32)]
    assert lowest(scores, len(table), first, last).order == tuple(table)
    assert lowest(scores, 3, *protected_layers("taylor", 3, 32)).order == tuple(raw[:3])


# ----- the registry


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_says_what_it_is(name):
    found = METRICS[name]
    assert found.name == name and found.help and found.function.__doc__
    assert found.gives in ("block", "layer", "set")
    assert found.reads in ("stats", "windows", "weights", "seed", "nothing")
    assert {"calib_samples", "seq_len", "seed"} == set(found.calibration) and len(found.protect) == 2


def test_help_lists_every_metric_with_what_it_says(script):
    out = "".join(script("prune", "--help")[1].split())  # lines may end at a hyphen
    for name, found in METRICS.items():
        for text in (f"{name} {found.help}", f"{name} {found.protect[0]}"):
            assert "".join(text.split()) in out, text


def test_evidence_is_had_once_and_only_when_asked_for():
    calls = []
    evidence = Evidence(6, lambda: calls.append("stats") or collected(()), None, None)
    for n in (3, 2, 1):
        choose("cosine", evidence, n)
        choose("shortgpt", evidence, n)
        choose("last", evidence, n)
    assert calls == ["stats"]
    assert choose("cosine", Evidence(6), 0).layers.removed == ()


def test_a_metric_is_one_function(script, folders, tmp_path, text, monkeypatch):
    """Registered by the decorator, it is in --help and works through prune.py; for several n as for each alone."""
    monkeypatch.delitem(sys.modules, "prune", raising=False)  # as in a new process
    calls = []
    try:
        @metric("toy", "mean size of what a layer writes", protect=(1, 0))
        def toy(evidence):
            """Mean of |X^(j+1)| over all tokens and channels."""
            calls.append(evidence.depth)
            return evidence.stats.l1_raw.double().sum((0, 2))[1:].tolist()

        assert "toy mean size of what a layer writes" in " ".join(script("prune", "--help")[1].split())
        code, printed, err = prune(script, folders("llama"), tmp_path, text, "--metric", "toy", "--n-prune", 2)
        assert code == 0 and "toy layer" in printed, err
        content = json.loads((tmp_path / "selection.json").read_text())
        windows = calibration_windows(str(text), tok_nobos(), 4, 32).ids
        sizes = plain_states(tiny(), windows).abs().sum((1, 2, 3))[1:].tolist()
        order = sorted(range(1, 6), key=sizes.__getitem__)[:2]
        assert content["order"] == order and content["removed"] == sorted(order)
        assert content["about"] == {"metric": "toy", "n": 2, "repair": "none", "stage": "pruned"}
        assert [row["score"] for row in content["scores"]] == pytest.approx(sizes[1:], rel=1e-5)
        assert "reused" in prune(script, folders("llama"), tmp_path, text, "--metric", "toy", "--n-prune", 2)[1]
        before = len(calls)
        code, _, err = script("prune", "--model", folders("llama"), "--calib-data", text, *CALIB, "--metric", "toy",
                              "--n-prune", 1, 2, "--out", tmp_path / "n{n}" / "selection.json")
        assert code == 0 and len(calls) == before + 1, err  # once for all n
        assert json.loads((tmp_path / "n2" / "selection.json").read_text())["scores"] == content["scores"]
    finally:
        METRICS.pop("toy", None)


# ----- the script


@pytest.mark.parametrize("metric", [name for name in METRICS if name not in ("random", "last")])
def test_every_metric_finds_the_layers_without_effect(metric, script, folders, tmp_path, text):
    code, _, err = prune(script, folders("no-ops"), tmp_path, text, "--n-prune", 2, "--metric", metric,
                         "--protect-first", 1, "--protect-last", 1)
    assert code == 0, err
    content = json.loads((tmp_path / "selection.json").read_text())
    assert content["removed"] == [2, 3] and content["scores"]
    assert content["about"] == {"metric": metric, "n": 2, "repair": "none", "stage": "pruned"}
    assert sorted(content["order"]) == [2, 3]


NESTED = ["shortgpt", "sleb", "taylor", "ppl", "mag", "random", "last"]


@pytest.mark.parametrize("metric", NESTED)
def test_smaller_selections_are_prefixes(metric, script, folders, tmp_path, text):
    orders = []
    for n in (1, 2, 4):
        code, _, err = prune(script, folders("llama"), tmp_path / str(n), text, "--n-prune", n, "--metric", metric)
        assert code == 0, err
        content = json.loads((tmp_path / str(n) / "selection.json").read_text())
        orders.append(content["order"])
        assert sorted(content["order"]) == content["removed"] and len(content["removed"]) == n
    assert orders[2][:2] == orders[1] and orders[1][:1] == orders[0]


@pytest.mark.parametrize("metric, most", [("sleb", 4), ("taylor", 6), ("taylor+", 0), ("ppl+", 0), ("mag", 6),
                                          ("random", 4), ("last", 5), ("cosine", 4)])
def test_more_layers_than_a_metric_may_remove(metric, most, script, folders, tmp_path, text):
    for n, flags in ((most + 1, ()), (5, ("--protect-first", 1, "--protect-last", 1))):
        code, _, err = prune(script, folders("llama"), tmp_path, text, "--n-prune", n, "--metric", metric, *flags)
        assert code == 2 and f"--n-prune {n}" in err and len(err.strip().splitlines()) <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("metric", list(METRICS))
def test_nothing_to_remove_needs_no_work(metric, script, folders, tmp_path, text, monkeypatch):
    monkeypatch.setattr("utils.session.load_decoder", None)
    code, out, _ = prune(script, folders("llama"), tmp_path, text, "--n-prune", 0, "--metric", metric)
    assert code == 0 and "0 of 6 layers removed" in out


def prune_without_sizes(script, folder, out, text, *more):
    return script("prune", "--model", folder, "--calib-data", text, "--n-prune", 1, "--out", out / "selection.json",
                  *more)


def test_published_calibration_is_the_default_of_taylor_and_ppl_only(script, folders, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text(token_text(4000))
    for metric, expected in (("ppl", (10, 128, 1234)), ("taylor", (10, 128, 1234)), ("sleb", (3, 40, 0))):
        given = () if expected[0] == 10 else ("--calib-samples", 3, "--seq-len", 40)
        code, _, err = prune_without_sizes(script, folders("llama"), tmp_path / metric, long, "--metric", metric,
                                           *given)
        assert code == 0, err
        info = json.loads((tmp_path / metric / "selection.json").read_text())["calibration"]
        assert (info["windows"], info["seq_len"], info["seed"]) == expected
    assert "--calib-samples 10 --seq-len 128 --seed 1234" in script("prune", "--help")[1]  # a line of its own


def test_metrics_without_data_read_none_and_last_and_random_load_no_weights(script, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("utils.session.calibration_windows", None)
    assert prune(script, folders("llama"), tmp_path / "mag", "nowhere.txt", "--n-prune", 2, "--metric", "mag")[0] == 0
    monkeypatch.setattr("utils.session.load_decoder", None)
    for metric, removed in (("last", [3, 4]), ("random", None)):
        code, _, err = prune(script, folders("llama"), tmp_path / metric, "nowhere.txt", "--n-prune", 2, "--metric",
                             metric)
        assert code == 0, err
        found = json.loads((tmp_path / metric / "selection.json").read_text())
        assert found["calibration"] is None and removed in (None, found["removed"])
    code, out, _ = prune(script, folders("llama"), tmp_path / "mag", "nowhere.txt", "--n-prune", 2, "--metric", "mag")
    assert code == 0 and "reused" in out
    path = tmp_path / "mag" / "selection.json"
    for edit, message in (({"removed": [0, 1]}, "edited"), ({"order": "0,1"}, "damaged")):
        path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
        result = prune(script, folders("llama"), tmp_path / "mag", "nowhere.txt", "--n-prune", 2, "--metric", "mag")
        assert result[0] == 2 and message in result[2]


# ----- calibration as SLEB's released loader takes it


def lines_file(path, count=200):
    path.write_text("\n".join(f"w{i % 124} w{i * 7 % 124} w{i * 5 % 124}" for i in range(count)) + "\n")
    return path


def test_random_lines_are_those_of_a_shuffled_data_set(tmp_path):
    from datasets import Dataset
    path = lines_file(tmp_path / "lines.txt")
    lines = path.read_text().splitlines(keepends=True)
    chosen = Dataset.from_dict({"text": lines}).shuffle(seed=7)[:50]["text"]
    tokens = [4 + int(word[1:]) for word in "\n\n".join(chosen).split()]
    windows = calibration_windows(str(path), tok_nobos(), 50, 32, seed=7, sampling="sleb-lines")
    assert windows.ids.flatten().tolist() == tokens[:4 * 32] and windows.ids.shape == (4, 32)
    assert (windows.info["windows"], windows.info["dropped_tokens"], windows.info["seed"]) == (4, 22, 7)
    assert "50 random lines (seed 7)" in describe(windows.info) and "windows=4" in describe(windows.info)


@pytest.mark.parametrize("samples, length, part, message", [
    (300, 32, "train", "200 lines, 300 asked for"), (3, 32, "train", "have 9 tokens"),
    (50, 32, "validation", "validation")])
def test_lines_that_are_not_there(samples, length, part, message, tmp_path):
    with pytest.raises(UserError, match=message):
        calibration_windows(str(lines_file(tmp_path / "lines.txt")), tok_nobos(), samples, length,
                            sampling="sleb-lines", part=part)


def test_random_lines_are_for_metrics_that_read_windows(script, folders, tmp_path):
    path = lines_file(tmp_path / "lines.txt")
    for metric in ("sleb", "taylor", "ppl"):
        code, _, err = prune(script, folders("llama"), tmp_path / metric, path, "--metric", metric, "--n-prune", 1,
                             "--calib-sampling", "sleb-lines", "--calib-samples", 50)
        assert code == 0, err
        assert json.loads((tmp_path / metric / "selection.json").read_text())["calibration"]["windows"] == 4
    for metric in ("cosine", "mag", "random"):
        code, _, err = prune(script, folders("llama"), tmp_path / metric, path, "--metric", metric, "--n-prune", 1,
                             "--calib-sampling", "sleb-lines")
        assert code == 2 and "sleb-lines" in err and not (tmp_path / metric).exists()


# ----- patches of separate layers


def test_one_patch_a_layer_is_one_patch_a_run():
    """Adjacent patches share their eigenbasis, so the states of the two patched models are the same."""
    decoder = Decoder(tiny())
    stats = collect(decoder, WINDOWS, rotation(64), progress=False)
    runs = variant("runs", (1, 3, 4), {end: patch_of("hadamard", scale_vector(stats.l1_rotated, start, end))
                                       for start, end in ((1, 2), (3, 5))})
    layers = {layer: patch_of("hadamard", scale_vector(stats.l1_rotated, layer, layer + 1))
              for layer in (1, 3, 4)}
    states = {}
    batch = decoder.inputs(WINDOWS)
    run_variants(decoder, batch, [runs], lambda index, hidden: states.update(runs=hidden))
    hidden = batch.hidden
    for layer in range(6):
        hidden = layers[layer](hidden) if layer in layers else decoder.layer(batch, layer, hidden)
    torch.testing.assert_close(states["runs"], hidden, rtol=1e-4, atol=1e-4)
