"""Keys: what is kept to oneself, and what is read from files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv
from aiokv.control.keygen import main
from aiokv.control.keys import Keys, checked_key


def test_a_pair_is_saved_and_loaded(tmp_path):
    keys = Keys.generate()
    folder = keys.save(tmp_path / "made" / "here")
    assert Keys.load(folder) == Keys.load(folder / "aiokv.key") == keys
    assert Keys.listed(folder / "aiokv.pub") == (keys.public,)
    assert (folder / "aiokv.key").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_secret_shows_nowhere(tmp_path):
    keys = Keys.generate()
    shown = [repr(keys), str(keys), f"{keys}", (keys.save(tmp_path) / "aiokv.pub").read_text()]
    assert all(keys.secret not in each and keys.public in each for each in shown)
    with pytest.raises(ValueError, match="64") as caught:
        Keys(keys.secret.upper() + "x")
    assert keys.secret not in str(caught.value).lower()


def test_pairs_differ_and_do_not_change():
    keys = Keys.generate()
    assert keys != Keys.generate()
    assert Keys(keys.secret) == keys
    with pytest.raises(AttributeError):
        keys.secret = "0" * 64


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o666, 0o610])
def test_a_secret_that_others_can_read_is_refused(tmp_path, mode):
    file = Keys.generate().save(tmp_path) / "aiokv.key"
    file.chmod(mode)
    with pytest.raises(PermissionError, match="chmod 600"):
        Keys.load(tmp_path)


def test_a_key_is_never_overwritten_and_safe_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        keys = Keys.generate()
        keys.save(tmp_path / "a")
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "aiokv.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Keys.generate().save(tmp_path / "a")
    assert Keys.load(tmp_path / "a") == keys


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "ab\n", "0" * 63 + "G\n", "0" * 64 + "\n" + "1" * 64 + "\n", "\xff"]
)
def test_files_that_hold_no_key(tmp_path, text):
    file = tmp_path / "aiokv.key"
    file.touch(0o600)
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="aiokv.key"):
        Keys.load(tmp_path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        Keys.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        Keys.listed(tmp_path)


def test_lists_of_public_keys(tmp_path):
    a, b = Keys.generate().public, Keys.generate().public
    file = tmp_path / "allowed"
    file.write_text(f"# ours\n{a} decode-0\n\n  {b}  # decode-1\n")
    assert Keys.listed(tmp_path) == Keys.listed(file) == (a, b)
    file.write_text(
        "".join(f"{':'.join(each[i : i + 2] for i in range(0, 64, 2))}\n".upper() for each in (a, b))
    )
    assert Keys.listed(file) == (a, b)  # as OpenSSL writes fingerprints
    file.write_text(f"{a}\nnonsense\n")
    with pytest.raises(ValueError, match="allowed, line 2: a key is 64"):
        Keys.listed(tmp_path)
    file.write_text(f"# prefill\n{a}\n\n{b}x\n")
    with pytest.raises(ValueError, match="allowed, line 4: a key is 64"):
        Keys.listed(tmp_path)
    file.write_text("# nobody yet\n")
    with pytest.raises(ValueError, match="allowed: it lists no key"):
        Keys.listed(tmp_path)


@pytest.mark.parametrize("marked", [True, False])
def test_a_public_key_is_not_taken_for_a_secret_one(tmp_path, marked):
    keys = Keys.generate()
    public = keys.save(tmp_path) / "aiokv.pub"
    assert Keys.listed(public) == (keys.public,)
    if not marked:  # as older versions wrote it
        public.write_text(f"{keys.public}\n")
        assert Keys.listed(public) == (keys.public,)
    for mode in (0o644, 0o600):
        public.chmod(mode)
        with pytest.raises(ValueError, match="this is a public key; the secret one is aiokv.key beside it"):
            Keys.load(public)
    other = public.rename(tmp_path / "other")
    with pytest.raises(ValueError, match="public key"):
        Keys.load(other)


def test_a_secret_key_is_in_no_list(tmp_path):
    secret = Keys.generate().save(tmp_path) / "aiokv.key"
    allowed = tmp_path / "allowed"
    for file in (secret, allowed):
        allowed.write_text(f"{Keys.generate().public}\n" + secret.read_text())
        with pytest.raises(ValueError, match=f"{file.name}, line [12]: this is a secret key.*aiokv.pub"):
            Keys.listed(file)
    allowed.write_text((tmp_path / "aiokv.pub").read_text() * 2)
    assert len(Keys.listed(tmp_path)) == 2


@pytest.mark.parametrize("read", [Keys.load, Keys.listed])
def test_no_path_is_not_the_working_directory(read):
    with pytest.raises(ValueError, match="the path of .* is empty"):
        read("")


@pytest.mark.parametrize(
    "text", ["", "0" * 63, "0" * 65, "g" * 64, "00:" * 32, "0:0" * 32, b"0" * 64, None, 7]
)
def test_what_is_no_key(text):
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        checked_key(text)


def test_fingerprints_as_openssl_writes_them():
    assert checked_key(":".join(["5F"] * 32)) == checked_key("5F" * 32) == "5f" * 32


def test_keygen(tmp_path, capsys):
    assert main([str(tmp_path / "keys")]) == 0
    assert capsys.readouterr().out.strip() == Keys.load(tmp_path / "keys").public
    assert main([str(tmp_path / "keys")]) == 1
    assert "aiokv.key" in capsys.readouterr().err


def test_half_a_pair_is_left_as_it_is(tmp_path):
    (tmp_path / "aiokv.pub").write_text("somebody's\n")
    with pytest.raises(FileExistsError, match="its secret one, aiokv.key, is missing: .*aiokv.pub"):
        Keys.generate().save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["aiokv.pub"]


def test_keygen_is_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "aiokv", "keygen", str(tmp_path)],
        cwd=Path(aiokv.__file__).parents[1], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == Keys.load(tmp_path).public
