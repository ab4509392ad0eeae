"""Run the oracle process of ``jax_oracle``, if its environment exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".venv-jax" / "bin" / "python"


class Answer(NamedTuple):
    """A result of the oracle, and its CPU seconds."""

    result: Any
    seconds: float


class Oracle:
    """jax-privacy behind a pipe. ``available`` says whether it can run."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, HERE / "jax_oracle.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @staticmethod
    def available() -> bool:
        """Whether jax-privacy 2.0.0 can be imported in its environment; prints why not."""
        if PYTHON.exists():
            code = "import importlib.metadata as m; print(m.version('jax-privacy'))"
            result = subprocess.run(
                [PYTHON, "-c", code], capture_output=True, text=True, check=False
            )
            if result.stdout.strip() == "2.0.0":
                return True
        sys.stdout.write(
            "jax-privacy 2.0.0 is not installed in .venv-jax (make crosscheck installs it where\n"
            "its packages can be had): nothing is compared with it.\n"
        )
        return False

    def ask(self, task: str, **arguments: Any) -> Answer:
        """Return the answer to a request; raises ``RuntimeError`` if the oracle fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"task": task, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"failed": "the oracle ended"}
        if "failed" in answer:
            raise RuntimeError(f"{task}: {answer['failed']}")
        return Answer(answer["result"], answer["seconds"])

    def __enter__(self) -> Oracle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
