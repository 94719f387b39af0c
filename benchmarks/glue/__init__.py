"""Does fine-tuning a pretrained model on GLUE reach AdamW's scores? Methods on CoLA, RTE and SST-2."""

import sys

from benchmarks.common.provenance import ROOT

# The example is a folder of modules and no package; `python examples/glue.py` has it on the path.
sys.path.append(str(ROOT / "examples"))
