"""Distillation of the patch: losses, the two modes, resume, the cache."""

import errno
import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.tiny import FAMILIES, ids, tiny
from utils import distillation
from utils.artifacts import read_header, read_tensors, write_tensors
from utils.decoder import Decoder
from utils.distillation import Distiller, kl_top_k, kl_with_tail, teacher_targets
from utils.errors import UserError
from utils.layers import Layers
from utils.networks import ReplacementLayer, SwiGLU, TrainablePatch
from utils.teacher_cache import TeacherCache, cache_bytes, index_dtype

START = torch.eye(64) + torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) / 40


def distiller(family="llama", removed=(2, 3), top_k=128, loss="kl", trainable="full"):
    runs_end = {(2, 3): (4,), (4, 5): (6,), (1, 3, 4): (2, 5), (0, 1): (2,)}[removed]
    return Distiller(Decoder(tiny(family)), Layers(6, removed),
                     {end: TrainablePatch(START, trainable) for end in runs_end}, top_k, loss)


def loss_of(d, input_ids):
    batch, hidden = d.interface(input_ids)
    return d.student_loss(batch, hidden, d.teacher(batch, hidden))


def log_probabilities(model, input_ids):
    return model(input_ids).logits.double().log_softmax(-1).flatten(0, 1)


def kl(teacher, student):
    return (teacher.exp() * (teacher - student)).sum(1).mean()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("removed", [(2, 3), (4, 5), (1, 3, 4), (0, 1)])
def test_suffix_only_loss_and_gradients_are_those_of_the_full_models(family, removed):
    """All of the vocabulary: the full KL between two whole-model forwards, and its gradient with respect to P."""
    d = distiller(family, removed)
    loss = loss_of(d, ids())
    loss.backward()
    student = tiny(family)
    for index in removed:
        student.model.layers[index].forward = lambda hidden_states, **kwargs: hidden_states
    modules = [*student.model.layers, getattr(student.model, "norm", None) or student.model.final_layernorm]
    weights = {end: START.clone().requires_grad_() for end in d.patches}
    for end, weight in weights.items():
        modules[end].register_forward_pre_hook(lambda m, args, w=weight: (args[0] @ w, *args[1:]))
    with torch.no_grad():
        teacher = log_probabilities(tiny(family), ids())
    expected = kl(teacher, log_probabilities(student, ids()))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for end, weight in weights.items():
        torch.testing.assert_close(d.patches[end].weight.grad, weight.grad, rtol=1e-3, atol=1e-5)


def test_the_loss_renormalises_both_sides_on_the_teachers_tokens():
    d = distiller(top_k=50)
    with torch.no_grad():
        teacher = log_probabilities(tiny(), ids())
        values, index = teacher.topk(50)
        batch, hidden = d.interface(ids())
        state = d.patches[4](hidden)
        for layer in (4, 5):
            state = d.decoder.layer(batch, layer, state)
        logits = d.decoder.head_logits(d.decoder.final_states(state)).double().flatten(0, 1)
    expected = kl(values.log_softmax(1), logits.gather(1, index).log_softmax(1))
    assert loss_of(d, ids()).item() == pytest.approx(expected.item(), rel=1e-5)
    not_renormalised = kl(values, logits.log_softmax(1).gather(1, index))
    assert abs(not_renormalised.item() - expected.item()) > 1e-3


def test_one_token_gives_nothing_without_the_bucket_and_something_with_it():
    assert loss_of(distiller(top_k=1), ids()).item() == pytest.approx(0, abs=1e-7)
    assert loss_of(distiller(top_k=1, loss="kl-tail"), ids()).item() > 1e-3


def test_the_bucket_is_at_most_the_full_kl_and_equal_at_the_whole_vocabulary():
    full = loss_of(distiller(top_k=128), ids()).item()
    values = [loss_of(distiller(top_k=k, loss="kl-tail"), ids()).item() for k in (1, 10, 50, 128)]
    assert values == sorted(values) and values[-1] == pytest.approx(full, rel=1e-4) and values[0] < full


def test_no_loss_and_no_gradient_when_the_student_is_the_teacher():
    d = Distiller(Decoder(tiny(no_ops=(2, 3))), Layers(6, (2, 3)), {4: TrainablePatch(torch.eye(64), "full")}, 100)
    loss = loss_of(d, ids())
    loss.backward()
    assert loss.item() < 1e-6 and d.patches[4].weight.grad.abs().max() < 1e-5


