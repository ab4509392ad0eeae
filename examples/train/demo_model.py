"""Evidence that travels with a model: certify, train, audit, sign, delete all else, verify.

Trains DP-SGD on digits with canaries among them as certified, measures from their losses how large
ε is at least, puts certificate, run record, audit and a signed claim beside the weights, and moves
the model's folder and the root keys to an empty place. There everything is verified offline. Then
one byte of each part is altered in turn: each is named.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
AFFIDAVIT = (sys.executable, "-m", "affidavit")
PLAN = HERE / "digits-audited.yaml"
CARD = """# Digits

A perceptron that tells handwritten digits apart, trained with differential privacy. `affidavit/`
holds the certificate, the run record and the signed claim.
"""

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demonstration; 0 when the model verifies and every altered byte is named."""
    with tempfile.TemporaryDirectory() as place:
        received = Path(place) / "received"
        shutil.copytree(signed_model(Path(place) / "trainer"), received / "model")
        shutil.copy(Path(place) / "trainer" / "roots.json", received)
        shutil.rmtree(Path(place) / "trainer")
        os.environ["AFFIDAVIT_HOME"] = str(received / "empty")  # whoever receives it has no keys
        console.rule("all but the model and the root keys is deleted", align="left")
        if not affidavit("verify-model", received / "model", "--root", received / "roots.json"):
            return 1
        console.rule("one byte of each file altered in turn", align="left")
        named = [altered_is_named(received, file) for file in files(received / "model")]
        return 0 if all(named) else 1


def affidavit(*arguments: str | Path) -> bool:
    """One command of the command line; whether it ended with 0."""
    words = [*AFFIDAVIT, *map(str, arguments)]
    return subprocess.run(words, check=False).returncode == 0


def require(*arguments: str | Path) -> None:
    """One command that has to succeed."""
    if not affidavit(*arguments):
        raise SystemExit(f"affidavit {arguments[0]} failed")


def signed_model(place: Path) -> Path:
    """A trained and signed model in ``place``, with ``roots.json`` beside it."""
    os.environ["AFFIDAVIT_HOME"] = str(place / "home")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model, run, bundle = place / "model", place / "run", place / "bundle.json"
    roots, keyset = place / "roots.json", place / "keyset.json"
    model.mkdir(parents=True)
    require("keys", "new", "--label", "demo")
    require("roots", "new", "--out", place / "root")
    (secret,) = (place / "root").glob("*.pem")
    record = secret.with_suffix(".json")
    require("roots", "trust", record, "--threshold", "1", "--out", roots)
    require("keyset", "new", "--root", record, "--threshold", "1", "--out", keyset)
    require("keyset", "sign", keyset, "--key", secret)
    require("certify", PLAN, "--out", bundle)
    require(
        "train", "--certificate", bundle, "--plan", PLAN, "--data", "digits:part=train",
        "--model", "mlp:64,seed=1,blocks=all", "--out", run, "--microbatch", "1024",
    )  # fmt: skip
    canaries, losses = run / "canaries.json", run / "canary-losses.json"
    require(
        "audit-model", "check", "--canaries", canaries, "--losses", losses, "--certificate", bundle
    )
    # safetensors, because a pickled file would have to be executed to be compared with the record
    save_file(torch.load(run / "weights.pt", weights_only=True), model / "model.safetensors")
    (model / "README.md").write_text(CARD)
    openssf = place / "model-key.pem"
    openssl = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"]
    subprocess.run([*openssl, str(openssf)], check=True)
    openssf.chmod(0o600)
    require(
        "sign-model", model, "--certificate", bundle, "--record", run / "record.jsonl",
        "--keyset", keyset, "--root", roots, "--openssf-key", openssf,
        "--canaries", canaries, "--losses", losses,
        "--export", "model-card", "--export", "cyclonedx",
    )  # fmt: skip
    return model


def files(folder: Path) -> list[Path]:
    """Every file of a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def altered_is_named(received: Path, file: Path) -> bool:
    """Whether verification names ``file`` when its middle byte is another."""
    model, content = received / "model", file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    result = subprocess.run(
        [*AFFIDAVIT, "verify-model", str(model), "--root", str(received / "roots.json")],
        check=False,
        capture_output=True,
        text=True,
    )
    file.write_bytes(content)
    name = str(file.relative_to(model))
    lines = [line for line in result.stdout.splitlines() if line.startswith(f"✗ {name}: ")]
    console.print(lines[0] if lines else f"{name} was altered and not named: {result.stdout}")
    return result.returncode == 1 and bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
