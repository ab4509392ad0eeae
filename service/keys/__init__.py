"""The keys of the service and their keyset."""
