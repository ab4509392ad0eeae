"""Operation: administration of the database, of tokens, and the rule of four eyes."""
