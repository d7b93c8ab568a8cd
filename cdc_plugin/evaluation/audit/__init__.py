"""Estimate the true accuracy: a few images, drawn fairly and labelled by hand, give a bound on it."""
