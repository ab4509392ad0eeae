"""``keys``: a private half that its owner alone can read, and public records to hand out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[..., tuple[int, dict[str, Any]]]


def test_a_new_key_is_kept_private_and_listed(home: Path, run: Any, answer: Answer) -> None:
    created = run("keys", "new", "--label", "ci [bold]")
    assert created.exit_code == 0
    (pem,) = (home / "keys").glob("*.pem")
    (record,) = (home / "keys").glob("*.json")
    assert pem.stat().st_mode & 0o777 == 0o600
    assert (home / "keys").stat().st_mode & 0o777 == 0o700
    assert pem.stem == record.stem
    assert pem.stem in created.stdout
    code, listed = answer("keys", "list", "--json")
    assert code == 0
    (key,) = listed["keys"]
    assert (key["key_id"], key["label"], key["development"]) == (pem.stem, "ci [bold]", False)
    assert "PRIVATE" not in str(listed)
    assert pem.stem in run("keys", "list").stdout
    assert "ci [bold]" in run("keys", "list").stdout


def test_keys_are_listed_oldest_first_and_none_is_replaced(
    home: Path, run: Any, answer: Answer
) -> None:
    for label in ("one", "two", "three"):
        run("keys", "new", "--label", label)
    _, listed = answer("keys", "list", "--json")
    assert {key["label"] for key in listed["keys"]} == {"one", "two", "three"}
    assert len({key["key_id"] for key in listed["keys"]}) == 3
    moments = [key["not_before"] for key in listed["keys"]]
    assert moments == sorted(moments)
    assert len(list((home / "keys").iterdir())) == 6


def test_no_keys_is_no_failure(run: Any, answer: Answer) -> None:
    assert answer("keys", "list", "--json") == (0, {"keys": []})
    assert "keys new" in run("keys", "list").stderr


def test_a_home_that_cannot_hold_keys_is_said(home: Path, run: Any) -> None:
    home.write_text("a file")
    result = run("keys", "new")
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_a_damaged_record_or_an_open_private_file_is_said(
    home: Path, run: Any, document: Any, save: Any
) -> None:
    run("keys", "new")
    (pem,) = (home / "keys").glob("*.pem")
    pem.chmod(0o644)
    result = run("certify", save(document()))
    assert result.exit_code == 2
    assert "chmod 600" in result.stderr
    (record,) = (home / "keys").glob("*.json")
    record.write_text("{}")
    for arguments in (("keys", "list"), ("certify", save(document()))):
        result = run(*arguments)
        assert result.exit_code == 2
        assert record.name in result.stderr
