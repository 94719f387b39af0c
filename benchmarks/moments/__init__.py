"""Which codes of 8 bits keep AdamW's update: errors on moments of real trainings."""
