"""What a result says of a plan beside its bounds; nothing here is accounted."""
