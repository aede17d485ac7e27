"""Speed and memory as ratios measured in one run: `python -m tests.benchmark NAME`.

Rounds of both sides alternate and the median ratio of the rounds counts, so that a noisy machine disturbs both alike.
qa and mmlu read their data from $LINEARPATCH_DATA, or from the hub without it.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import time

import torch

from utils import cli
from utils.activations import MOMENTS, collect, collect_moments
from utils.data.windows import evaluation_windows
from utils.decoder import Decoder, Variant, run_variants
from utils.distillation import Distiller, kl_top_k
from utils.evaluation.objectives import NextToken, window_losses
from utils.hadamard import rotation
from utils.layers import Layers
from utils.models import EMBEDDED, find_model, load_decoder, load_tokenizer
from utils.networks import TrainablePatch
from utils.repairs import REPAIRS, Calibration
from utils.search import greedy


def dense(decoder):
    """The model itself."""
    return Variant("dense", Layers(decoder.num_layers))


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


def benchmark_collect(windows=16, seq_len=512, rounds=2):
    """The collecting pass against a bare forward of the decoder stack: time, and extra memory in child processes."""
    decoder, ids = embedded_windows(windows, seq_len)
    basis = rotation(decoder.hidden_size)
    times = alternate({"bare": lambda: bare_forward(decoder, ids),
                       "collect": lambda: collect(decoder, ids, basis, progress=False)}, rounds)
    bare, full = (statistics.median(times[side]) for side in ("bare", "collect"))
    print(f"bare forward {bare:.2f} s, collecting pass {full:.2f} s for {windows} windows of {seq_len} tokens")
    print(f"ratio {median_ratio(times, 'collect', 'bare'):.3f} (target at most 1.10)")
    states, channels = decoder.num_layers + 1, decoder.hidden_size
    allowed = 4 * states * channels * (seq_len + 2 * windows)
    used = _peak_of(_collect_once, windows, seq_len) - _peak_of(_bare_once, windows, seq_len)
    print(f"extra memory {used / 2**20:.1f} MiB; states of one batch and 2 (L+1) C floats a sample: "
          f"{allowed / 2**20:.1f} MiB")


def benchmark_gram(windows=4, seq_len=512, rounds=3):
    """The pass of second moments of three runs, all that repairs need of them, against a bare forward."""
    decoder, ids = embedded_windows(windows, seq_len)
    runs = [(13, 16), (12, 17), (22, 29)]  # the pass ends behind the last one
    decoder.mlps  # found once, before the clock starts
    times = alternate({"bare": lambda: bare_forward(decoder, ids),
                       "gram": lambda: collect_moments(decoder, ids, runs, list(MOMENTS), progress=False)}, rounds)
    bare, full = (statistics.median(times[side]) for side in ("bare", "gram"))
    print(f"bare forward {bare:.2f} s, {len(MOMENTS)} moments of {len(runs)} runs {full:.2f} s for {windows} windows of "
          f"{seq_len} tokens")
    print(f"ratio {median_ratio(times, 'gram', 'bare'):.3f} (target at most 1.30)")


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


def benchmark_ppl(windows=2, seq_len=256, rounds=2):
    """One call with dense and vanilla, +d, +P at n = 3, 5, 7 against one call each: time, layers run, results."""
    decoder, ids = embedded_windows(windows, seq_len)
    stats = collect(decoder, ids, rotation(decoder.hidden_size), progress=False)
    given, variants = Calibration(decoder.hidden_size, stats), [dense(decoder)]
    for start, end in ((13, 16), (12, 17), (12, 19)):
        layers = Layers(decoder.num_layers, tuple(range(start, end)))
        variants += [REPAIRS[name].fit(given, layers).variant(layers) for name in ("none", "diagonal", "hadamard")]
        variants[-3].modules.clear()  # vanilla: without the identity
    results = {}

    def together():
        results["together"] = window_losses(decoder, variants, ids, progress=False)

    def separately():
        results["separately"] = torch.cat([window_losses(decoder, [v], ids, progress=False) for v in variants])

    times = alternate({"together": together, "separately": separately}, rounds)
    batch = decoder.inputs(ids[:1])
    ran = run_variants(decoder, batch, variants, lambda index, hidden: None)
    alone = sum(len(v.steps()) for v in variants)
    both, each = (statistics.median(times[side]) for side in ("together", "separately"))
    print(f"{len(variants)} variants, {windows} windows of {seq_len}: together {both:.2f} s, separately {each:.2f} s")
    print(f"separately / together {median_ratio(times, 'separately', 'together'):.2f}; "
          f"layers and patches run {ran} against {alone}; every variant has its own head in both")
    print(f"largest difference of a window's loss {(results['together'] - results['separately']).abs().max():.1e}")


def harness_model(decoder, tokenizer):
    """The harness's own model over the same weights."""
    from lm_eval.models.huggingface import HFLM
    return HFLM(pretrained=decoder.model, tokenizer=tokenizer, batch_size=8, max_length=2048)


