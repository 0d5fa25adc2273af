"""Generators of golden vectors need libraries that the tests do not, so pytest is not to import them."""

collect_ignore_glob = ["make_*.py"]
