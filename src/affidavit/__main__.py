"""``python -m affidavit`` is ``affidavit``."""

from affidavit.gate.entry import main

if __name__ == "__main__":
    main()
