"""One optimizer step on the training thread: where a gradient goes, and in which order.

`step` has the phases on one screen and `gradient_router` a gradient's way; nothing here knows DeepSpeed.
"""
