"""Fixtures: scripts run in this process, tiny model folders, the embedded model where it can be had."""

import importlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported: no test touches the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is: threads cost tiny models more time than they save

from tests.tiny import save, tiny, token_text  # noqa: E402
from tests.tokenizers_for_tests import tok  # noqa: E402
from utils import cli  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory, monkeypatch):
    """Each test has a cache of its own, but those of the embedded model, whose download and conversion are kept."""
    if not request.node.get_closest_marker("embedded"):
        monkeypatch.setenv("LINEARPATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("LINEARPATCH_DATA", raising=False)


def pytest_configure(config):
    config.addinivalue_line("markers", "embedded: needs the embedded model or text from the package index")


@pytest.fixture
def script(monkeypatch, capsys):
    """run(name, *arguments) -> (exit code, stdout, stderr) of a script, in this process."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        capsys.readouterr()
        code = 0
        try:
            cli.run(importlib.import_module(name).main)
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """folders(name) -> folder of a tiny model, made once: 'llama', 'no-ops', 'no-ops-end', '48', 'tied', 'bos', ..."""
    kinds = {
        "llama": lambda f: save(tiny(), f), "no-ops": lambda f: save(tiny(no_ops=(2, 3)), f),
        "no-ops-end": lambda f: save(tiny(no_ops=(4, 5)), f), "48": lambda f: save(tiny(hidden_size=48), f),
        "tied": lambda f: save(tiny(tie_word_embeddings=True), f), "bos": lambda f: save(tiny(), f, tok()),
        "qwen3": lambda f: save(tiny("qwen3"), f), "gemma3": lambda f: save(tiny("gemma3"), f),
        "bfloat16": lambda f: save(tiny().bfloat16(), f), "float16": lambda f: save(tiny().half(), f),
    }
    made = {}

    def get(name):
        if name not in made:
            made[name] = kinds[name](tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def text(tmp_path):
    """A text file of 3000 tokens under the test tokenizers."""
    path = tmp_path / "text.txt"
    path.write_text(token_text(3000))
    return path
