"""Cost of AdamW on a CPU: the worker's kernel beside DeepSpeed's and torch's."""