QA_ITEMS = {"arc_challenge": 100, "arc_easy": 100, "boolq": 40, "hellaswag": 40, "piqa": 150, "winogrande": 250,
            "wsc273": 200, "race": 20, "copa": 100}  # 1,000 in all, fewer of the tasks with long prompts


def benchmark_qa():
    """Our scoring against the harness's own model on all nine tasks: time, log-likelihoods, predictions."""
    from lm_eval.api.instance import Instance

    from utils.evaluation.qa import PAPER_TASKS, HarnessModel, load_tasks
    from utils.evaluation.scoring import make_packs, score
    source = find_model(EMBEDDED)
    tokenizer, decoder = load_tokenizer(source), load_decoder(source)
    model, plain = HarnessModel(tokenizer, "off"), harness_model(decoder, tokenizer)
    data_dir = os.environ.get("LINEARPATCH_DATA")
    totals, items, equal, largest, count, apart = {"ours": 0.0, "harness": 0.0}, 0, 0, 0.0, 0, []
    for name in PAPER_TASKS:
        qa, = load_tasks([name], model, data_dir, QA_ITEMS[name])
        flat = [texts for item in qa.texts for texts in item]
        requests = [Instance("loglikelihood", {}, texts, index) for index, texts in enumerate(flat)]
        start = time.perf_counter()
        ours, _ = score(decoder, [dense(decoder)], make_packs(decoder, qa.groups))
        middle = time.perf_counter()
        theirs = torch.tensor([value for value, _ in plain.loglikelihood(requests, disable_tqdm=True)]).double()
        times = {"ours": middle - start, "harness": time.perf_counter() - middle}
        totals = {side: totals[side] + times[side] for side in totals}
        difference = (ours[0] - theirs).abs()
        largest, count = max(largest, difference.max().item()), count + len(flat)
        scored = [request for group in qa.groups for request in group]
        far = (difference > 1e-4).nonzero().flatten().tolist()
        apart += [(scored[i], ours[0, i].item(), theirs[i].item()) for i in far]
        offset = 0
        for group in qa.groups:
            part = slice(offset, offset + len(group))
            equal += int(ours[0, part].argmax() == theirs[part].argmax())
            offset += len(group)
        items += len(qa.groups)
        print(f"{qa.name:14s} {len(qa.groups)} items: ours {times['ours']:.1f} s, harness {times['harness']:.1f} s, "
              f"ratio {times['harness'] / times['ours']:.2f}; log-likelihoods differ by {difference.max():.1e} at most",
              flush=True)
    print(f"nine tasks, {items} items: ratio {totals['harness'] / totals['ours']:.2f} (target 1.5; RACE 2.0); "
          f"largest difference of a log-likelihood {largest:.1e}; equal predictions {equal} of {items}")
    decoder.model.double()
    for request, mine, other in apart:
        exact = score(decoder, [dense(decoder)], make_packs(decoder, [[request]]))[0].item()
        print(f"  more than 1e-4 apart: {mine:.5f} and {other:.5f}; from the model in float64 ours is "
              f"{abs(mine - exact):.1e}, the harness {abs(other - exact):.1e} away")
    print(f"more than 1e-4 apart: {len(apart)} of {count} log-likelihoods")


@torch.no_grad()
def benchmark_mmlu(subjects=10, limit=50):
    """Examples encoded once against one full prompt a question: time and predictions, on the subjects with the shortest
    prompts (the others take two cores hours)."""
    from utils.evaluation.mmlu import SUBJECTS, answer_tokens, encode, load_subjects, prompt
    from utils.evaluation.scoring import score_behind_prefix
    source = find_model(EMBEDDED)
    tokenizer, decoder = load_tokenizer(source), load_decoder(source)
    answers = answer_tokens(tokenizer, "bare")
    tables = load_subjects(SUBJECTS, os.environ.get("LINEARPATCH_DATA"))
    shortest = sorted(tables, key=lambda name: len(prompt(name, tables[name][0], tables[name][1][0])))[:subjects]
    tables = {name: tables[name] for name in shortest}
    shared = plain = 0.0
    equal = count = 0
    for subject, (examples, test) in tables.items():
        questions = cli.subset(test, limit, 0)
        by_shots, requests = encode(subject, examples, questions, tokenizer, answers)
        ours = {}
        start = time.perf_counter()
        for group in by_shots.values():
            values = score_behind_prefix(decoder, [dense(decoder)], [r for i in group for r in requests[i]])
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


