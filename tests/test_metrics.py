"""Metrics by loss, gradients and weights against plain computations: whole models without the layers, full backward."""

import json
import weakref

import pytest
import torch

from tests.steps import prune
from tests.tiny import FAMILIES, ids, tiny, token_text
from tests.tokenizers_for_tests import tok_nobos
from utils import search as removal
from utils.activations import collect
from utils.data.windows import calibration_windows, describe
from utils.errors import UserError, WorkError
from utils.hadamard import rotation
from utils.decoder import Decoder
from utils.patch import patch_module, scale_vector
from utils.search import greedy, removal_losses
from utils.selection import METRICS, distances_from_end, legal_range, magnitudes, one_shot, random_scores
from utils.taylor import taylor_scores
from utils.variants import Variant, run_variants

WINDOWS = ids(5, 24, seed=3)


def whole_loss(make, removed, windows):
    """Mean loss of all next tokens by the whole model's own forward with layers taken out of its list, float64 sums."""
    model = make()
    model.model.layers = torch.nn.ModuleList(
        layer for index, layer in enumerate(model.model.layers) if index not in removed)
    model.config.num_hidden_layers = len(model.model.layers)
    with torch.no_grad():
        logits = model(windows, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return losses.double().mean().item()


def plain_sleb(make, windows, n, layers, first=1, last=1):
    """[(removed layer, {candidate: loss})] of the greedy loop, every candidate run whole."""
    removed, rounds = [], []
    for _ in range(n):
        alive = [layer for layer in range(layers) if layer not in removed]
        losses = {layer: whole_loss(make, [*removed, layer], windows) for layer in alive[first:len(alive) - last]}
        best = min(losses, key=lambda layer: (losses[layer], layer))
        rounds.append((best, losses))
        removed.append(best)
    return rounds


def full_backward(model, windows):
    """Taylor scores from one backward pass through the whole model at once, float64."""
    model = model.double().requires_grad_(True)
    logits = model(windows, use_cache=False).logits[:, :-1].reshape(-1, 128)
    torch.nn.functional.cross_entropy(logits, windows[:, 1:].reshape(-1)).backward()
    return [sum((p * p.grad).abs().sum().item() for name, p in layer.named_parameters() if not name.endswith("bias"))
            for layer in model.model.layers]


# ----- sleb and ppl


def test_single_removals_equal_brute_force_and_the_first_step_of_sleb():
    expected = [whole_loss(tiny, [layer], WINDOWS) for layer in range(6)]
    decoder = Decoder(tiny())
    for batch_size in (1, 2):
        found = removal_losses(decoder, WINDOWS, range(6), batch_size, progress=False)
        assert found == pytest.approx(expected, rel=1e-6)
    first = greedy(decoder, WINDOWS, 1, 0, 0, progress=False)
    assert first.order == (min(range(6), key=lambda layer: expected[layer]),)
    assert first.order == one_shot(found, 1, 0, 0).order


CASES = {
    "llama": lambda: tiny(), "other weights": lambda: tiny(seed=1), "tied": lambda: tiny(tie_word_embeddings=True),
    "deep": lambda: tiny(num_hidden_layers=9, initializer_range=0.05), "biased head": lambda: tiny("phi", seed=2),
    "no-ops": lambda: tiny(no_ops=(2, 4)), "sharp": lambda: tiny(initializer_range=1.0),
}


@pytest.mark.parametrize("case, shortlist", [*((case, True) for case in CASES), ("llama", False), ("no-ops", False)])
def test_sleb_equals_the_plain_loop(case, shortlist, monkeypatch):
    make = CASES[case]
    if not shortlist:
        monkeypatch.setattr(removal.Shortlist, "possible", lambda decoder: False)
    decoder = Decoder(make())
    plain = plain_sleb(make, WINDOWS, 4, decoder.num_layers)
    found = greedy(decoder, WINDOWS, 4, progress=False)
    assert found.order == tuple(layer for layer, _ in plain)
    given_up = 0
    for row in found.scores:
        loss = plain[row["round"] - 1][1][row["layer"]]
        if row["complete"]:
            assert row["score"] == pytest.approx(loss, rel=1e-6)
        else:
            given_up += 1
            assert row["score"] <= loss and row["layer"] != found.order[row["round"] - 1]
    assert [sum(row["round"] == r + 1 for row in found.scores) for r in range(4)] == [
        decoder.num_layers - 2 - r for r in range(4)]
    if case == "sharp" and shortlist:
        assert given_up > 0


def test_complete_totals_are_bit_equal_to_a_loop_over_windows():
    decoder = Decoder(tiny())
    found = greedy(decoder, WINDOWS, 2, progress=False)
    for row in found.scores:
        if row["complete"]:
            gone = (*found.order[:row["round"] - 1], row["layer"])
            total = 0.0
            for window in WINDOWS.split(1):
                batch = decoder.inputs(window)
                hidden = removal.run(decoder, batch, [layer for layer in range(6) if layer not in gone], batch.hidden)
                total += decoder.token_nll(hidden, window[:, 1:]).double().sum().item()
            assert row["score"] == total / WINDOWS[:, 1:].numel()


def test_a_hopeless_candidate_is_given_up_early_and_a_bad_lead_does_no_harm(monkeypatch):
    """Window losses made by hand: layer 3 is worst, so that starting with it must still find layer 2."""
    losses = {1: [3.0, 3.0, 3.0], 2: [2.0, 2.0, 2.0], 3: [9.0, 9.0, 9.0], 4: [7.0, 1.0, 1.0]}
    seen = []

    def fake(decoder, batch, alive, candidates):
        for layer in sorted(candidates):
            if layer in candidates:
                yield layer, layer

    monkeypatch.setattr(removal, "without_each", fake)
    monkeypatch.setattr(removal, "run", lambda decoder, batch, layers, hidden: 10 - sum(layers))

    def batch_loss(decoder, layer, ids, look=None):
        seen.append((layer, int(ids)))
        return losses[layer][int(ids)]

    monkeypatch.setattr(removal, "batch_loss", batch_loss)
    monkeypatch.setattr(removal.Shortlist, "possible", lambda decoder: False)

    class Parts:
        num_layers = 6

        def inputs(self, ids):
            return type("Batch", (), {"hidden": None})

    bar = type("Bar", (), {"update": lambda self, n: None})()
    for lead in losses:
        seen.clear()
        race = removal._Race(Parts(), [torch.tensor(i) for i in range(3)], [1, 2, 3, 4], [1, 2, 3, 4], lead, bar)
        assert race.winner() == 2
        rows = {row["layer"]: row for row in race.scores(1, 1)}
        assert rows[2] == {"round": 1, "layer": 2, "score": 6.0, "complete": True, "batches": 3}
        if lead == 2:
            assert rows[3] == {"round": 1, "layer": 3, "score": 9.0, "complete": False, "batches": 1}
            assert (3, 1) not in seen and rows[4]["batches"] == 1


def test_half_precision_takes_no_shortlist():
    """Its products are too coarse for a bound; the result is that of all losses."""
    decoder = Decoder(tiny(initializer_range=0.3).bfloat16())
    assert not removal.Shortlist.possible(decoder) and removal.Shortlist.possible(Decoder(tiny()))
    losses = removal_losses(decoder, WINDOWS, range(1, 5), progress=False)
    found = greedy(decoder, WINDOWS, 1, progress=False)
    assert found.order == (1 + losses.index(min(losses)),)
    assert all(row["score"] == losses[row["layer"] - 1] for row in found.scores if row["complete"])


def test_ties_go_to_the_lower_index():
    make = lambda: tiny(no_ops=(1, 3, 4))  # noqa: E731
    assert greedy(Decoder(make()), WINDOWS, 3, progress=False).order == (1, 3, 4)
    assert one_shot([2.0, 1.0, 1.0, 0.0], 3, 0, 0).order == (3, 1, 2)


def test_removing_a_layer_without_effect_changes_no_bit():
    decoder = Decoder(tiny(no_ops=(2,)))
    batch = decoder.inputs(WINDOWS)
    dense = removal.batch_loss(decoder, removal.run(decoder, batch, range(6), batch.hidden), WINDOWS)
    assert removal_losses(decoder, WINDOWS, [2], 5, progress=False)[0] == dense / WINDOWS[:, 1:].numel()


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2"])  # plain, with a bias, with a soft cap
def test_the_shortlist_is_a_lower_bound_and_close(family):
    decoder = Decoder(tiny(family, initializer_range=0.3))
    batch = decoder.inputs(WINDOWS)
    hidden = removal.run(decoder, batch, range(6), batch.hidden)
    shortlist = removal.Shortlist(decoder, WINDOWS)
    exact = removal.batch_loss(decoder, hidden, WINDOWS, shortlist.look)
    assert shortlist.mass.sum().item() == pytest.approx(WINDOWS[:, 1:].numel(), rel=1e-5)
    bound = shortlist.close().bound(decoder, hidden, shortlist.rows(decoder))
    assert 0 < bound <= exact
    words = shortlist.words.tolist()
    logits = decoder.head_logits(decoder.final_states(hidden[:, :-1])).double().flatten(0, 1)
    expected = (logits[:, words].logsumexp(1) - logits.gather(1, WINDOWS[:, 1:].reshape(-1, 1))[:, 0]).sum().item()
    assert bound == pytest.approx(expected, rel=1e-3)


def test_a_broken_model_has_no_loss():
    model = tiny()
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.weight.fill_(1e38)
    decoder = Decoder(tiny())
    decoder.layers[4].load_state_dict(model.model.layers[4].state_dict())
    with pytest.raises(WorkError, match="non-finite loss"):
        removal_losses(decoder, WINDOWS, [2], progress=False)


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
    assert magnitudes(Decoder(model)) == [counts * (index + 1.0) for index in range(6)]


def test_random_layers_are_seeded_nested_and_fair():
    orders = {seed: one_shot(random_scores(12, seed), 10, 1, 1).order for seed in range(200)}
    assert orders[3] == one_shot(random_scores(12, 3), 10, 1, 1).order and len(set(orders.values())) > 190
    assert one_shot(random_scores(12, 3), 4, 1, 1).order == orders[3][:4]
    assert sorted(orders[3]) == list(range(1, 11))
    first = [order[0] for order in orders.values()]
    assert all(5 <= first.count(layer) <= 40 for layer in range(1, 11))


def test_last_takes_the_deepest_layers_but_the_last():
    assert one_shot(distances_from_end(8), 3, 0, 1).order == (6, 5, 4)


# raw Taylor orders of LLaMA-2-7B and Llama-3-8B that the authors of Shortened LLaMA published
LLAMA2 = [0, 28, 27, 25, 29, 26, 24, 23, 21, 22, 30, 20, 19, 18, 17, 14, 16, 13, 12, 15, 31, 11,
          10, 1, 9, 8, 7, 6, 5, 2, 4, 3]
LLAMA3 = [24, 25, 26, 28, 29, 23, 27, 22, 20, 19, 21, 30, 18, 17, 16, 13, 14, 15, 12, 11, 10,
          9, 8, 7, 6, 5, 31, 4, 3, 0, 2, 1]


@pytest.mark.parametrize("raw, table", [(LLAMA2, [28, 27, 25, 29, 26, 24, 23, 21, 22]),
                                        (LLAMA3, [24, 25, 26, 28, 29, 23, 27])])
def test_protection_gives_the_rows_of_table_7(raw, table):
    first, last = legal_range("taylor+", len(table), 32)
    assert (first, last) == (4, 2)
    scores = [float(raw.index(layer)) for layer in range(32)]
    assert one_shot(scores, len(table), first, last).order == tuple(table)
    assert one_shot(scores, 3, *legal_range("taylor", 3, 32)).order == tuple(raw[:3])


# ----- the script


@pytest.mark.parametrize("metric", [name for name in METRICS if name not in ("random", "last")])
def test_every_metric_finds_the_layers_without_effect(metric, script, folders, tmp_path, text):
    code, _, err = prune(script, folders("no-ops"), tmp_path, text, "--n-prune", 2, "--metric", metric,
                         "--protect-first", 1, "--protect-last", 1)
    assert code == 0, err
    content = json.loads((tmp_path / "selection.json").read_text())
    assert content["removed"] == [2, 3] and content["metric"] == metric and content["scores"]
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
    assert "--seq-len 128 --seed 1234" in " ".join(script("prune", "--help")[1].split())


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


def kill_in_round(number, monkeypatch):
    """Interrupts the search once, in that round; returns the list of all rounds begun."""
    real, raced = removal._Race.winner, []

    def winner(self):
        raced.append(self)
        if len(raced) == number:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(removal._Race, "winner", winner)
    return raced


def test_a_killed_search_goes_on_to_the_same_selection(script, folders, tmp_path, text, monkeypatch):
    def call(name, *more):
        return prune(script, folders("llama"), tmp_path / name, text, "--n-prune", 4, "--metric", "sleb", *more)

    assert call("whole")[0] == 0
    whole = json.loads((tmp_path / "whole" / "selection.json").read_text())
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["selection.json"]
    raced = kill_in_round(3, monkeypatch)
    code, _, err = call("parts")
    assert code == 130 and [path.name for path in (tmp_path / "parts").iterdir()] == ["selection.progress.json"]
    code, out, err = call("parts")
    assert code == 0 and len(raced) == 5 and "goes on behind 2 removed layers" in out, err
    parts = json.loads((tmp_path / "parts" / "selection.json").read_text())
    whole.pop("provenance"), parts.pop("provenance")
    assert whole == parts
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["selection.json"]


def test_progress_of_another_recipe_is_not_used(script, folders, tmp_path, text, monkeypatch):
    raced = kill_in_round(2, monkeypatch)
    assert prune(script, folders("llama"), tmp_path, text, "--n-prune", 3, "--metric", "sleb")[0] == 130
    code, out, _ = prune(script, folders("llama"), tmp_path, text, "--n-prune", 3, "--metric", "sleb", "--seed", 1)
    assert code == 0 and "made with another token_ids_sha256" in out and len(raced) == 5


def test_a_damaged_progress_file_is_refused(script, folders, tmp_path, text, monkeypatch):
    path = tmp_path / "selection.progress.json"

    def call(*more):
        return prune(script, folders("llama"), tmp_path, text, "--n-prune", 2, "--metric", "sleb", *more)

    kill_in_round(2, monkeypatch)
    assert call()[0] == 130
    content = json.loads(path.read_text())
    for damaged, message in (("{", "not a JSON"), ({**content, "recipe": None}, "recipe"),
                             ({**content, "rounds": [{"layer": 99, "scores": []}]}, "rounds are damaged"),
                             ({**content, "rounds": [7]}, "rounds are damaged"),
                             ({**content, "rounds": 2 * content["rounds"]}, "rounds are damaged")):
        path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
        code, _, err = call()
        assert code == 2 and path.name in err and message in err and not (tmp_path / "selection.json").exists()
    assert call("--force")[0] == 0 and not path.exists()


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
    runs = Variant("runs", (1, 3, 4), {end: patch_module("hadamard", d=scale_vector(stats.l1_rotated, start, end))
                                       for start, end in ((1, 2), (3, 5))})
    layers = {layer: patch_module("hadamard", d=scale_vector(stats.l1_rotated, layer, layer + 1))
              for layer in (1, 3, 4)}
    states = {}
    batch = decoder.inputs(WINDOWS)
    run_variants(decoder, batch, [runs], lambda index, hidden: states.update(runs=hidden))
    hidden = batch.hidden
    for layer in range(6):
        hidden = layers[layer](hidden) if layer in layers else decoder.layer(batch, layer, hidden)
    torch.testing.assert_close(states["runs"], hidden, rtol=1e-4, atol=1e-4)
