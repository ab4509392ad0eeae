"""Which keeper of private halves is set: at most one, and files when none is.

==============================  ====================================================
``AFFIDAVIT_SIGNING_KEY``       the private key itself, PKCS#8 PEM
``AFFIDAVIT_SIGN_COMMAND``      a command that signs what it reads
``AFFIDAVIT_PKCS11_MODULE``     the path of a PKCS#11 library, with
``AFFIDAVIT_PKCS11_TOKEN``      the label of the token and
``AFFIDAVIT_PKCS11_PIN_FILE``   a file with its PIN, which its owner alone can read
==============================  ====================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from affidavit.certificate.keys import KeyFailure, PrivateHalves
from affidavit.certificate.signers import command, environment, pkcs11


def private_halves(given: Mapping[str, str]) -> PrivateHalves | None:
    """The keeper that ``given`` names, or None for the key directory.

    Raises ``KeyFailure`` where two are named, or the one cannot be used.
    """
    names = (environment.VARIABLE, command.VARIABLE, pkcs11.MODULE)
    named = [name for name in names if given.get(name)]
    if len(named) > 1:
        raise KeyFailure(f"{' and '.join(named)} are both set; the key is kept in one place.")
    if not named:
        return None
    if named == [environment.VARIABLE]:
        return environment.EnvironmentHalf.of(given[environment.VARIABLE])
    if named == [command.VARIABLE]:
        return command.CommandHalves.of(given[command.VARIABLE])
    return pkcs11.open_token(dict(given))
