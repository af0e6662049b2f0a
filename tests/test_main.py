"""``python -m aiokv``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiokv.__main__ import main


def test_each_command_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, word in (("doctor", "--json"), ("bench", "--quick")):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert word in capsys.readouterr().out


def test_what_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["mend"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "doctor" in capsys.readouterr().err or not arguments


def test_help_brings_no_command_in() -> None:
    code = "import sys; from aiokv.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name.startswith(('aiokv.doctor', 'aiokv.bench'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_whoever_has_read_enough_is_told_no_more() -> None:
    # As `python -m aiokv keygen --help | head -1`, whose pipe is closed by the time of writing.
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from aiokv.__main__ import main\n"
    code += "sys.exit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ""
