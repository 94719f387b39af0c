"""Measurements that take longer than tests; README.md lists them."""