def random_llama():
    """A random Llama of the 7B model's depth at reduced width: 32 layers, hidden 256, 32,000 words, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return Decoder(LlamaForCausalLM(LlamaConfig(
        vocab_size=32000, hidden_size=256, intermediate_size=688, num_hidden_layers=32, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False)))


def benchmark_distill(steps=21, seq_len=512, top_k=100, lr=1e-4):
    """Online and cached training against the plain recipe, on the embedded model and on the shape of the 7B run."""
    for name, decoder, (start, end) in (("embedded", load_decoder(find_model(EMBEDDED)), (12, 19)),
                                        ("7B shape", random_llama(), (21, 30))):
        ids = torch.randint(5, 30000, (steps, seq_len), generator=torch.Generator().manual_seed(0))
        runs = {side: _Recipe(decoder, start, end, top_k, lr) for side in ("plain", "online", "cached")}
        times = {side: [] for side in runs}
        losses = {side: [] for side in runs}
        cache = [runs["cached"].targets(window[None]) for window in ids]
        for number, window in enumerate(ids):  # the first step warms up
            for side, recipe in runs.items():
                begin = time.perf_counter()
                given = {"plain": recipe.plain, "online": recipe.online,
                         "cached": lambda w: recipe.suffix(w, cache[number])}[side]  # noqa: B023
                losses[side].append(given(window[None]))
                times[side].append(time.perf_counter() - begin)
        times = {side: values[1:] for side, values in times.items()}
        worst = max(abs(a - b) / abs(a) for side in ("online", "cached") for a, b in zip(losses["plain"], losses[side]))
        print(f"{name}, block [{start}, {end}), {seq_len} tokens a step: "
              + ", ".join(f"{side} {statistics.median(values):.2f} s" for side, values in times.items()))
        targets = (1.4, 2.0) if name == "embedded" else (1.7, 4.0)
        print(f"  plain / online {median_ratio(times, 'plain', 'online'):.2f} (target {targets[0]}), "
              f"plain / cached epochs {median_ratio(times, 'plain', 'cached'):.2f} (target {targets[1]}); "
              f"largest relative difference of the losses {worst:.1e}", flush=True)
    used, dense = _peak_of(_online_once, seq_len, top_k, lr), _peak_of(_dense_with_graph, seq_len)
    patches = 3 * 4 * load_decoder(find_model(EMBEDDED)).hidden_size**2
    print(f"peak memory of online training {used / 2**20:.0f} MiB; the dense model with the activations of one batch "
          f"and 3 C^2 floats {(dense + patches) / 2**20:.0f} MiB")


def _online_once(seq_len, top_k, lr):
    recipe = _Recipe(load_decoder(find_model(EMBEDDED)), 12, 19, top_k, lr)
    for step in range(2):
        recipe.online(torch.arange(5, 5 + seq_len)[None] + step)


def _dense_with_graph(seq_len):
    """The dense model, run once with a graph from its embeddings to its last states."""
    decoder = load_decoder(find_model(EMBEDDED))
    embeddings = decoder.model.get_input_embeddings()(torch.arange(5, 5 + seq_len)[None]).requires_grad_()
    decoder.model.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state.sum().item()


class _Recipe:
    """One way to train the patch of one block, with its own parameters and optimizer."""

    def __init__(self, decoder, start, end, top_k, lr):
        removed = tuple(range(start, end))
        patch = TrainablePatch(torch.eye(decoder.hidden_size), "full")
        self.distiller = Distiller(decoder, Layers(decoder.num_layers, removed), {end: patch}, top_k)
        self.decoder, self.top_k = decoder, top_k
        self.optimizer = torch.optim.AdamW(self.distiller.parameters, lr=lr)

    def targets(self, ids):
        inputs, hidden = self.distiller.interface(ids)
        return inputs, hidden, self.distiller.teacher(inputs, hidden)

    def online(self, ids):
        return self._step(lambda: self.distiller.student_loss(*self.targets(ids)))

    def suffix(self, ids, target):
        """A later epoch of offline training: the interface's states and the teacher's outputs are at hand."""
        return self._step(lambda: self.distiller.student_loss(self.decoder.inputs(ids), *target[1:]))

    def plain(self, ids):
        """A teacher pass over the whole model, then the whole student with its full head."""
        with torch.no_grad():
            logits = self.decoder.model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            values, index = logits.topk(self.top_k, dim=1)
            values = values - logits.logsumexp(1, keepdim=True)  # probabilities are what is stored

        def loss():
            inputs, hidden = self.distiller.interface(ids)
            for layer in range(self.distiller.layers.runs[0][1], self.decoder.num_layers):
                if layer in self.distiller.patches:
                    hidden = self.distiller.patches[layer](hidden)
                hidden = self.decoder.layer(inputs, layer, hidden)
            student = self.decoder.head_logits(self.decoder.final_states(hidden)).flatten(0, 1)
            return kl_top_k(values, student.gather(1, index))

        return self._step(loss)

    def _step(self, make_loss):
        loss = make_loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def plain_round(decoder, ids, removed, first=1, last=1):
    """The layer that the plain greedy loop removes next: whole forwards of the model, full logits, cross-entropy."""
    name, config = decoder.layers_path.rpartition(".")[2], decoder.config
    alive = [layer for layer in range(decoder.num_layers) if layer not in removed]
    losses = {}
    for candidate in alive[first:len(alive) - last]:
        kept = [decoder.layers[layer] for layer in alive if layer != candidate]
        setattr(decoder.parent, name, torch.nn.ModuleList(kept))
        config.num_hidden_layers = len(kept)
        losses[candidate] = 0.0
        for window in ids.split(1):
            logits = decoder.model(input_ids=window, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(logits, window[:, 1:].flatten(), reduction="none")
            losses[candidate] += loss.double().sum().item()
    setattr(decoder.parent, name, decoder.layers)
    config.num_hidden_layers = decoder.num_layers
    return min(losses, key=lambda layer: (losses[layer], layer)), losses


@torch.no_grad()
def benchmark_sleb(windows=2, seq_len=128, n_prune=7):
    """Greedy removal with shared prefixes and bounds against the plain loop: time, removed layers, losses."""
    decoder, ids = embedded_windows(windows, seq_len)
    objective = NextToken(decoder, ids)
    rounds, removed, times, largest, complete = [], [], {"plain": [], "ours": []}, 0.0, 0
    for number in range(n_prune):  # one round of each side
        start = time.perf_counter()
        layer, losses = plain_round(decoder, ids, removed)
        middle = time.perf_counter()
        greedy(decoder, objective, number + 1, 1, 1, rounds=rounds, progress=False,
               after_round=lambda done: rounds.append(done[-1]))
        times["plain"].append(middle - start)
        times["ours"].append(time.perf_counter() - middle)
        removed.append(layer)
        for row in rounds[-1]["scores"]:
            if row["complete"]:
                complete += 1
                largest = max(largest, abs(row["score"] - losses[row["layer"]] / ids[:, 1:].numel()))
        print(f"round {number + 1}: plain removes {layer} in {times['plain'][-1]:.1f} s, ours {rounds[-1]['layer']} in "
              f"{times['ours'][-1]:.1f} s", flush=True)
    ours = [done["layer"] for done in rounds]
    plain, shared = (sum(times[side]) for side in ("plain", "ours"))
    print(f"{n_prune} of {decoder.num_layers} layers, {windows} windows of {seq_len}: plain {plain:.1f} s, "
          f"ours {shared:.1f} s, ratio {plain / shared:.2f}, median of the rounds "
          f"{median_ratio(times, 'plain', 'ours'):.2f} (target 1.7)")
    print(f"removed lists {'equal' if removed == ours else f'DIFFER: {removed}'}: {ours}; losses known in full "
          f"{complete} of {sum(len(done['scores']) for done in rounds)}, largest difference {largest:.1e} nats")


BENCHMARKS = {function.__name__.removeprefix("benchmark_"): function for function in (
    benchmark_collect, benchmark_gram, benchmark_ppl, benchmark_qa, benchmark_mmlu, benchmark_distill, benchmark_sleb)}


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("name", choices=BENCHMARKS)
    BENCHMARKS[p.parse_args().name]()


if __name__ == "__main__":
    cli.run(main)
