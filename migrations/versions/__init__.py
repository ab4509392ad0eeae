"""The revisions, oldest first; a published one is never edited."""
