"""What each mechanism releases: from a plan to events, or a refusal with its reason."""