def test_the_mean_over_tokens_ignores_batch_size_and_length():
    d = distiller(top_k=20)
    whole = loss_of(d, ids(4)).item()
    assert whole == pytest.approx(sum(loss_of(d, part).item() for part in ids(4).split(1)) / 4, rel=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_gathered_logits_and_their_gradient_are_those_of_the_whole_head(dtype, tolerance):
    generator = torch.Generator().manual_seed(3)
    weight, states = (torch.randn(*size, generator=generator).to(dtype) for size in ((50, 16), (7, 16)))
    index, gradient = torch.randint(50, (7, 9), generator=generator), torch.randn(7, 9, generator=generator)
    index[:, 1] = index[:, 0]  # a word twice
    found, expected = states.clone().requires_grad_(), states.double().requires_grad_()
    logits = distillation.GatheredLogits.apply(found, index, weight)
    reference = (expected @ weight.double().T).gather(1, index)
    assert logits.dtype == torch.float32 and not weight.requires_grad
    torch.testing.assert_close(logits.double(), reference, rtol=tolerance, atol=10 * tolerance)
    logits.backward(gradient)
    reference.backward(gradient.double())
    assert found.grad.dtype == dtype
    torch.testing.assert_close(found.grad.double(), expected.grad, rtol=tolerance, atol=10 * tolerance)


def test_teacher_targets_are_the_models_own():
    decoder = Decoder(tiny("gemma2"))
    batch = decoder.inputs(ids())
    hidden = batch.hidden
    with torch.no_grad():
        for index in range(6):
            hidden = decoder.layer(batch, index, hidden)
        expected = log_probabilities(decoder.model, ids()).float()
    logs, index = teacher_targets(decoder, hidden, 5, chunk=7)
    assert torch.equal(index.sort().values, expected.topk(5).indices.sort().values)
    torch.testing.assert_close(logs, expected.gather(1, index), rtol=1e-4, atol=1e-4)
    logits, same = teacher_targets(decoder, hidden, 5, normalised=False, chunk=7)
    assert torch.equal(same, index)
    torch.testing.assert_close(logits.log_softmax(1), logs.log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary, k", [(1000, 20), (1003, 62), (1003, 63), (31, 31), (333, 1)])
def test_the_two_stages_find_the_largest_logits(vocabulary, k):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(vocabulary, 9, generator=generator)
    logits[:, 1] = logits[:, 1].round()  # many ties
    logits[-k:, 2] += 10  # all in the rows after the last whole group, or across groups
    values, index = distillation._top(logits, k)
    assert index.shape == (9, k) and all(len(row.unique()) == k for row in index)
    assert torch.equal(values, logits.T.gather(1, index))
    assert torch.equal(values.sort(1).values, logits.T.sort(1).values[:, -k:])


def test_feature_loss_is_the_mean_square_at_the_interface():
    d = distiller(loss="mse")
    batch, hidden = d.interface(ids())
    after = d.decoder.layer(batch, 3, d.decoder.layer(batch, 2, hidden))
    expected = (hidden @ START - after).square().mean()
    assert loss_of(d, ids()).item() == pytest.approx(expected.item(), rel=1e-5)


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


def test_both_losses_on_numbers_done_by_hand():
    teacher = torch.tensor([[0.6, 0.3]]).log()
    student = torch.tensor([[0.5, 0.1]]).log()
    p, q = torch.tensor([2 / 3, 1 / 3]), torch.tensor([5 / 6, 1 / 6])
    assert kl_top_k(teacher, student).item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.1, 0.4])
    assert kl_with_tail(teacher, student, torch.zeros(1)).item() == pytest.approx((p * (p / q).log()).sum().item(),
                                                                                 rel=1e-5)


# ----- the script

TRAIN = ("--train-samples", 12, "--val-samples", 3, "--seq-len", 32, "--save-every", 4, "--lr", 1e-3)


@pytest.fixture
def ready(script, folders, tmp_path, text):
    """A folder with a calibrated patch of the tiny model."""
    calib = ("--calib-data", text, "--calib-samples", 4, "--seq-len", 32)
    script("prune", "--model", folders("llama"), "--layers", "2-3", "--out", tmp_path / "selection.json")
    script("calibrate", "--model", folders("llama"), "--selection", tmp_path / "selection.json", *calib, "--out",
           tmp_path / "patch.safetensors")
    return tmp_path


