"""What the examples share.

byte_tokens.py  text as UTF-8 bytes and a few special tokens
hub.py          Hugging Face `datasets`, with a hint where the package is missing
loading.py      settings that are checked, loaders of padded batches
optimizers.py   AdamW in two groups, with linear warm-up and decay
"""
