"""Section 4.4: what the patch costs beside LLM-Streamline's network, whole models, and the size of the teacher's cache.

`python -m utils.paper.overhead --model M --patch patch.safetensors --out overhead.json`. Latencies are medians after
warm-up.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from utils import cli
from utils.artifacts import reusable, write_json
from utils.errors import UserError
from utils.hadamard import rotation
from utils.modeling_linearpatch import LinearPatch
from utils.networks import SwiGLU
from utils.model_folder import patched_model
from utils.paper.experiments import paper
from utils.repairs import REPAIRS
from utils.session import Session, default_folder
from utils.teacher_cache import TeacherCache, cache_bytes

LLAMA2_7B = (4096, 11008)  # hidden and intermediate size, those of the paper's measurement
CACHES = {9: ((2500, 100), (5000, 100), (7500, 100)), 10: ((5000, 50), (5000, 100), (5000, 200))}  # windows of 2048, K


def arguments():
    p = cli.parser(__doc__, "python -m utils.paper.overhead --model smollm2-135m "
                            "--patch runs/smollm2-135m/patch.safetensors")
    cli.add_model_flags(p)
    p.add_argument("--patch", type=Path, required=True, help="the patch whose model is timed")
    p.add_argument("--tokens", type=cli.positive, help="tokens of one call; default 16 x 2048 on a GPU, 256 on a CPU")
    p.add_argument("--repeats", type=cli.positive, help="timed calls; default 100 on a GPU, 10 on a CPU")
    p.add_argument("--decode", type=cli.positive, default=16, help="tokens generated one by one behind the prompt")
    cli.add_output_flags(p, "result file; default runs/<model>/overhead.json")
    return p.parse_args()


def main():
    args = arguments()
    args.out = args.out or default_folder(args.model) / "overhead.json"
    cli.check_outputs(args, out=".json")
    session = Session(args)
    variant, _ = session.read_patch(args.patch)
    if not REPAIRS[variant.about["repair"]].is_matrix:
        raise UserError(f"--patch {args.patch}: holds a replacement network; give a patch")
    if args.decode >= (session.source.positions[1] or 2048):
        raise UserError(f"--decode {args.decode}: {session.source.label} has {session.source.positions[1]} positions")
    cuda = session.device.type == "cuda"
    tokens, repeats = args.tokens or (16 * 2048 if cuda else 256), args.repeats or (100 if cuda else 10)
    recipe = {"model": session.source.json(), "variant": variant.sha256(), "tokens": tokens, "repeats": repeats,
              "decode": args.decode, "dtype": session.dtype_name}
    if reusable(args.out, "overhead", recipe, args.force):
        return
    parts = [operators(*LLAMA2_7B, tokens, repeats, session.device, session.dtype),
             models(session.decoder, variant, tokens, repeats, args.decode), storage(session.decoder.vocab_size)]
    write_json(args.out, "overhead", {"model": session.source.json(), "results": parts, "recipe": recipe,
                                      "provenance": session.watch.provenance(session.decoder)})
    for part in parts:
        print(part["title"])
        for row in (part["head"], *part["rows"]):
            print("  " + "  ".join(str(cell) for cell in row))
        print(f"  {part['text']}")
    print(f"wrote {args.out}")


def median_seconds(function, repeats, device, warm_up=2):
    """Median wall seconds of function() over `repeats` calls, each waited for."""
    times = []
    for index in range(warm_up + repeats):
        wait(device)
        start = time.perf_counter()
        function()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm_up:])


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def operators(hidden, inner, tokens, repeats, device, dtype):
    """Parameters, FLOPs and latency of d, P as three factors, P as a matrix, and a SwiGLU of LLaMA-2-7B's shape."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, tokens, hidden, generator=generator).to(device, dtype)
    d, rotated = 1 + torch.rand(hidden, generator=generator), rotation(hidden)
    gate, up, down = (torch.randn(*shape, generator=generator).to(device, dtype) / hidden**0.5
                      for shape in ((inner, hidden), (inner, hidden), (hidden, inner)))
    network = SwiGLU(gate, up, down, "silu").to(device)
    scale = d.to(device)
    choices = [
        ("d alone", hidden, hidden, LinearPatch(d).to(device)),
        ("P as H diag(d) H^T, fast transform", hidden, None,
         lambda x: rotated.apply_transposed(rotated.apply(x.float()) * scale).to(x.dtype)),
        ("P as one matrix", hidden**2, 2 * hidden**2, LinearPatch(rotated.conjugate(d)).to(device)),
        ("SwiGLU network of LLM-Streamline", 3 * hidden * inner, 6 * hidden * inner, network),
    ]
    rows, seconds = [], {}
    for name, parameters, flops, function in choices:
        seconds[name] = median_seconds(lambda: function(states), repeats, device)  # noqa: B023
        rows.append([name, f"{parameters:,}", "-" if flops is None else f"{flops * tokens / 1e12:.4f}",
                     f"{1e3 * seconds[name]:.2f}", None])
    for row in rows:
        row[-1] = f"{seconds[choices[-1][0]] / seconds[row[0]]:.1f}"
    ratio = seconds[choices[-1][0]] / seconds["P as one matrix"]
    return {"title": f"The patch against a network in its place: hidden size {hidden}, {tokens} tokens",
            "head": ["operator", "parameters", "TFLOP", "median ms", "times faster than the network"], "rows": rows,
            "text": f"The network has {3 * inner / hidden:.2f} times the parameters and FLOPs of P as a matrix and "
                    f"takes {ratio:.1f} times as long here. The paper's 190 times cannot come from arithmetic: its "
                    "16 x 2048 tokens are 1.10 TFLOP against 8.86. Both compute in float32 here, whatever the model's "
                    "dtype."}


