"""Searches against plain loops: whole models without the layers, repaired or not; and going on after a kill."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.steps import CALIB, prune
from tests.tiny import ids, plain_states, tiny
from utils import search
from utils.activations import collect
from utils.decoder import Decoder
from utils.errors import UserError, WorkError
from utils.evaluation.objectives import NextToken, Shortlist
from utils.hadamard import rotation
from utils.layers import Layers
from utils.metrics import lowest
from utils.repairs import REPAIRS, Calibration
from utils.search import Selection, checked_rounds, greedy, removal_losses, rounds_of, without

WINDOWS = ids(5, 24, seed=3)


def whole_loss(make, removed, windows, matrices=()):
    """Mean loss of all next tokens by the whole model's own forward with layers taken out of its list, float64 sums.

    matrices: {index: P} by which the input of that module of the intact model is multiplied.
    """
    model = make()
    for index in matrices:
        module = [*model.model.layers, getattr(model.model, "norm", None)][index]
        module.register_forward_pre_hook(lambda m, args, p=matrices[index]: (args[0] @ p, *args[1:]))
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


def through(decoder, batch, layers):
    """The states behind some layers, one after the other."""
    hidden = batch.hidden
    for layer in layers:
        hidden = decoder.layer(batch, layer, hidden)
    return hidden


# ----- without a repair


def test_single_removals_equal_brute_force_and_the_first_step_of_sleb():
    expected = [whole_loss(tiny, [layer], WINDOWS) for layer in range(6)]
    decoder = Decoder(tiny())
    for batch_size in (1, 2):
        found = removal_losses(decoder, NextToken(decoder, WINDOWS, batch_size), range(6), progress=False)
        assert found == pytest.approx(expected, rel=1e-6)
    first = greedy(decoder, NextToken(decoder, WINDOWS), 1, progress=False)
    assert first.order == (min(range(6), key=lambda layer: expected[layer]),)
    assert first.order == lowest(found, 1, 0, 0).order


CASES = {
    "llama": lambda: tiny(), "other weights": lambda: tiny(seed=1), "tied": lambda: tiny(tie_word_embeddings=True),
    "deep": lambda: tiny(num_hidden_layers=9, initializer_range=0.05), "biased head": lambda: tiny("phi", seed=2),
    "no-ops": lambda: tiny(no_ops=(2, 4)), "sharp": lambda: tiny(initializer_range=1.0),
}


@pytest.mark.parametrize("case, shortlist", [*((case, True) for case in CASES), ("llama", False), ("no-ops", False)])
def test_sleb_equals_the_plain_loop(case, shortlist):
    make = CASES[case]
    decoder = Decoder(make())
    plain = plain_sleb(make, WINDOWS, 4, decoder.num_layers)
    found = greedy(decoder, NextToken(decoder, WINDOWS, bounded=shortlist), 4, 1, 1, progress=False)
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
    found = greedy(decoder, NextToken(decoder, WINDOWS), 2, 1, 1, progress=False)
    for row in found.scores:
        if row["complete"]:
            gone = (*found.order[:row["round"] - 1], row["layer"])
            total = 0.0
            for window in WINDOWS.split(1):
                batch = decoder.inputs(window)
                hidden = through(decoder, batch, [layer for layer in range(6) if layer not in gone])
                total += decoder.token_nll(hidden, window[:, 1:]).double().sum().item()
            assert row["score"] == total / WINDOWS[:, 1:].numel()


class ByHand:
    """An objective whose loss is a number by hand, of the one layer that did not run and the batch; three batches."""

    losses = {1: [3.0, 3.0, 3.0], 2: [2.0, 2.0, 2.0], 3: [9.0, 9.0, 9.0], 4: [7.0, 1.0, 1.0]}
    batches, tokens = [0, 1, 2], 1

    def __init__(self):
        self.seen = []

    def inputs(self, number):
        return SimpleNamespace(hidden=())

    def loss(self, number, hidden, learn=False):
        layer, = set(range(6)) - set(hidden)
        self.seen.append((layer, number))
        return self.losses[layer][number]

    def lower_bound(self, number):
        return None


def test_a_hopeless_candidate_is_given_up_early_and_a_bad_lead_does_no_harm():
    """Layer 3 is worst, so that starting with it must still find layer 2."""
    decoder = SimpleNamespace(step=lambda batch, step, hidden: (*hidden, step))
    bar = SimpleNamespace(update=lambda n: None)
    for lead in ByHand.losses:
        objective = ByHand()
        race = search._Race(decoder, objective, {layer: without(6, [layer]) for layer in (1, 2, 3, 4)}, lead, bar)
        assert race.winner() == 2
        rows = {row["layer"]: row for row in race.scores(1)}
        assert rows[2] == {"round": 1, "layer": 2, "score": 6.0, "complete": True, "batches": 3}
        if lead == 2:
            assert rows[3] == {"round": 1, "layer": 3, "score": 9.0, "complete": False, "batches": 1}
            assert (3, 1) not in objective.seen and rows[4]["batches"] == 1


def test_a_candidate_that_another_one_excludes_goes_no_further():
    """Layer 1 is complete in the second batch, below what 2 and 3 have lost in the first: there they end."""
    objective, ran = ByHand(), []
    objective.losses, objective.batches = {1: [1.0, 1.0], 2: [5.0, 5.0], 3: [5.0, 5.0], 4: [4.0, 4.0]}, [0, 1]
    objective.inputs = lambda number: SimpleNamespace(hidden=(), number=number)

    def step(batch, index, hidden):
        ran.append((batch.number, index))
        return *hidden, index

    candidates = {layer: without(6, [layer]) for layer in objective.losses}
    bar = SimpleNamespace(update=lambda n: None)
    race = search._Race(SimpleNamespace(step=step), objective, candidates, 4, bar)
    assert race.winner() == 1
    assert [row["batches"] for row in race.scores(1)] == [2, 1, 1, 2]
    lead, first, others = [0, 1, 2, 3, 5], [0, 2, 3, 4, 5], [1]  # of the others one layer, before they are asked
    assert [index for number, index in ran if number == 1] == lead + first + others


def test_half_precision_takes_no_shortlist():
    """Its products are too coarse for a bound; the result is that of all losses."""
    decoder = Decoder(tiny(initializer_range=0.3).bfloat16())
    assert not Shortlist.possible(decoder) and Shortlist.possible(Decoder(tiny()))
    objective = NextToken(decoder, WINDOWS)
    losses = removal_losses(decoder, objective, range(1, 5), progress=False)
    found = greedy(decoder, objective, 1, 1, 1, progress=False)
    assert found.order == (1 + losses.index(min(losses)),)
    assert all(row["score"] == losses[row["layer"] - 1] for row in found.scores if row["complete"])


def test_ties_go_to_the_lower_index():
    decoder = Decoder(tiny(no_ops=(1, 3, 4)))
    assert greedy(decoder, NextToken(decoder, WINDOWS), 3, 1, 1, progress=False).order == (1, 3, 4)
    assert lowest([2.0, 1.0, 1.0, 0.0], 3, 0, 0).order == (3, 1, 2)


def test_removing_a_layer_without_effect_changes_no_bit():
    decoder = Decoder(tiny(no_ops=(2,)))
    objective = NextToken(decoder, WINDOWS, 5)
    dense = objective.loss(0, through(decoder, objective.inputs(0), range(6)))
    assert removal_losses(decoder, objective, [2], progress=False)[0] == dense / WINDOWS[:, 1:].numel()


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2"])  # plain, with a bias, with a soft cap
def test_the_shortlist_is_a_lower_bound_and_close(family):
    decoder = Decoder(tiny(family, initializer_range=0.3))
    hidden = through(decoder, decoder.inputs(WINDOWS), range(6))
    shortlist = Shortlist(decoder, WINDOWS)
    exact = decoder.token_nll(hidden, WINDOWS[:, 1:], shortlist.look).double().sum().item()
    assert shortlist.mass.sum().item() == pytest.approx(WINDOWS[:, 1:].numel(), rel=1e-5)
    bound = shortlist.close().bound(decoder, hidden, shortlist.rows(decoder))
    assert 0 < bound <= exact
    words = shortlist.words.tolist()
    logits = decoder.head_logits(decoder.final_states(hidden[:, :-1])).double().flatten(0, 1)
    expected = (logits[:, words].logsumexp(1) - logits.gather(1, WINDOWS[:, 1:].reshape(-1, 1))[:, 0]).sum().item()
    assert bound == pytest.approx(expected, rel=1e-3)
    objective = NextToken(decoder, WINDOWS, len(WINDOWS))
    assert objective.loss(0, hidden) == exact and objective.lower_bound(0) is None
    assert objective.loss(0, hidden, learn=True) == exact and objective.lower_bound(0)(hidden) == bound


def test_a_broken_model_has_no_loss():
    model = tiny()
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.weight.fill_(1e38)
    decoder = Decoder(tiny())
    decoder.layers[4].load_state_dict(model.model.layers[4].state_dict())
    with pytest.raises(WorkError, match="non-finite loss"):
        removal_losses(decoder, NextToken(decoder, WINDOWS), [2], progress=False)


# ----- with a repair


def plain_patches(states, removed):
    """{end of run: P} from the states of the dense model, float64 [L+1, B, T, C], by dense products."""
    basis, matrices = rotation(64).matrix(), {}
    norms = (states @ basis).abs().sum((1, 2))
    for start in removed:
        if start - 1 not in removed:
            end = next(layer for layer in range(start, 7) if layer not in removed)
            matrices[end] = (basis @ (norms[end] / norms[start]).diag() @ basis.T).float()
    return matrices


def test_greedy_with_a_repair_equals_a_loop_that_patches_every_candidate():
    decoder, states = Decoder(tiny()), plain_states(tiny(), WINDOWS)
    given = Calibration(64, collect(decoder, WINDOWS, rotation(64), progress=False))
    asked = []

    def repair(layers):
        asked.append(layers.removed)
        return REPAIRS["hadamard"].fit(given, layers).variant(layers).modules

    objective = NextToken(decoder, WINDOWS, 2)
    found = greedy(decoder, objective, 3, repair=repair, progress=False)
    removed, differences = [], []
    for number in range(1, 4):
        candidates = [layer for layer in range(6) if layer not in removed]
        losses = {layer: whole_loss(tiny, [*removed, layer], WINDOWS, plain_patches(states, [*removed, layer]))
                  for layer in candidates}
        rows = {row["layer"]: row for row in found.scores if row["round"] == number}
        assert sorted(rows) == candidates
        for layer, row in rows.items():
            assert row["score"] <= losses[layer] * (1 + 1e-5)
            if row["complete"]:
                assert row["score"] == pytest.approx(losses[layer], rel=1e-5)
                differences.append(abs(losses[layer] / whole_loss(tiny, [*removed, layer], WINDOWS) - 1))
        removed.append(min(losses, key=losses.get))
    assert found.order == tuple(removed) and found.layers == Layers(6, tuple(removed))
    assert max(differences) > 1e-3  # the repair is seen
    assert set(asked) == {tuple(sorted([*removed[:number], layer])) for number in range(3) for layer in range(6)
                          if layer not in removed[:number]}


def test_single_removals_with_a_repair_equal_patched_whole_models():
    decoder, states = Decoder(tiny()), plain_states(tiny(), WINDOWS)
    given = Calibration(64, collect(decoder, WINDOWS, rotation(64), progress=False))
    found = removal_losses(decoder, NextToken(decoder, WINDOWS, 2), range(6), progress=False,
                           repair=lambda layers: REPAIRS["hadamard"].fit(given, layers).variant(layers).modules)
    expected = [whole_loss(tiny, [layer], WINDOWS, plain_patches(states, [layer])) for layer in range(6)]
    assert found == pytest.approx(expected, rel=1e-5)


# ----- going on


def test_rounds_of_a_selection_go_on_as_if_they_had_been_searched():
    decoder = Decoder(tiny())
    objective, seen = NextToken(decoder, WINDOWS), []
    whole = greedy(decoder, objective, 4, 1, 1, progress=False, after_round=lambda rounds: seen.append(len(rounds)))
    rounds = rounds_of(whole)
    assert seen == [1, 2, 3, 4] and checked_rounds(rounds, 6, 1, 1, "x") == rounds
    for done in range(5):
        seen.clear()
        assert greedy(decoder, objective, 4, 1, 1, rounds=rounds[:done], progress=False,
                      after_round=lambda rounds: seen.append(len(rounds))) == whole
        assert seen == list(range(done + 1, 5))
        first = greedy(decoder, objective, done, 1, 1, rounds=rounds, progress=False)
        assert first.order == whole.order[:done] and first.scores == whole.scores[:len(first.scores)]
    content = {**whole.layers.json(), "order": list(whole.order), "scores": list(whole.scores)}
    assert Selection.stored(content, 6, "s.json") == whole
    with pytest.raises(UserError, match="s.json: its removed layers were edited"):
        Selection.stored({**content, "order": content["order"][:3]}, 6, "s.json")


def kill_in_round(number, monkeypatch):
    """Interrupts the search once, in that round; returns the list of all rounds begun."""
    real, raced = search._Race.winner, []

    def winner(self):
        raced.append(self)
        if len(raced) == number:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(search._Race, "winner", winner)
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
    assert code == 0 and len(raced) == 5 and "goes on after 2 removed layers" in out, err
    parts = json.loads((tmp_path / "parts" / "selection.json").read_text())
    whole.pop("provenance"), parts.pop("provenance")
    assert whole == parts
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["selection.json"]


def test_fewer_layers_of_one_call_and_reused_ones_are_not_searched(script, folders, tmp_path, text, monkeypatch):
    raced = kill_in_round(0, monkeypatch)
    common = ("--model", folders("llama"), "--metric", "sleb", "--calib-data", text, *CALIB, "--out",
              tmp_path / "{n}.json")
    assert script("prune", *common, "--n-prune", 1, 3, 2)[0] == 0 and len(raced) == 3
    (tmp_path / "2.json").unlink()
    assert script("prune", *common, "--n-prune", 2, 3, 4)[0] == 0 and len(raced) == 3 + 4
    (tmp_path / "2.json").unlink()
    code, out, _ = script("prune", *common, "--n-prune", 2, 3, 4)
    assert code == 0 and len(raced) == 3 + 4 and "4.json: reused" in out


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
                             ({**content, "rounds": [7]}, "'rounds.0' is damaged"),
                             ({**content, "rounds": 2 * content["rounds"]}, "rounds are damaged")):
        path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
        code, _, err = call()
        assert code == 2 and path.name in err and message in err and not (tmp_path / "selection.json").exists()
    assert call("--force")[0] == 0 and not path.exists()


def test_an_edited_search_is_refused(script, folders, tmp_path, text):
    out = tmp_path / "{n}.json"
    common = ("--model", folders("llama"), "--metric", "sleb", "--calib-data", text, *CALIB, "--out", out)
    assert script("prune", *common, "--n-prune", 3)[0] == 0
    stored = tmp_path / "3.json"
    content = json.loads(stored.read_text())
    for change in ({"order": content["order"][::-1]}, {"scores": []},
                   {"scores": [{**row, "round": 9} for row in content["scores"]]}):
        stored.write_text(json.dumps({**content, **change}))
        code, _, err = script("prune", *common, "--n-prune", 3, 1)
        assert code == 2 and "damaged" in err and not (tmp_path / "1.json").exists(), change
