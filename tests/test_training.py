"""distill.py: training, the two modes, checkpoints, the cache, replacement networks, and wrong input."""

import errno
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.conftest import ROOT
from tests.tiny import save
from utils import teacher_cache
from utils.artifacts import HEADER, read_header, read_tensors, write_tensors
from utils.training import Trainer

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


def test_the_patch_is_the_last_file_that_is_written(script, folders, ready, text, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "curve.png")

    with monkeypatch.context() as patched:
        patched.setattr("distill.write_curve", fail)
        assert distill(script, folders, ready, text)[0] == 1 and not (ready / "ft.safetensors").exists()
    code, out, _ = distill(script, folders, ready, text)
    assert code == 0 and "going on from step 12" in out and (ready / "ft.curve.png").is_file()


@pytest.mark.parametrize("flags", [("--lr", "nan"), ("--lr", -1), ("--lr", "inf"), ("--weight-decay", -1),
                                   ("--weight-decay", "nan"), ("--clip", 0), ("--clip", -1), ("--clip", "nan"),
                                   ("--trainable", "full:3"), ("--trainable", "low-rank:\u00b2"),
                                   ("--trainable", "low-rank:" + "9" * 5000)])
def test_numbers_that_cannot_train(script, folders, ready, text, flags):
    code, _, err = distill(script, folders, ready, text, *flags)
    assert code == 2 and flags[0] in err and not list(ready.glob("ft*")), err


def test_a_renormalised_loss_on_one_token_is_refused(script, folders, ready, text):
    code, _, err = distill(script, folders, ready, text, "--top-k", 1)
    assert code == 2 and "--top-k 1" in err and not (ready / "ft.safetensors").exists()
    assert distill(script, folders, ready, text, "--top-k", 1, "--loss", "kl-tail")[0] == 0


def test_outputs_below_a_file_are_refused_before_any_work(script, folders, ready, text):
    for flags in (("--cache", text), ("--cache", text / "a" / "b"), ("--save-model", text / "m")):
        code, _, err = distill(script, folders, ready, text, "--mode", "offline", *flags)
        assert code == 2 and f"{text} is no folder" in err, err
    code, _, err = distill(script, folders, ready, text, out=text / "ft.safetensors")
    assert code == 2 and f"{text} is no folder" in err and not list(ready.glob("ft*"))


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


# ----- the cache


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
    original, calls = teacher_cache.write_tensors, []

    def full(path, *args):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *args)

    monkeypatch.setattr(teacher_cache, "SHARD_WINDOWS", 5)
    monkeypatch.setattr(teacher_cache, "write_tensors", full)
    code, _, err = distill(script, folders, ready, text, "--mode", "offline")
    assert code == 1 and "No space left on device" in err and "shard-00001" in err
    code, out, _ = distill(script, folders, ready, text, "--mode", "offline")
    assert code == 0 and "1 of 3 shards reused" in out


def test_a_shard_in_the_place_of_another_is_named_and_rewritten(script, folders, ready, text, monkeypatch):
    monkeypatch.setattr(teacher_cache, "SHARD_WINDOWS", 6)
    assert distill(script, folders, ready, text, "--mode", "offline")[0] == 0
    shard, = (ready / "teacher_cache").glob("*/shard-00001.safetensors")
    shard.write_bytes(shard.with_name("shard-00000.safetensors").read_bytes())
    code, out, _ = distill(script, folders, ready, text, "--mode", "offline", out="again.safetensors")
    assert code == 0 and f"{shard}: made for other inputs; rewriting it" in out
    one, two = (read_tensors(ready / name, "patch")[1]["run0.weight"]
                for name in ("ft.safetensors", "again.safetensors"))
    assert torch.equal(one, two)


def test_a_shard_that_goes_while_training_is_a_failure(script, folders, ready, text, monkeypatch):
    monkeypatch.setattr(teacher_cache, "SHARD_WINDOWS", 5)
    update = Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda self, steps: (
        shutil.rmtree(ready / "teacher_cache", ignore_errors=True), update(self, steps))[1])
    assert distill(script, folders, ready, text, "--mode", "offline")[0] == 1


# ----- replacement networks


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


NETWORKS = {"ffn": [{"run0.ffn.up": None}, {"run0.ffn.up": torch.zeros(3, 4)}, {"activation": "foo"},
                    {"run0.ffn.up": torch.full((128, 64), torch.nan)}],
            "layer": [{"run0.layer.mlp.up_proj.weight": None}, {"run0.layer.mlp.up_proj.weight": torch.zeros(3)}]}


@pytest.mark.parametrize("replace", NETWORKS)
def test_networks_that_do_not_fit_are_named(script, folders, ready, text, replace):
    assert distill(script, folders, ready, text, "--replace", replace)[0] == 0
    header, tensors = read_tensors(ready / "ft.safetensors", "patch")
    for change in NETWORKS[replace]:
        damaged = {**header, **{key: value for key, value in change.items() if key in header}}
        others = {**tensors, **{key: value for key, value in change.items() if key not in header}}
        save_file({key: value for key, value in others.items() if value is not None}, ready / "ft.safetensors",
                  {HEADER: json.dumps(damaged)})
        code, _, err = script("eval_ppl", "--model", folders("llama"), "--patch", f"net={ready}/ft.safetensors",
                              "--datasets", text, "--seq-len", 32, "--out", ready / "ppl.json")
        assert code == 2 and "ft.safetensors" in err, (change, err)


def test_a_model_whose_config_calls_its_activation_otherwise(script, ready, text, tmp_path):
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
