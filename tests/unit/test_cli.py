"""The command line: lazy verbs, exit codes, what goes where."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm_sfa_cp import cli
from vllm_sfa_cp.errors import UserError


def run(*argv):
    return subprocess.run([sys.executable, "-m", "vllm_sfa_cp.cli", *argv], capture_output=True, text=True)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["tiny-model"], ["tiny-model", "x", "--quant", "int3"]])
def test_usage_errors_are_two_lines_and_exit_2(argv, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: see vllm-sfa-cp")


def test_help_lists_every_verb_and_imports_nothing_heavy():
    code = (
        "import sys; from vllm_sfa_cp import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in cli.VERBS)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("verb", ["tiny-model", "demo"])
def test_help_of_a_verb_needs_no_torch(verb):
    done = run(verb, "--help")
    assert done.returncode == 0
    assert f"vllm-sfa-cp {verb}" in done.stdout or "usage:" in done.stdout


def test_a_verb_that_is_not_there_breaks_no_other(monkeypatch, capsys):
    monkeypatch.setitem(cli.VERBS, "future", cli.Verb("no_such_module", "later"))
    assert cli.main(["future"]) == 1
    assert "no 'future' command" in capsys.readouterr().err
    assert cli.main(["nonsense"]) == 2


def test_a_missing_dependency_is_named(monkeypatch, capsys):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="safetensors")

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    assert cli.main(["tiny-model", "x"]) == 1
    err = capsys.readouterr().err
    assert "tiny-model needs the module safetensors" in err
    assert "apply.py" in err


def test_a_dependency_that_is_missed_while_running_is_named(monkeypatch, capsys):
    def run_doctor(args):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(cli, "_load", lambda name: SimpleNamespace(run_doctor=run_doctor))
    assert cli.main(["doctor"]) == 1
    assert "doctor needs the module vllm" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "{bad"])
def test_doctor_wants_a_configuration_that_is_an_object(text, capsys):
    assert cli.main(["doctor", "--additional-config", text]) == 2
    assert repr(text) in capsys.readouterr().err


def test_tiny_model_below_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["tiny-model", str(tmp_path / "file/model")]) == 2
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(UserError("no", "do", 1), 1), (UserError("no"), 1)])
def test_user_errors(monkeypatch, capsys, error, code):
    def fail(args):
        raise error

    module = SimpleNamespace(run_doctor=fail)
    monkeypatch.setattr(cli, "_load", lambda name: module)
    assert cli.main(["doctor", "--json"]) == code
    assert capsys.readouterr().err.startswith("error: no\n")


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("vllm-sfa-cp ")


def test_demo_checks_ranks_before_it_starts_anything(capsys):
    assert cli.main(["demo", "--ranks", "3"]) == 2
    assert "--ranks 3" in capsys.readouterr().err


def test_tiny_model_prints_the_path_only(tmp_path, capsys):
    assert cli.main(["tiny-model", str(tmp_path / "m")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'm'}\n"
    assert "parameters" in err
