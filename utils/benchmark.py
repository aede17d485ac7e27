"""Speed and memory as ratios measured in one run: `python -m utils.benchmark NAME`.

Rounds of both sides alternate and the median ratio of the rounds counts, so that a noisy machine disturbs both alike. qa and mmlu read their data from $LINEARPATCH_DATA, or from the hub without it.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import time

import torch

from utils import cli
from utils.activations import collect
from utils.hadamard import rotation
from utils.models import EMBEDDED, find_model, load_decoder, load_tokenizer
from utils.patch import patch_module, scale_vector
from utils.perplexity import window_losses
from utils.variants import Variant, run_variants
from utils.corpora import evaluation_windows


def embedded_windows(windows, seq_len):
    """(decoder of the embedded model, token ids int64 [windows, seq_len] of its wiki test text)."""
    source = find_model(EMBEDDED)
    text = evaluation_windows("wiki", load_tokenizer(source), seq_len, limit=windows)
    return load_decoder(source), text.ids


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def alternate(sides, rounds):
    """{name: [seconds of each round]} for functions without arguments, after one warm-up each."""
    for function in sides.values():
        function()
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, function in sides.items():
            times[name].append(seconds(function))
    return times


def median_ratio(times, over, under):
    """Median over rounds of times[over] / times[under]."""
    return statistics.median(a / b for a, b in zip(times[over], times[under]))


@torch.no_grad()
def bare_forward(decoder, ids, batch_size=1):
    """The decoder stack alone over windows: what no collector can undercut."""
    for part in ids.split(batch_size):
        decoder.model.base_model(input_ids=part, use_cache=False)


def benchmark_collect(windows=16, seq_len=512, rounds=3):
    """The collecting pass against a bare forward of the decoder stack: time, and extra memory in child processes."""
    decoder, ids = embedded_windows(windows, seq_len)
    turn = rotation(decoder.hidden_size)
    times = alternate({"bare": lambda: bare_forward(decoder, ids),
                       "collect": lambda: collect(decoder, ids, turn, progress=False)}, rounds)
    bare, full = (statistics.median(times[side]) for side in ("bare", "collect"))
    print(f"bare forward {bare:.2f} s, collecting pass {full:.2f} s for {windows} windows of {seq_len} tokens")
    print(f"ratio {median_ratio(times, 'collect', 'bare'):.3f} (target at most 1.10)")
    states, channels = decoder.num_layers + 1, decoder.hidden_size
    allowed = 4 * states * channels * (seq_len + 2 * windows)
    used = _peak_of(_collect_once, windows, seq_len) - _peak_of(_bare_once, windows, seq_len)
    print(f"extra memory {used / 2**20:.1f} MiB; states of one batch and 2 (L+1) C floats a sample: "
          f"{allowed / 2**20:.1f} MiB")


def _peak_of(function, *args):
    """Peak resident bytes of a fresh process that runs function(*args)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run_and_report, (function, args))


def _run_and_report(function, args):
    function(*args)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bare_once(windows, seq_len):
    decoder, ids = embedded_windows(windows, seq_len)
    bare_forward(decoder, ids)


def _collect_once(windows, seq_len):
    decoder, ids = embedded_windows(windows, seq_len)
    collect(decoder, ids, rotation(decoder.hidden_size), progress=False)


def benchmark_ppl(windows=4, seq_len=512, rounds=3):
    """One call with dense and vanilla, +d, +P at n = 3, 5, 7 against one call each: time, layers run, results."""
    decoder, ids = embedded_windows(windows, seq_len)
    turn = rotation(decoder.hidden_size)
    stats = collect(decoder, ids, turn, progress=False)
    variants = [Variant("dense")]
    for start, end in ((13, 16), (12, 17), (12, 19)):
        removed = tuple(range(start, end))
        variants.append(Variant(f"vanilla n={end - start}", removed))
        for scaling, l1 in (("diagonal", stats.l1_raw), ("hadamard", stats.l1_rotated)):
            patch = patch_module(scaling, d=scale_vector(l1, start, end))
            variants.append(Variant(f"{scaling} n={end - start}", removed, {end: patch}))
    results = {}

    def together():
        results["together"] = window_losses(decoder, variants, ids, progress=False)

    def separately():
        results["separately"] = torch.cat([window_losses(decoder, [v], ids, progress=False) for v in variants])

    times = alternate({"together": together, "separately": separately}, rounds)
    batch = decoder.inputs(ids[:1])
    ran = run_variants(decoder, batch, variants, lambda index, hidden: None)
    alone = sum(len(v.steps(decoder.num_layers)) for v in variants)
    print(f"{len(variants)} variants, {windows} windows of {seq_len}: together {statistics.median(times['together']):.2f} s, "
          f"separately {statistics.median(times['separately']):.2f} s")
    print(f"separately / together {median_ratio(times, 'separately', 'together'):.2f}; "
          f"layers and patches run {ran} against {alone}; every variant has its own head in both")
    print(f"largest difference of a window's loss {(results['together'] - results['separately']).abs().max():.1e}")


