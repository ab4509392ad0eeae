"""The plan: the document that says what is run, and what it means as data."""
