"""Keysets from the command line: from root keys on sticks to a verification that counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from affidavit.trust import read_root_key

Answer = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def sticks(run: Any, tmp_path: Path) -> list[Path]:
    """Three root keys, by the path of each without its suffix."""
    for name in "abc":
        assert run("roots", "new", "--out", str(tmp_path / name), "--label", name).exit_code == 0
    result = [next((tmp_path / name).glob("*.pem")) for name in "abc"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in result)
    return [path.with_suffix("") for path in result]


@pytest.fixture
def sign(run: Any) -> Callable[..., None]:
    """Sign a file with these sticks."""

    def signed(file: Path, *sticks: Path) -> None:
        for stick in sticks:
            done = run("keyset", "sign", str(file), "--key", f"{stick}.pem")
            assert done.exit_code == 0, done.output

    return signed


def roots(sticks: list[Path]) -> list[str]:
    return [word for stick in sticks for word in ("--root", f"{stick}.json")]


def test_from_roots_to_a_certificate_that_counts_until_its_key_is_revoked(
    home: Path,
    run: Any,
    answer: Answer,
    save: Any,
    tmp_path: Path,
    sticks: list[Path],
    sign: Any,
    document: Any,
) -> None:
    first, second, bundle = (tmp_path / name for name in ("one.json", "two.json", "bundle.json"))
    trusted = tmp_path / "roots.json"
    run("keys", "new")
    plan = save(document())
    assert run("certify", plan, "--out", str(bundle)).exit_code == 0
    provided = ["--threshold", "2", "--out", str(first)]
    assert run("keyset", "new", *roots(sticks), *provided).exit_code == 0
    records = [f"{stick}.json" for stick in sticks]
    run("roots", "trust", *records, "--threshold", "2", "--out", str(trusted))

    def verified(keyset: Path, root: Path, *more: Path) -> tuple[int, str]:
        files = [word for path in (keyset, *more) for word in ("--keyset", str(path))]
        code, stated = answer("verify", str(bundle), *files, "--root", str(root), "--json")
        return code, "verified" if stated["verified"] else stated["code"]

    sign(first, sticks[0])
    assert verified(first, trusted) == (1, "keyset_unsigned")
    assert run("keyset", "check", str(first), "--root", str(trusted)).exit_code == 1
    sign(first, sticks[2])
    assert verified(first, trusted) == (0, "verified")
    assert run("keyset", "check", str(first), "--root", str(trusted)).exit_code == 0

    (key,) = (path.stem for path in (home / "keys").glob("*.pem"))
    later = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for since, outcome in ((f"{key}={later}", (0, "verified")), (key, (1, "key_revoked"))):
        # A verifier who has seen neither of the two versions 2.
        shutil.rmtree(home / "keysets")
        drafted = ["--previous", str(first), "--revoke", since, "--out", str(second)]
        assert run("keyset", "new", *drafted).exit_code == 0
        sign(second, *sticks[:2])
        assert verified(second, first) == outcome
        assert verified(second, trusted) == outcome
    assert verified(first, second) == (1, "keyset_rollback")


def test_roots_are_replaced_and_a_verifier_follows(
    run: Any, tmp_path: Path, sticks: list[Path], sign: Any
) -> None:
    first, second = tmp_path / "one.json", tmp_path / "two.json"
    run("keys", "new")
    run("keyset", "new", *roots(sticks[:1]), "--out", str(first))
    sign(first, sticks[0])
    run("keyset", "new", "--previous", str(first), *roots(sticks[1:]), "--out", str(second))
    sign(second, sticks[1])
    assert run("keyset", "check", str(second)).exit_code == 0
    refused = run("keyset", "check", str(second), "--root", str(first))
    assert refused.exit_code == 1
    assert "keyset_untrusted" in refused.output
    sign(second, sticks[0])
    assert run("keyset", "check", str(second), "--root", str(first)).exit_code == 0


def test_what_is_wrong_is_said_in_a_line(
    run: Any, tmp_path: Path, sticks: list[Path], save: Any
) -> None:
    out = str(tmp_path / "out.json")
    run("keys", "new")
    for arguments, stated in (
        (("keyset", "new", "--out", out), "--root"),
        (("keyset", "new", *roots(sticks), "--threshold", "4", "--out", out), "threshold"),
        (("keyset", "new", *roots(sticks), "--revoke", "ab", "--out", out), "no such key"),
        (("keyset", "sign", save("{}", "no.json"), "--key", f"{sticks[0]}.pem"), "envelope"),
        (("keyset", "sign", "none", "--key", "none"), "none cannot be read"),
        (("verify", save("{}", "b.json"), "--keyset", out), "go together"),
        (("roots", "trust", save("{}", "r.json"), "--threshold", "1", "--out", out), "key record"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert stated in result.stderr.replace("\n", " "), result.stderr
    assert not Path(out).exists()


def test_what_cannot_be_published_is_told_apart(
    run: Any, tmp_path: Path, sticks: list[Path], save: Any
) -> None:
    first = tmp_path / "one.json"
    run("keys", "new")
    run("keyset", "new", *roots(sticks), "--out", str(first))
    nowhere = ("--server", "http://127.0.0.1:1")
    assert run("keyset", "publish", str(first), *nowhere).exit_code == 3
    assert run("keyset", "publish", save("{}"), *nowhere).exit_code == 2


# ---- rotation ----------------------------------------------------------------------


def test_rotation_ends_the_older_windows_after_the_overlap(
    home: Path, run: Any, answer: Answer
) -> None:
    run("keys", "new", "--label", "old")
    assert run("keys", "rotate", "--overlap-days", "7", "--label", "new").exit_code == 0
    _, listed = answer("keys", "list", "--json")
    ends = {key["label"]: datetime.fromisoformat(key["not_after"]) for key in listed["keys"]}
    week = datetime.now(UTC) + timedelta(days=7)
    assert week - timedelta(minutes=5) < ends["old"] <= week < ends["new"]
    # An end that is nearer already is not moved away.
    run("keys", "rotate", "--overlap-days", "30", "--label", "newest")
    _, listed = answer("keys", "list", "--json")
    again = {key["label"]: datetime.fromisoformat(key["not_after"]) for key in listed["keys"]}
    assert again["old"] == ends["old"]
    assert again["new"] < ends["new"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (home / "keys").glob("*.pem"))


def test_the_last_key_is_not_retired(home: Path, run: Any) -> None:
    run("keys", "new")
    (only,) = (path.stem for path in (home / "keys").glob("*.pem"))
    refused = run("keys", "retire", only)
    assert refused.exit_code == 2
    assert "only key" in refused.stderr
    run("keys", "rotate")
    assert run("keys", "retire", only[:20]).exit_code == 0
    record = json.loads((home / "keys" / f"{only}.json").read_text())
    assert datetime.fromisoformat(record["not_after"]) <= datetime.now(UTC)
    assert run("keys", "retire", "").exit_code == run("keys", "retire", "zz").exit_code == 2


def test_a_key_kept_elsewhere_is_added_by_its_public_half(
    home: Path, run: Any, tmp_path: Path, sticks: list[Path], save: Any
) -> None:
    key = read_root_key(Path(f"{sticks[0]}.pem"))
    pem = save(key.public.as_record()["public_key"], "public.pem")
    assert run("keys", "add", pem, "--label", "token").exit_code == 0
    assert (home / "keys" / f"{key.key_id}.json").exists()
    assert run("keys", "add", pem).exit_code == 2
    assert run("keys", "add", save("no key", "no.pem")).exit_code == 2
    assert run("keys", "add", str(tmp_path / "none")).exit_code == 2
