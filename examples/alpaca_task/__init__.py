"""The instruction-tuning example, one concept per file.

records.py          instructions in Alpaca's JSON format, from files or from Hugging Face
prompts.py          a record as prompt and response
tokenizers.py       text to token ids and back
tokenized.py        records as token ids, the prompt masked
packing.py          which examples share a row
data.py             the LightningDataModule
model.py            the network
float32_buffers.py  buffers that half precision must leave alone
metrics.py          loss, perplexity and token accuracy
module.py           the LightningModule: loss, optimizer, scheduler
generation.py       answers to prompts
answers.py          the callback that shows answers at validation
step_printer.py     the callback that prints loss and time of each step
"""
