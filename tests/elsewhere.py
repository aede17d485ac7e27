"""Saved folders in a fresh process that has never seen this project: the same bits, and nothing without their code."""

import re
import subprocess
import sys

import torch

from tests.conftest import ROOT
from tests.tiny import ids

RELOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not any(name == "utils" or name.startswith("utils.") for name in sys.modules)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    AutoTokenizer.from_pretrained(folder)
    given = torch.load(folder + ".pt", weights_only=True)
    ids = given["ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, given["batch"]), "batched"
        assert torch.equal(model(ids[:1]).logits, given["alone"]), "alone"
        assert torch.equal(model(ids, use_cache=True).logits, given["batch"]), "cache"
        past, steps = None, []
        for t in range(ids.shape[1]):
            out = model(ids[:1, t:t + 1], cache=past, use_cache=True)
            past = out.cache
            steps.append(out.logits)
        assert torch.equal(torch.cat(steps, 1), given["steps"]), "steps"
        assert torch.equal(model.generate(ids[:1], max_new_tokens=8, do_sample=False), given["generated"])
    for trust in (False, None):
        try:
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        except ValueError as error:
            assert "trust_remote_code" in str(error)
        else:
            raise SystemExit("loaded without its code")
    print("same")
"""


def expect(model, folder):
    """Write beside a folder what its model computes: whole, alone, token by token from the cache, and generated."""
    with torch.no_grad():
        past, steps = None, []
        for t in range(17):
            out = model(ids()[:1, t:t + 1], cache=past, use_cache=True)
            past = out.cache
            steps.append(out.logits)
        torch.save({"ids": ids(), "batch": model(ids()).logits, "alone": model(ids()[:1]).logits,
                    "steps": torch.cat(steps, 1),
                    "generated": model.generate(ids()[:1], max_new_tokens=8, do_sample=False)}, f"{folder}.pt")


def check_elsewhere(home, *folders):
    """Assert that each folder computes there, bit for bit, what `expect` wrote, and does not load without its code."""
    done = subprocess.run([sys.executable, "-I", "-c", RELOAD, *map(str, folders)], cwd=home,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(home), "HF_HUB_OFFLINE": "1",
                               "OMP_NUM_THREADS": str(torch.get_num_threads())})  # the last bits depend on it
    same = re.findall("same$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and len(same) == len(folders), done.stderr[-2000:]
    assert str(ROOT) not in done.stderr
