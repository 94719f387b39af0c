"""The GLUE fine-tuning example, one concept per file.

tasks.py       the nine tasks: columns, labels, metrics
tsv.py         GLUE's TSV files
hub.py         Hugging Face `datasets`
tokenizers.py  text to token ids
data.py        the LightningDataModule
metrics.py     the official metrics
model.py       the network
module.py      the LightningModule: losses, optimizer, scheduler
submission.py  predictions as GLUE's submission files
"""
