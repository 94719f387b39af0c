"""deferred."""