@torch.no_grad()
def models(decoder, variant, tokens, repeats, decode):
    """Prefill and decode latency of the dense, pruned and patched model. The decoder's model is cut."""
    length = min(tokens, 2048, getattr(decoder.config, "max_position_embeddings", 2048) - decode)
    ids = torch.arange(length)[None] * 7919 % decoder.vocab_size
    ids = ids.expand(max(1, tokens // length), -1).to(decoder.device)
    repeats = max(3, repeats // 3)
    layers, dense = decoder.num_layers, _latency(decoder.model, ids, decode, repeats)
    patched = patched_model(decoder, variant)
    rows, kept = [], layers - len(variant.removed)
    for name, depth, (prefill, token) in (
            ("dense", layers, dense), ("pruned", kept, _latency(decoder.model, ids, decode, repeats)),
            ("pruned and patched", kept, _latency(patched, ids, decode, repeats))):
        rows.append([name, depth, f"{1e3 * prefill:.1f}", f"{dense[0] / prefill:.2f}", f"{1e3 * token:.2f}",
                     f"{dense[1] / token:.2f}"])
    return {"title": f"Whole models: prompt of {ids.shape[0]} x {length} tokens, then {decode} tokens one by one",
            "head": ["model", "layers", "prefill ms", "times faster", "ms a token", "times faster"], "rows": rows,
            "text": "Prefill forms the logits of the last position only; decoding uses the key-value cache. Medians."}


def _latency(model, ids, decode, repeats):
    """(seconds of the prompt, seconds a generated token)."""
    device = ids.device
    prefill = median_seconds(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), repeats, device, warm_up=1)
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache, token, times = out.past_key_values, out.logits[:, -1:].argmax(-1), []
    for _ in range(decode):
        wait(device)
        start = time.perf_counter()
        out = model(input_ids=token, cache=cache, use_cache=True)
        wait(device)
        times.append(time.perf_counter() - start)
        token = out.logits[:, -1:].argmax(-1)
    return prefill, statistics.median(times[min(2, decode - 1):])


def storage(vocab_size, tokens=512, top_k=100):
    """Bytes of the teacher's cache: tables 9 and 10 as formulas, and one written shard beside its formula."""
    rows = []
    for table, sizes in CACHES.items():
        for windows, k in sizes:
            printed = next(r["cache_gb"] for r in paper()["results"] if r["table"] == table and (
                r.get("distillation_samples", 5000), r.get("top_k", 100)) == (windows, k) and "cache_gb" in r)
            rows.append([f"table {table}: {windows} windows of 2048, K = {k}", f"{printed:.0f}",
                         f"{windows * 2048 * k * 10 / 1e9:.2f}", f"{cache_bytes(windows, 2048, k, 32000) / 1e9:.2f}",
                         f"{cache_bytes(windows, 2048, k, 128256) / 1e9:.2f}"])
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(1, tokens, top_k, generator=generator).log_softmax(2)
    index = torch.randint(vocab_size, logs.shape, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        cache = TeacherCache(folder, {"measured": True}, 1)
        cache.write(0, logs, index, vocab_size=vocab_size)
        size = cache.path(0).stat().st_size
    formula = cache_bytes(1, tokens, top_k, vocab_size)
    return {"title": "Storage of the teacher's cache in GB",
            "head": ["run", "paper", "2 + 8 bytes, as published", "ours, 32,000 words", "ours, 128,256 words"],
            "rows": rows,
            "text": "An entry is a probability of 2 bytes and an index, of 2 bytes where the vocabulary fits 16 bits "
                    f"and else 4. Measured: a shard of {tokens} tokens, K = {top_k}, for this model's {vocab_size:,} "
                    f"words has {size:,} bytes; the formula says {formula:,}."}


if __name__ == "__main__":
    cli.run(main)
