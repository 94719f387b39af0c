"""What does AdamW cost a CPU? The worker's kernel beside DeepSpeed's and torch's."""