def distill(script, folders, ready, text, *more, out="ft.safetensors", model="llama"):
    return script("distill", "--model", folders(model), "--patch", ready / "patch.safetensors", "--train-data", text,
                  *TRAIN, "--out", ready / out, *more)


def test_training_lowers_the_validation_loss_and_keeps_the_best(script, folders, ready, text):
    code, out, err = distill(script, folders, ready, text, "--epochs", 2)
    assert code == 0, err
    header = read_header(ready / "ft.safetensors", "patch")
    assert header["about"] == {"metric": "list", "n": 2, "repair": "hadamard", "stage": "distilled"}
    assert header["training"] == {"trainable": "full", "loss": "kl", "top_k": 100, "init": "patch", "replace": None}
    assert header["validation"]["best"] < header["validation"]["first"]
    log = [json.loads(line) for line in (ready / "ft.log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 24 and {"step", "lr", "train", "validation", "tokens_per_second"} <= set(log[-1])
    assert log[1]["lr"] == pytest.approx(1e-3) and log[-1]["lr"] == pytest.approx(5e-5)
    assert min(row["validation"] for row in log if "validation" in row) == header["validation"]["best"]
    assert (ready / "ft.curve.png").read_bytes().startswith(b"\x89PNG") and (ready / "ft.last.safetensors").is_file()
    code, out, _ = script("eval_ppl", "--model", folders("llama"), "--patch", f"ft={ready}/ft.safetensors",
                          "--datasets", text, "--seq-len", 32, "--out", ready / "ppl.json")
    assert code == 0 and "ft: layers 4, patch after layer 1, yes" in out
    assert "reused" in distill(script, folders, ready, text, "--epochs", 2)[1]


def test_both_modes_train_the_same_patch(script, folders, ready, text):
    first = {}
    for mode in ("online", "offline"):
        code, _, err = distill(script, folders, ready, text, "--mode", mode, "--top-k", 128, "--cache-dtype", "float32",
                               out=f"{mode}.safetensors")
        assert code == 0, err
        log = [json.loads(line) for line in (ready / f"{mode}.log.jsonl").read_text().splitlines()]
        first[mode] = [row["validation"] for row in log if "validation" in row]
    assert first["online"] == pytest.approx(first["offline"], rel=1e-5)


def test_a_killed_run_goes_on_bit_for_bit(script, folders, ready, text):
    distill(script, folders, ready, text, out="whole.safetensors")
    command = [sys.executable, str(ROOT / "distill.py"), "--model", folders("llama"), "--patch",
               ready / "patch.safetensors", "--train-data", text, *TRAIN, "--out", ready / "killed.safetensors"]
    code = ("import sys, runpy; sys.argv = sys.argv[1:]; sys.path.insert(0, {root!r})\n"
            "import os, signal, distill\nold = distill.Trainer.update\n"
            "def update(self, steps):\n"
            "    if self.step == 6: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    return old(self, steps)\n"
            "distill.Trainer.update = update\ndistill.main()").format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code, *map(str, command[1:])], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, cwd=ROOT)
    assert done.returncode == -9 and not (ready / "killed.safetensors").exists(), done.stderr[-1000:]
    code, out, _ = distill(script, folders, ready, text, out="killed.safetensors")
    assert code == 0 and "going on from step 4" in out
    for name in ("", ".last"):
        one, two = (read_tensors(ready / f"{run}{name}.safetensors", "patch")[1] for run in ("whole", "killed"))
        assert torch.equal(one["run0.weight"], two["run0.weight"])


def test_a_damaged_shard_is_named_and_rewritten_and_other_inputs_miss(script, folders, ready, text, tmp_path):
    distill(script, folders, ready, text, "--mode", "offline")
    shards = sorted((ready / "teacher_cache").glob("*/shard-00000.safetensors"))
    content = bytearray(shards[0].read_bytes())
    content[-5] ^= 0xFF
    shards[0].write_bytes(content)
    code, out, _ = distill(script, folders, ready, text, "--mode", "offline", "--force", out="again.safetensors")
    assert code == 0 and f"{shards[0]}: damaged; rewriting it" in out and "reused from" in out
    one, two = (read_tensors(ready / name, "patch")[1]["run0.weight"]
                for name in ("ft.safetensors", "again.safetensors"))
    assert torch.equal(one, two)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1].replace("w", "") + " w1 w2" * 1500)
    code, out, _ = distill(script, folders, ready, other, "--mode", "offline", out="other.safetensors")
    assert code == 0 and "teacher cache miss" in out and "token_ids_sha256" in out


