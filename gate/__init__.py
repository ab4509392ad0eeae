"""The command line and the checks that stop an under-noised config."""
