"""What the service does, one file a use case; routes only translate to and from HTTP."""