def test_a_full_disk_while_the_cache_is_written_keeps_what_is_there(script, folders, ready, text, monkeypatch):
    import utils.teacher_cache as module
    original, calls = module.write_tensors, []

    def full(path, *args):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *args)

    monkeypatch.setattr(module, "SHARD_WINDOWS", 5)
    monkeypatch.setattr(module, "write_tensors", full)
    code, _, err = distill(script, folders, ready, text, "--mode", "offline")
    assert code == 1 and "No space left on device" in err and "shard-00001" in err
    code, out, _ = distill(script, folders, ready, text, "--mode", "offline")
    assert code == 0 and "1 of 3 shards reused" in out


def test_float16_models_train_in_float32(script, folders, ready, text):
    script("prune", "--model", folders("float16"), "--layers", "2-3", "--out", ready / "s16.json")
    script("calibrate", "--model", folders("float16"), "--selection", ready / "s16.json", "--repair", "none", "--out",
           ready / "patch.safetensors", "--calib-data", text, "--seq-len", 32)
    code, _, err = distill(script, folders, ready, text, "--dtype", "bfloat16", model="float16")
    assert code == 0, err
    assert read_tensors(ready / "ft.safetensors", "patch")[1]["run0.weight"].dtype == torch.float32


def test_a_loss_that_is_not_finite_stops_with_its_step(script, folders, ready, text):
    code, _, err = distill(script, folders, ready, text, "--lr", 1e30, "--epochs", 2)
    assert code == 1 and "step" in err and "finite" in err and not (ready / "ft.safetensors").exists()


def test_base_weights_and_embedding_stay(folders):
    d = distiller()
    before = {name: p.clone() for name, p in d.decoder.model.named_parameters()}
    optimizer = torch.optim.AdamW(d.parameters, lr=1e-2)
    loss_of(d, ids()).backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in d.decoder.model.named_parameters())


def test_the_cache_of_the_papers_run_has_the_stated_bytes():
    assert cache_bytes(5000, 2048, 100, 32000) == 4_096_000_000
    assert cache_bytes(5000, 2048, 100, 128256) == 6_144_000_000
    assert 5000 * 2048 * 100 * (2 + 8) == 10_240_000_000  # as published, with 8-byte indices
    assert index_dtype(1 << 16) == torch.uint16 and index_dtype((1 << 16) + 1) == torch.int32


def test_indices_beyond_32767_survive_the_cache(tmp_path):
    cache = TeacherCache(tmp_path, {"a": 1}, 1)
    index = torch.tensor([[[0, 40000, 65535]]])
    cache.write(0, torch.zeros(1, 1, 3), index, torch.zeros(1, 1, 4), vocab_size=65536, dtype=torch.float32)
    assert torch.equal(cache.window(0)[1], index[0])


# ----- replacement networks


def test_a_copied_layer_in_the_place_of_one_layer_is_the_teacher():
    decoder = Decoder(tiny())
    d = Distiller(decoder, Layers(6, (3,)), {4: ReplacementLayer(decoder.layers[3], 3)}, 128)
    assert loss_of(d, ids()).item() < 1e-6


def test_the_ffn_is_the_models_own_mlp_without_a_residual():
    decoder = Decoder(tiny())
    mlp = decoder.layers[2].mlp
    net = SwiGLU(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, "silu")
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(net(x), mlp(x), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in net.parameters()) == 3 * 64 * 128


