"""The policies that this service judges by, and the waivers that people granted."""
