"""What every part of the service uses: database, clock, errors, queue, pool and wire models."""