@pytest.mark.parametrize("replace, loss", [("ffn", "mse"), ("ffn", "kl"), ("layer", "mse"), ("layer", "kl")])
def test_replacement_networks_train_and_are_evaluated(script, folders, ready, text, replace, loss):
    code, _, err = distill(script, folders, ready, text, "--replace", replace, "--loss", loss, "--epochs", 3)
    assert code == 0, err
    header, tensors = read_tensors(ready / "ft.safetensors", "patch")
    assert header["validation"]["best"] < header["validation"]["first"]
    assert any(name.startswith("run0.ffn." if replace == "ffn" else "run0.layer.") for name in tensors)
    code, out, err = script("eval_ppl", "--model", folders("llama"), "--patch", f"net={ready}/ft.safetensors",
                            "--datasets", text, "--seq-len", 32, "--out", ready / "ppl.json")
    assert code == 0 and "net" in out, err
    code, _, err = distill(script, folders, ready, text, "--replace", replace, "--loss", loss, "--epochs", 3,
                           "--save-model", ready / "m")
    assert code == 2 and "replacement networks" in err


@pytest.mark.parametrize("flags", [("--lr", "nan"), ("--lr", -1), ("--lr", "inf"), ("--weight-decay", -1),
                                   ("--weight-decay", "nan"), ("--clip", 0), ("--clip", -1), ("--clip", "nan"),
                                   ("--trainable", "full:3"), ("--trainable", "low-rank:\u00b2"),
                                   ("--trainable", "low-rank:" + "9" * 5000)])
def test_numbers_that_cannot_train(script, folders, ready, text, flags):
    code, _, err = distill(script, folders, ready, text, *flags)
    assert code == 2 and flags[0] in err and not list(ready.glob("ft*")), err


def test_a_fine_tuned_patch_is_fine_tuned_further_but_never_overwritten(script, folders, ready, text):
    def again(patch, out):
        return script("distill", "--model", folders("llama"), "--patch", patch, "--train-data", text, *TRAIN, "--out",
                      out, "--force")

    assert again(ready / "patch.safetensors", ready / "ft.safetensors")[0] == 0
    for name, out in (("patch", "patch"), ("ft.last", "ft")):
        before = (ready / f"{name}.safetensors").read_bytes()
        code, _, err = again(ready / "." / f"{name}.safetensors", ready / f"{out}.safetensors")
        assert code == 2 and "would overwrite --patch" in err
        assert (ready / f"{name}.safetensors").read_bytes() == before
    assert again(ready / "ft.safetensors", ready / "further.safetensors")[0] == 0
    code, _, err = script("eval_ppl", "--model", folders("llama"), "--patch", f"ft={ready}/further.safetensors",
                          "--datasets", text, "--seq-len", 32, "--out", ready / "ppl.json")
    about = read_header(ready / "further.safetensors", "patch")["about"]
    assert code == 0 and (about["repair"], about["stage"]) == ("hadamard", "distilled"), err


@pytest.mark.parametrize("replace", ["ffn", "layer"])
def test_replacement_networks_from_the_cache_and_as_a_start(script, folders, ready, text, replace):
    code, _, err = distill(script, folders, ready, text, "--replace", replace, "--mode", "offline")
    assert code == 0, err
    code, _, err = script("distill", "--model", folders("llama"), "--patch", ready / "ft.safetensors", "--train-data",
                          text, *TRAIN, "--out", ready / "b.safetensors")
    assert code == 2 and "is no matrix on the stream" in err and not (ready / "b.safetensors").exists()
    code, _, err = distill(script, folders, ready, text, "--replace", replace, "--save-model", ready / "m",
                           out="c.safetensors")
    assert code == 2 and "replacement networks" in err and not list(ready.glob("c.*"))  # before any training


@pytest.mark.parametrize("replace, change", [
    ("ffn", {"run0.ffn.up": None}), ("ffn", {"run0.ffn.up": torch.zeros(3, 4)}), ("ffn", {"activation": "foo"}),
    ("layer", {"run0.layer.mlp.up_proj.weight": None}), ("layer", {"run0.layer.mlp.up_proj.weight": torch.zeros(3)}),
    ("ffn", {"run0.ffn.up": torch.full((128, 64), torch.nan)})])
def test_networks_that_do_not_fit_are_named(script, folders, ready, text, replace, change):
    from safetensors.torch import save_file
    from utils.artifacts import HEADER
    assert distill(script, folders, ready, text, "--replace", replace)[0] == 0
    header, tensors = read_tensors(ready / "ft.safetensors", "patch")
    header |= {key: value for key, value in change.items() if key in header}
    tensors |= {key: value for key, value in change.items() if key not in header}
    save_file({key: value for key, value in tensors.items() if value is not None}, ready / "ft.safetensors",
              {HEADER: json.dumps(header)})
    code, _, err = script("eval_ppl", "--model", folders("llama"), "--patch", f"net={ready}/ft.safetensors",
                          "--datasets", text, "--seq-len", 32, "--out", ready / "ppl.json")
    assert code == 2 and "ft.safetensors" in err, err