def harness_model(decoder, tokenizer):
    """The harness's own model over the same weights."""
    from lm_eval.models.huggingface import HFLM
    return HFLM(pretrained=decoder.model, tokenizer=tokenizer, batch_size=8, max_length=2048)


def benchmark_qa(limit=112):
    """Our scoring against the harness's own model on all nine tasks, RACE apart: time, log-likelihoods, predictions."""
    from lm_eval.api.instance import Instance

    from utils.qa import PAPER_TASKS, HarnessModel, load_tasks
    from utils.scoring import make_packs, score
    source = find_model(EMBEDDED)
    tokenizer, decoder = load_tokenizer(source), load_decoder(source)
    model, plain = HarnessModel(tokenizer, "off"), harness_model(decoder, tokenizer)
    data_dir = os.environ.get("LINEARPATCH_DATA")
    totals, items, equal, largest = {"ours": 0.0, "harness": 0.0}, 0, 0, 0.0
    for qa in load_tasks(list(PAPER_TASKS), model, data_dir, limit):
        flat = [texts for item in qa.texts for texts in item]
        requests = [Instance("loglikelihood", {}, texts, index) for index, texts in enumerate(flat)]
        start = time.perf_counter()
        ours, _ = score(decoder, [Variant("dense")], make_packs(decoder, qa.groups))
        middle = time.perf_counter()
        theirs = torch.tensor([value for value, _ in plain.loglikelihood(requests, disable_tqdm=True)])
        times = {"ours": middle - start, "harness": time.perf_counter() - middle}
        totals = {side: totals[side] + times[side] for side in totals}
        largest = max(largest, (ours[0] - theirs).abs().max().item())
        offset = 0
        for group in qa.groups:
            part = slice(offset, offset + len(group))
            equal += int(ours[0, part].argmax() == theirs[part].argmax())
            offset += len(group)
        items += len(qa.groups)
        print(f"{qa.name:14s} {len(qa.groups)} items: ours {times['ours']:.1f} s, harness {times['harness']:.1f} s, "
              f"ratio {times['harness'] / times['ours']:.2f}", flush=True)
    print(f"nine tasks, {items} items: ratio {totals['harness'] / totals['ours']:.2f} (target 1.5; RACE 2.0); "
          f"largest difference of a log-likelihood {largest:.1e}; equal predictions {equal} of {items}")


@torch.no_grad()
def benchmark_mmlu(subjects=10, limit=50):
    """Examples encoded once against one full prompt a question: time and predictions."""
    from utils.mmlu import SUBJECTS, answer_tokens, encode, load_subjects
    from utils.scoring import score_behind_prefix
    source = find_model(EMBEDDED)
    tokenizer, decoder = load_tokenizer(source), load_decoder(source)
    answers = answer_tokens(tokenizer, "bare")
    tables = load_subjects(SUBJECTS[::len(SUBJECTS) // subjects][:subjects], os.environ.get("LINEARPATCH_DATA"))
    shared = plain = 0.0
    equal = count = 0
    for subject, (examples, test) in tables.items():
        questions = cli.subset(test, limit, 0)
        by_shots, requests = encode(subject, examples, questions, tokenizer, answers)
        ours = {}
        start = time.perf_counter()
        for group in by_shots.values():
            values = score_behind_prefix(decoder, [Variant("dense")], [r for i in group for r in requests[i]])
            ours |= dict(zip(group, values[0].view(-1, 4).argmax(1).tolist()))
        middle = time.perf_counter()
        theirs = {}
        for index, request in requests.items():
            logits = decoder.model(torch.tensor([request[0].context]), logits_to_keep=1).logits[0, -1]
            theirs[index] = int(logits[answers].argmax())
        shared, plain = shared + middle - start, plain + time.perf_counter() - middle
        equal, count = equal + sum(ours[i] == theirs[i] for i in theirs), count + len(theirs)
        print(f"{subject}: {len(questions)} questions", flush=True)
    print(f"{count} questions of {len(tables)} subjects: shared {shared:.1f} s, plain {plain:.1f} s, ratio "
          f"{plain / shared:.2f} (target 3); equal predictions {equal} of {count}")


BENCHMARKS = {"collect": benchmark_collect, "ppl": benchmark_ppl, "qa": benchmark_qa, "mmlu": benchmark_mmlu}


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("name", choices=BENCHMARKS)
    BENCHMARKS[p.parse_args().name]()


if __name__ == "__main__":
    cli.run(main)
