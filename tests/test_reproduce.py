"""run_all.sh and what it hands over to: arguments, commands in forks, failures, signals, commands.sh."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from utils.paper import reproduce
from utils.paper.experiments import PRESETS, TARGETS, Command
from utils.paper.reproduce import Log, run_all


def bash(*arguments, cwd=ROOT, **environment):
    return subprocess.run(["bash", str(ROOT / "run_all.sh"), *arguments], capture_output=True, text=True, cwd=cwd,
                          env={**os.environ, "LINEARPATCH_DATA": "", "SIZE": "", **environment})


def test_presets_and_targets_are_listed():
    listing = bash()
    assert listing.returncode == 0 and all(f" {word}" in listing.stdout for word in [*PRESETS, *TARGETS, "all"])
    assert max(map(len, listing.stdout.splitlines())) <= 120


def test_options_stand_in_any_place_and_paths_are_those_of_the_caller(tmp_path):
    (tmp_path / "my model.gguf").touch()
    (tmp_path / "data").mkdir()
    outputs = {bash(*words, cwd=tmp_path, LINEARPATCH_DATA="data").stdout for words in (
        ["--dry-run", "my model.gguf", "fig2"], ["my model.gguf", "--dry-run", "fig2"],
        ["my model.gguf", "fig2", "--dry-run"])}
    assert len(outputs) == 1 and not (tmp_path / "runs").exists()
    first = shlex.split(outputs.pop().splitlines()[0])
    assert first[:5] == ["+", "python", "prune.py", "--model", str(tmp_path.resolve() / "my model.gguf")]
    assert first[-1] == "runs/my_model/n{n}/selection.json"


def test_wrong_input_is_one_line_before_any_set_up():
    done = bash("llama2-7b", "table99")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: table99 is no target; there are") and done.stderr.count("\n") == 1


@pytest.fixture
def arguments(monkeypatch):
    def call(*words, **environment):
        for name in ("SIZE", "LINEARPATCH_DATA", "CALLED_FROM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["reproduce", *words])
        return reproduce.arguments()

    return call


@pytest.mark.parametrize("words, size, message", [
    (["llama2-7b", "table99"], "", "error: table99 is no target; there are: table5 "),
    (["llama2-7b", ""], "", "error:  is no target"), (["llama2-7b", "table5 fig2"], "", "table5 fig2 is no target"),
    (["llama2-7b", "--dry", "table5"], "", "error: --dry is no option; see 'bash run_all.sh'"),
    (["nosuch"], "", "error: nosuch is no preset (smollm2-135m "), (["fig2", "fig1"], "", "error: fig2 is no preset"),
    (["llama2-7b"], "large", "error: SIZE=large; the only other size is small")])
def test_wrong_input_is_named(arguments, capsys, words, size, message):
    with pytest.raises(SystemExit) as stop:
        arguments(*words, SIZE=size)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("words, code", [([], 0), (["--dry-run"], 2), (["--help"], 0), (["llama2-7b", "-h"], 0)])
def test_without_a_preset_there_is_the_usage(arguments, capsys, words, code):
    with pytest.raises(SystemExit) as stop:
        arguments(*words)
    assert stop.value.code == code and capsys.readouterr().out.startswith("usage: bash run_all.sh")


def test_targets_and_run_directories(arguments, tmp_path):
    assert arguments("llama2-7b") == ("llama2-7b", TARGETS, "runs/llama2-7b", False)
    assert arguments("llama2-7b", "fig2", "all")[1] == TARGETS
    assert arguments("me/fig2", "--dry-run", "fig1") == ("me/fig2", ["fig1"], "runs/fig2", True)
    assert arguments("owner/a:b c|d")[2] == "runs/a_b_c_d"
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there").mkdir()
    (tmp_path / "llama2-7b").mkdir()  # a run folder of that name does not take the preset's place
    assert arguments("llama2-7b", CALLED_FROM=str(tmp_path))[0] == "llama2-7b"
    found = arguments("link", CALLED_FROM=str(tmp_path), LINEARPATCH_DATA="link")
    assert found[0] == os.environ["LINEARPATCH_DATA"] == str(tmp_path.resolve() / "there")
    arguments("llama2-7b", CALLED_FROM=str(tmp_path), LINEARPATCH_DATA="nowhere")
    assert os.environ["LINEARPATCH_DATA"] == "nowhere"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with scripts: good prints its arguments, bad exits with 2, write makes a file, killed is killed."""
    monkeypatch.chdir(tmp_path)
    for name, code in {
        "good": "import sys, os\nprint('arguments', sys.argv[1:], hasattr(sys, 'marker'))\nsys.marker = 1\n",
        "bad": "import sys\nsys.exit(2)\n", "crash": "raise ValueError('what')\n",
        "write": "import sys\nopen(sys.argv[1], 'w').close()\n", "killed": "import os\nos.kill(os.getpid(), 9)\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    return tmp_path


def test_commands_run_in_forks_that_know_nothing_of_each_other(folder, capfd):
    commands = [Command("python good.py x\\ y 'z  z'"), Command("python good.py {n}")]
    assert run_all(commands, Log(folder / "log.sh")) == []
    out = capfd.readouterr().out.splitlines()
    assert out == ["+ python good.py x\\ y 'z  z'", "arguments ['x y', 'z  z'] False", "+ python good.py {n}",
                   "arguments ['{n}'] False"]


def test_a_module_is_run_by_its_name(folder, capfd, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    assert run_all([Command("python -m good a")], Log(folder / "log.sh")) == []
    assert "arguments ['a'] False" in capfd.readouterr().out


def test_a_failure_stops_only_what_needs_its_files(folder, capfd):
    failures = run_all([
        Command("python bad.py --out a.json", makes=("a.json", "b.json")),
        Command("python write.py c.json --in a.json", makes=("c.json",)),
        Command("python good.py named --patch x=c.json"),
        Command("python good.py $variants end", variants={"p": "q.safetensors", "b": "b.json", "c": "d.json"}),
        Command("python crash.py"), Command("python killed.py"), Command("python good.py last"),
    ], Log(folder / "runs" / "commands.sh"))
    assert [failure.rpartition(" (")[::2] for failure in failures] == [
        ("python bad.py --out a.json", "exit code 2)"),
        ("python write.py c.json --in a.json", "skipped, a.json is missing)"),
        ("python good.py named --patch x=c.json", "skipped, c.json is missing)"),
        ("python crash.py", "exit code 1)"), ("python killed.py", "ended by signal 9; memory may have run out)")]
    out, err = capfd.readouterr()
    assert "arguments ['--selection', 'c=d.json', '--patch', 'p=q.safetensors', 'end']" in out
    assert "arguments ['last']" in out and "ValueError: what" in err and "for want of their files: b" in err


def test_a_file_of_an_earlier_run_does_not_stand_in_for_one_that_failed(folder):
    """What it holds was made from other inputs; one that the failing command has still written serves."""
    (folder / "a.json").touch()
    os.utime(folder / "a.json", (1, 1))
    failures = run_all([Command("python bad.py", makes=("a.json",)), Command("python good.py a.json"),
                        Command("python good.py", variants={"A": "a.json"})], Log(folder / "log.sh"))
    assert failures == ["python bad.py (exit code 2)", "python good.py a.json (skipped, a.json is missing)"]
    (folder / "late.py").write_text("open('a.json', 'w').close()\nraise SystemExit(1)\n")
    failures = run_all([Command("python late.py", makes=("a.json",)), Command("python good.py a.json")],
                       Log(folder / "log.sh"))
    assert failures == ["python late.py (exit code 1)"]


def test_commands_sh_holds_what_was_run_and_runs_it_again(folder, monkeypatch):
    monkeypatch.setenv("LINEARPATCH_DATA", "/a b")
    path = folder / "runs" / "me" / "commands.sh"
    for names in (("one", "two"), ("three", "one")):
        run_all([Command(f"python write.py '{name} {name}'") for name in names], Log(path))
    assert [line for line in path.read_text().splitlines() if line.startswith("python")] == [
        f"python write.py '{name} {name}'" for name in ("one", "two", "three")]
    for name in ("one", "two"):
        (folder / f"{name} {name}").unlink()
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    assert subprocess.run(["bash", path], cwd="/").returncode == 0 and (folder / "two two").exists()
    assert "export LINEARPATCH_DATA='/a b'" in path.read_text()


def test_what_is_loaded_ahead_exists():
    assert all(importlib.util.find_spec(name) for name in (*reproduce.LIBRARIES, "utils.evaluation.qa"))


@pytest.mark.parametrize("failures, code", [([], 0), (["python x (exit code 2)", "python y (skipped)"], 1)])
def test_the_exit_code_and_the_last_lines_tell_failures(folder, monkeypatch, capsys, failures, code):
    ran = []
    monkeypatch.setattr(sys, "argv", ["reproduce", "llama2-7b", "table5"])
    monkeypatch.setattr(reproduce, "preload", lambda questions: ran.append(questions))
    monkeypatch.setattr(reproduce, "run_all", lambda commands, log: ran.append(commands) or failures)
    with pytest.raises(SystemExit) as stop:
        reproduce.main()
    assert stop.value.code == code and ran[0] is True and "prune.py" in ran[1][0].line
    assert capsys.readouterr().err.splitlines() == [f"failed: {failure}" for failure in failures]


@pytest.mark.parametrize("number, to_all", [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)])
def test_a_signal_ends_the_command_cleanly_and_then_the_run(folder, number, to_all):
    (folder / "wait.py").write_text(
        f"import os, signal\ntry:\n    os.{'killpg(0' if to_all else 'kill(os.getppid()'}, {int(number)})\n"
        "    signal.pause()\nexcept KeyboardInterrupt:\n    print('cleaned up')\n    raise SystemExit(130)\n")
    code = ("from utils.paper.experiments import Command\nfrom utils.paper.reproduce import Log, Path, run_all\n"
            "run_all([Command('python wait.py'), Command('python good.py never')], Log(Path('log.sh')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 128 + number and done.stdout == "+ python wait.py\ncleaned up\n", done
