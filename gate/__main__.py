"""``python -m affidavit.gate`` is ``affidavit``."""

from affidavit.gate.cli import main

if __name__ == "__main__":
    main()
