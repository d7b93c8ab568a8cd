"""The pages that people open: what was run, how sure the model is of what, and which images to look at."""
