"""Five-shot MMLU of dense, pruned and patched variants (paper, table 16): mmlu.json.

The protocol of the benchmark's authors: the answer is the likeliest of the four letters behind "Answer:". The five
examples of a subject are encoded once; all its questions run behind their keys and values.
"""

from tqdm import tqdm

from utils import cli
from utils.artifacts import write_json
from utils.evaluation.mmlu import (CATEGORIES, LETTERS, PROMPT_TOKENS, SUBJECTS, answer_tokens, content_sha256, encode,
                        load_subjects, subject_row, summarise)
from utils.evaluation.results import EarlierRows, key
from utils.evaluation.scoring import BATCH_TOKENS, score_behind_prefix
from utils.session import Session, default_folder
from utils.data.tokens import tokenizer_sha256


def arguments():
    p = cli.parser(__doc__, "python eval_mmlu.py --model smollm2-135m --subjects anatomy astronomy --limit 10 "
                            "--data-dir FOLDER")
    cli.add_model_flags(p)
    cli.add_variant_flags(p)
    p.add_argument("--subjects", nargs="+", default=["all"], metavar="SUBJECT", help="all 57, or some by name")
    p.add_argument("--limit", type=cli.positive,
                   help="a random subset of so many questions a subject, drawn with --seed")
    p.add_argument("--answer-tokens", choices=["bare", "spaced"], default="bare",
                   help="bare: the token of 'A', as in the authors' code; spaced: the token of ' A' behind 'Answer:'")
    p.add_argument("--batch-tokens", type=cli.positive, default=BATCH_TOKENS, help="padded tokens a forward pass")
    p.add_argument("--seed", type=cli.seed, default=0, help="of the subset")
    cli.add_data_flags(p)
    cli.add_output_flags(p, "result file; default runs/<model>/mmlu.json")
    return p.parse_args()


def main():
    args = arguments()
    args.out = args.out or default_folder(args.model) / "mmlu.json"
    cli.check_outputs(args, out=".json")
    session = Session(args)
    variants = session.variants()
    answers = answer_tokens(session.tokenizer, args.answer_tokens)
    print(f"answer tokens ({args.answer_tokens}): " + ", ".join(
        f"{letter} = {token} {session.tokenizer.decode([token])!r}" for letter, token in zip(LETTERS, answers)))
    subjects = SUBJECTS if args.subjects == ["all"] else list(dict.fromkeys(args.subjects))
    tables = {subject: (examples, cli.subset(questions, args.limit, args.seed))
              for subject, (examples, questions) in load_subjects(subjects, args.data_dir).items()}
    protocols = {subject: {"model": session.source.fingerprint, "dtype": session.dtype_name, "answer_tokens": answers,
                           "tokenizer": tokenizer_sha256(session.tokenizer), "subject": subject,
                           "questions": content_sha256(table)} for subject, table in tables.items()}
    earlier = EarlierRows(args.out, "mmlu", "subject", session.source, args.force, args.add)
    missing = {subject: [v for v in variants if not earlier.find(v, protocol)]
               for subject, protocol in protocols.items()}
    found = sum(len(variants) - len(names) for names in missing.values())
    if found:
        print(f"{args.out}: {found} of {len(tables) * len(variants)} rows reused (--force recomputes)")

    results, longest = earlier.others(variants, protocols), min(PROMPT_TOKENS, session.source.positions[1] or 2048)
    for subject in (subject for subject, names in missing.items() if names):  # too long ones are said before any work
        encode(subject, [], tables[subject][1], session.tokenizer, answers, longest)
    later = [row for protocol in protocols.values() for row in (earlier.find(v, protocol) for v in variants) if row]
    with tqdm(total=sum(len(questions) for subject, (_, questions) in tables.items() if missing[subject]), desc="mmlu",
              unit="question", disable=not any(missing.values())) as bar:
        for subject, (examples, questions) in tables.items():
            mine = {row["variant"]: row for row in later if row["subject"] == subject}
            later = [row for row in later if row["subject"] != subject]
            if missing[subject]:
                bar.set_description(subject)
                by_shots, requests = encode(subject, examples, questions, session.tokenizer, answers, longest)
                predictions = predict(session.decoder, missing[subject], by_shots, requests, args.batch_tokens,
                                      subject, bar)
                mine |= {variant.name: {
                    **subject_row(variant.name, subject, questions, guesses), "limit": args.limit, "seed": args.seed,
                    "shots": {str(shots): len(group) for shots, group in by_shots.items()},
                    "dtype": session.dtype_name, "key": key(variant, protocols[subject])}
                    for variant, guesses in zip(missing[subject], predictions)}
            results += [mine[variant.name] for variant in variants]
            if missing[subject] or subject == list(tables)[-1]:
                content = {"model": session.source.identity(), "results": results + later,
                           "summary": summarise(results + later), "dtype": session.dtype_name,
                           "answer_tokens": {"convention": args.answer_tokens, "ids": answers},
                           "provenance": session.watch.provenance(session.decoder if any(missing.values()) else None)}
                write_json(args.out, "mmlu", content)
    show(content)
    print(f"wrote {args.out}")


def predict(decoder, variants, by_shots, requests, batch_tokens, subject, bar):
    """[variants][questions] indices of the likeliest of the four answer tokens."""
    predictions = [[0] * len(requests) for _ in variants]
    for group in by_shots.values():
        values = score_behind_prefix(decoder, variants, [r for i in group for r in requests[i]], batch_tokens,
                                     label=subject, bar=bar)
        for guesses, own in zip(predictions, values):
            for place, choice in zip(group, own.view(-1, len(LETTERS)).argmax(1).tolist()):
                guesses[place] = choice
    return predictions


def show(content):
    """Print a line a variant: categories, weighted and macro average, and a warning where the answers collapsed."""
    for row in content["summary"]:
        parts = ", ".join(f"{name} {100 * row[name]:.2f}" for name in CATEGORIES if name in row)
        stderr = "" if row["stderr"] is None else f" +-{100 * row['stderr']:.2f}"
        print(f"  {row['variant']:16s} weighted {100 * row['weighted_avg']:.2f}{stderr}, macro "
              f"{100 * row['macro_avg']:.2f}; {parts}; n={row['n']} in {row['subjects']} subjects")
        letters = ", ".join(f"{letter} {count}" for letter, count in sorted(row["predicted"].items()))
        print(f"    predicted letters: {letters}"
              + ("; collapsed: nearly every answer is the same letter" if row["collapsed"] else ""))


if __name__ == "__main__":
    cli.run(main)
