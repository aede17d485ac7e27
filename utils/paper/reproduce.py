"""Reproduce the paper: `python -m utils.paper.reproduce PRESET [TARGET ...] [--dry-run]`; run_all.sh hands over to it.

Each command runs in a fork of one interpreter that has loaded the libraries, which takes longer than many a command. A
command that fails does not stop those that can do without its files. What was run stands in runs/<preset>/commands.sh.
"""

import argparse
import importlib
import os
import re
import runpy
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path

from utils.paper.experiments import EMBEDDED, GROUPS, PRESETS, TARGETS, Plan, sizes

USAGE = """usage: bash run_all.sh [--dry-run] PRESET [TARGET ...]    or    bash run_all.sh test [pytest options]

presets   {embedded:<23}embedded: comes from the package index, runs on a laptop
          {hub}
                                 from the hub, with the paper's sizes
          or any hub id, folder or .gguf file
targets   {targets}
          all                    everything, the default; each run writes runs/<preset>/report.md and report.html

SIZE=small runs the same commands on a few short windows, to see that everything works.
LINEARPATCH_DATA=FOLDER takes data sets from local files instead of the embedded text or the hub. The embedded model
answers questions (tables 1, 2, 16, ...) with it only."""

LIBRARIES = ("utils.session", "utils.evaluation.objectives", "utils.distillation", "utils.figures", "scipy.stats")


def usage():
    tables = [table for group in GROUPS for table in group if table.title]
    return USAGE.format(
        embedded=EMBEDDED, hub=" ".join(name for name in PRESETS if name != EMBEDDED),
        targets="\n          ".join(f"{' '.join(table.targets):<23}{table.title}" for table in tables))


def wrong(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def arguments():
    """(preset, targets, run directory, dry run?). Paths are those of the folder in which run_all.sh was called."""
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    p.add_argument("words", nargs="*")
    for flags in (("--dry-run",), ("-h", "--help")):
        p.add_argument(*flags, action="store_true")
    args, unknown = p.parse_known_intermixed_args()
    if unknown:
        wrong(f"{unknown[0]} is no option; see 'bash run_all.sh'")
    preset, *targets = args.words or [""]
    if args.help or not preset:
        print(usage())
        sys.exit(2 if args.dry_run and not args.help else 0)
    for target in targets:
        if target not in (*TARGETS, "all"):
            wrong(f"{target} is no target; there are: {' '.join(TARGETS)} all")
    if os.environ.get("SIZE", "") not in ("", "small"):
        wrong(f"SIZE={os.environ['SIZE']}; the only other size is small")
    caller = os.environ.get("CALLED_FROM", ".")
    named = os.path.join(caller, preset)
    if preset not in PRESETS and os.path.exists(named):
        preset = os.path.realpath(named)
    elif preset not in PRESETS and "/" not in preset:
        wrong(f"{preset} is no preset ({' '.join(PRESETS)}), no folder or file, and no hub id (OWNER/NAME)")
    data = os.environ.get("LINEARPATCH_DATA")
    if data and os.path.exists(os.path.join(caller, data)):
        os.environ["LINEARPATCH_DATA"] = os.path.realpath(os.path.join(caller, data))
    # A folder's name without characters that a shell or a report would trip over.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(preset.rstrip("/")).removesuffix(".gguf"))
    return preset, TARGETS if not targets or "all" in targets else targets, f"runs/{name}", args.dry_run


def main():
    preset, targets, folder, dry_run = arguments()
    plan = Plan(targets, sizes(preset, folder, small=bool(os.environ.get("SIZE")),
                               local_data=bool(os.environ.get("LINEARPATCH_DATA"))))
    commands = [command for group in plan.groups for command in group]
    if plan.unanswered:
        print("question answering and MMLU are left out: they need LINEARPATCH_DATA=FOLDER (README, section Data)",
              file=sys.stderr)
    if dry_run:
        print("\n".join(f"+ {command.text()}" for command in commands))
        return
    preload(any(" eval_qa.py " in command.line for command in commands))
    failures = run_all(commands, Log(Path(folder) / "commands.sh"))
    for failure in dict.fromkeys(failures):
        print(f"failed: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def preload(questions):
    """Import what the commands need into this interpreter."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for GPUs must not start CUDA before the forks
    for name in (*LIBRARIES, *(["utils.evaluation.qa"] if questions else [])):
        importlib.import_module(name)


class Log:
    """commands.sh: every command that was run, once, in the order of the first time; a script that runs them again."""

    def __init__(self, path):
        self.path = path
        data = os.environ.get("LINEARPATCH_DATA")
        self.head = ["#!/usr/bin/env bash", "# What 'bash run_all.sh' ran here, with the packages of .venv.",
                     "set -e", 'cd "$(dirname "${BASH_SOURCE[0]}")/../.." && PATH="$PWD/.venv/bin:$PATH"',
                     *([f"export LINEARPATCH_DATA={shlex.quote(data)}"] if data else [])]
        self.lines = []
        if path.is_file():
            self.lines = [line for line in path.read_text().splitlines() if line.startswith("python ")]

    def add(self, line):
        self.lines += [line] if line not in self.lines else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join([*self.head, *self.lines]) + "\n")


def run_all(commands, log):
    """Run Commands; returns one line for each that failed or was skipped, because a file that it reads is missing.

    What a failed command was to write counts as missing, also where an older run has left a file of that name.
    """
    failures, lost = [], {}
    for command in commands:
        started = time.time()
        missing = {path for path, since in lost.items() if not os.path.exists(path) or os.path.getmtime(path) < since}
        line = command.text(missing)
        words = shlex.split(line)
        gone = sorted(missing.intersection(word.rpartition("=")[2] for word in words))
        left_out = [name for name, file in command.variants.items() if file in missing]
        if left_out:
            print(f"left out of the next command, for want of their files: {', '.join(left_out)}", file=sys.stderr)
        if gone:
            reason = f"skipped, {', '.join(gone)} is missing"
        else:
            print(f"+ {line}", flush=True)
            log.add(line)
            code = in_fork(words)
            reason = f"exit code {code}" if code >= 0 else f"ended by signal {-code}; memory may have run out"
        if gone or code:
            print(f"error: {words[2] if words[1] == '-m' else words[1]}: {reason}", file=sys.stderr)
            failures.append(f"{line} ({reason})")
            lost.update(dict.fromkeys(command.makes, started))
    return failures


def in_fork(words):
    """Exit code of `python SCRIPT ...` or `python -m MODULE ...` in a child; -N where signal N has ended it.

    INT and TERM end the child, which says so and cleans up, and then this process; a second one ends it at once.
    """
    stop = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # none may be lost between the fork and the handlers
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: the parent passes it on, once
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop)
        os._exit(_run(words))
    received = []

    def pass_on(number, frame):
        os.kill(child, signal.SIGKILL if received else signal.SIGTERM)
        received.append(number)

    before = {number: signal.signal(number, pass_on) for number in stop}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number, handler in before.items():
        signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])
    return code


def _run(words):
    sys.stdin = open(os.devnull)
    try:
        if words[1] == "-m":
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass
    return code


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
