"""The ``flowtt`` command."""