def test_a_shard_in_the_place_of_another_is_named_and_rewritten(script, folders, ready, text, monkeypatch):
    import utils.teacher_cache as module
    monkeypatch.setattr(module, "SHARD_WINDOWS", 6)
    assert distill(script, folders, ready, text, "--mode", "offline")[0] == 0
    shard, = (ready / "teacher_cache").glob("*/shard-00001.safetensors")
    shard.write_bytes(shard.with_name("shard-00000.safetensors").read_bytes())
    code, out, _ = distill(script, folders, ready, text, "--mode", "offline", out="again.safetensors")
    assert code == 0 and f"{shard}: made for other inputs; rewriting it" in out
    one, two = (read_tensors(ready / name, "patch")[1]["run0.weight"]
                for name in ("ft.safetensors", "again.safetensors"))
    assert torch.equal(one, two)


def test_a_shard_that_goes_while_training_is_a_failure(script, folders, ready, text, monkeypatch):
    import shutil
    import utils.teacher_cache as module
    from distill import Trainer
    monkeypatch.setattr(module, "SHARD_WINDOWS", 5)
    update = Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda self, steps: (
        shutil.rmtree(ready / "teacher_cache", ignore_errors=True), update(self, steps))[1])
    assert distill(script, folders, ready, text, "--mode", "offline")[0] == 1


def test_outputs_below_a_file_are_refused_before_any_work(script, folders, ready, text):
    for flags in (("--cache", text), ("--cache", text / "a" / "b"), ("--save-model", text / "m")):
        code, _, err = distill(script, folders, ready, text, "--mode", "offline", *flags)
        assert code == 2 and f"{text} is no folder" in err, err
    code, _, err = distill(script, folders, ready, text, out=text / "ft.safetensors")
    assert code == 2 and f"{text} is no folder" in err and not list(ready.glob("ft*"))


def test_the_patch_is_the_last_file_that_is_written(script, folders, ready, text, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "curve.png")

    with monkeypatch.context() as patched:
        patched.setattr("distill.write_curve", fail)
        assert distill(script, folders, ready, text)[0] == 1 and not (ready / "ft.safetensors").exists()
    code, out, _ = distill(script, folders, ready, text)
    assert code == 0 and "going on from step 12" in out and (ready / "ft.curve.png").is_file()


def test_a_model_whose_config_calls_its_activation_otherwise(script, ready, text, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel
    from tests.tiny import save
    torch.manual_seed(0)
    folder = save(GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=4, n_head=4,
                                             bos_token_id=1, eos_token_id=2)), tmp_path / "gpt2")
    script("prune", "--model", folder, "--layers", "2", "--out", ready / "s.json")
    script("calibrate", "--model", folder, "--selection", ready / "s.json", "--calib-data", text, "--calib-samples", 4,
           "--seq-len", 32, "--out", ready / "g.safetensors")
    command = ("--model", folder, "--patch", ready / "g.safetensors", "--train-data", text, *TRAIN, "--out")
    code, _, err = script("distill", *command, ready / "ft.safetensors")
    assert code == 0, err
    code, _, err = script("distill", *command, ready / "b.safetensors", "--replace", "ffn")
    assert code == 2 and "states no intermediate_size" in err


def test_a_damaged_checkpoint_is_said_and_not_used(script, folders, ready, text, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("distill.write_curve", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            distill(script, folders, ready, text)
    path = ready / "ft.checkpoint.safetensors"
    header, tensors = read_tensors(path, "checkpoint")
    write_tensors(path, "checkpoint", {name: t for name, t in tensors.items() if name != "exp_avg.0"}, header)
    code, out, _ = distill(script, folders, ready, text)
    assert code == 0 and "is damaged; starting anew" in out and "going on" not in out


def test_a_renormalised_loss_on_one_token_is_refused(script, folders, ready, text):
    code, _, err = distill(script, folders, ready, text, "--top-k", 1)
    assert code == 2 and "--top-k 1" in err and not (ready / "ft.safetensors").exists()
    assert distill(script, folders, ready, text, "--top-k", 1, "--loss", "kl-tail")[0] == 0
