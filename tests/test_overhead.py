"""Section 4.4: parameters, FLOPs and storage against closed forms, and the command on a tiny model."""

import json

import pytest
import torch

from tests.steps import calibrate, prune
from tests.tiny import tiny
from utils.artifacts import read_header
from utils.networks import SwiGLU
from utils.paper import overhead
from utils.repairs import write_patch


@pytest.fixture
def patch(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--n-prune", 2)
    calibrate(script, folders("llama"), tmp_path, text)
    return tmp_path / "patch.safetensors"


def run(monkeypatch, capsys, *arguments):
    from utils import cli
    monkeypatch.setattr("sys.argv", ["overhead", *map(str, arguments)])
    code = 0
    try:
        cli.run(overhead.main)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_parameters_and_flops_of_the_papers_shape():
    part = overhead.operators(64, 172, 32768, 1, torch.device("cpu"), torch.float32)
    rows = {row[0]: row for row in part["rows"]}
    assert rows["P as one matrix"][1:3] == ["4,096", f"{2 * 64 * 64 * 32768 / 1e12:.4f}"]
    assert rows["SwiGLU network of LLM-Streamline"][1:3] == [f"{3 * 64 * 172:,}", f"{6 * 64 * 172 * 32768 / 1e12:.4f}"]
    assert "8.06 times the parameters" in part["text"]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in part["rows"])


def test_storage_reproduces_the_papers_column_and_what_is_written():
    part = overhead.storage(vocab_size=32000, tokens=64, top_k=10)
    by_name = {row[0]: row[1:] for row in part["rows"]}
    assert by_name["table 10: 5000 windows of 2048, K = 200"] == ["20", "20.48", "8.19", "12.29"]
    assert by_name["table 9: 2500 windows of 2048, K = 100"] == ["5", "5.12", "2.05", "3.07"]
    written, formula = (int(part["text"].split(word)[1].split()[0].replace(",", "").rstrip("."))
                        for word in ("words has ", "formula says "))
    assert formula == 64 * 10 * 4 and formula < written < formula + 1000


def test_the_command_times_dense_pruned_and_patched(script, folders, patch, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overhead, "LLAMA2_7B", (64, 128))
    arguments = ("--model", folders("llama"), "--patch", patch, "--tokens", 16, "--repeats", 3, "--decode", 3,
                 "--out", tmp_path / "overhead.json")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    parts = json.loads((tmp_path / "overhead.json").read_text())["results"]
    assert [row[:2] for row in parts[1]["rows"]] == [["dense", 6], ["pruned", 4], ["pruned and patched", 4]]
    assert "reused" in run(monkeypatch, capsys, *arguments)[1]


def test_a_patch_of_another_model_is_refused(folders, patch, tmp_path, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "--model", folders("tied"), "--patch", patch, "--out", tmp_path / "o.json")
    assert code == 2 and "made for another model" in err and not (tmp_path / "o.json").exists()


def test_a_network_in_the_place_of_layers_is_no_patch(script, folders, patch, tmp_path, monkeypatch, capsys, text):
    """Told from the repair that the file names: nothing is timed, and figure 1b scales nothing."""
    header = read_header(patch, "patch")
    network = SwiGLU.random(tiny().config, seed=0)
    tensors = {f"run0.{name}": tensor for name, tensor in network.export().items()}
    write_patch(tmp_path / "net.safetensors", tensors, {
        **header, "about": {**header["about"], "repair": "ffn", "stage": "distilled"}, "activation": "silu"})
    code, _, err = run(monkeypatch, capsys, "--model", folders("llama"), "--patch", tmp_path / "net.safetensors",
                       "--out", tmp_path / "o.json")
    assert code == 2 and "is no matrix on the stream" in err and not (tmp_path / "o.json").exists()
    code, _, err = script("plot_magnitudes", "--figure", "1b", "--model", folders("llama"), "--patch",
                          f"net={tmp_path}/net.safetensors", "--datasets", text, "--seq-len", 32, "--out",
                          tmp_path / "figures")
    assert code == 2 and "scales matrices on the stream; net has none" in err and not (tmp_path / "figures").exists()
