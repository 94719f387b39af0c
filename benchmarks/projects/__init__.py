"""Projects of others, installed from PyPI and trained as their tutorials do, by `ZenFlowStrategy` beside `strategy="auto"`."""
