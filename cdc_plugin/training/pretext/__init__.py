"""The pretext stage for those who have no backbone: MoCo-v2, SimSiam and BYOL through lightly, without labels."""
