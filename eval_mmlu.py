"""Five-shot MMLU of dense, pruned and patched variants (paper, table 16): mmlu.json.

The protocol of the benchmark's authors: the answer is the likeliest of the four letters behind "Answer:". The five
examples of a subject are encoded once; all its questions run behind their keys and values.
"""

from tqdm import tqdm

from utils import cli
from utils.data.tokens import tokenizer_sha256
from utils.evaluation.mmlu import (CATEGORIES, LETTERS, PROMPT_TOKENS, SUBJECTS, answer_tokens, content_sha256, encode,
                                   load_subjects, subject_row, summarise)
from utils.evaluation.results import ResultFile
from utils.evaluation.scoring import BATCH_TOKENS, score_behind_prefix
from utils.session import Session, default_folder


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
    recipes = {subject: {"model": session.source.sha256, "dtype": session.dtype_name, "answer_tokens": answers,
                         "tokenizer": tokenizer_sha256(session.tokenizer), "subject": subject,
                         "questions": content_sha256(table)} for subject, table in tables.items()}
    file = ResultFile(args, "mmlu", "subject", session, variants, recipes)

    # questions that are too long are said before any work
    longest = min(PROMPT_TOKENS, session.source.positions[1] or 2048)
    counts = {subject: len(tables[subject][1]) for subject, missing in file.missing.items() if missing}
    for subject in counts:
        encode(subject, [], tables[subject][1], session.tokenizer, answers, longest)

    def more(rows):
        return {"summary": summarise(rows), "dtype": session.dtype_name,
                "answer_tokens": {"convention": args.answer_tokens, "ids": answers}}

    with tqdm(total=sum(counts.values()), desc="mmlu", unit="question", disable=not counts) as bar:
        for subject, missing in file.evaluate(more):
            if missing:
                bar.set_description(subject)
                examples, questions = tables[subject]
                by_shots, requests = encode(subject, examples, questions, session.tokenizer, answers, longest)
                shots = {str(number): len(group) for number, group in by_shots.items()}
                chosen = predict(session.decoder, missing, by_shots, requests, args.batch_tokens, subject, bar)
                for variant, letters in zip(missing, chosen):
                    file.put(subject, variant, {**subject_row(subject, questions, letters), "limit": args.limit,
                                                "seed": args.seed, "shots": shots})
    show(file.content)
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
