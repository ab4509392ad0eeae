"""A client of the HTTP service, blocking and asynchronous."""

from typing import Any

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _attribute(name)
    except ModuleNotFoundError as error:
        error.msg += "; the client needs affidavit[gate]"
        raise
