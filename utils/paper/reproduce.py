"""Run commands, one a line on standard input, each in a fork of one interpreter that has loaded the libraries.

Loading torch and transformers takes longer than many a command of run_all.sh. A line is what a shell would run:
`python SCRIPT.py ARGUMENTS` or `python -m MODULE ARGUMENTS`. The first command that fails ends the run with its code.
"""

import os
import runpy
import shlex
import sys
import traceback


def main():
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for GPUs must not start CUDA before the forks
    commands = [line.strip() for line in sys.stdin if line.strip()]
    for name in ("utils.session", "utils.evaluation.objectives", "utils.distillation", "utils.figures", "scipy.stats"):
        __import__(name)
    if any(" eval_qa.py " in command for command in commands):
        __import__("utils.evaluation.qa")
    for command in commands:
        print(f"+ {command}", flush=True)
        try:
            words = shlex.split(command)
        except ValueError as error:
            sys.exit(_wrong(command, str(error)))
        code = in_fork(words)
        if code < 0:
            print(f"error: {words[1]} was ended by signal {-code}; memory may have run out", file=sys.stderr)
        if code:
            sys.exit(code if code > 0 else 128 - code)


def in_fork(words):
    """Exit code of a command that runs in a child of this process."""
    child = os.fork()
    if child == 0:
        os._exit(_run(words))
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except KeyboardInterrupt:  # the child has it as well, says so and ends
            continue


def _wrong(command, reason):
    print(f"error: {command}: {reason}", file=sys.stderr)
    return 2


def _run(words):
    script = words[1] if len(words) > 1 else ""
    if words[0] != "python" or (script == "-m" and len(words) < 3) or not (script == "-m" or os.path.isfile(script)):
        return _wrong(shlex.join(words), "expected python SCRIPT or python -m MODULE")
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
    main()
