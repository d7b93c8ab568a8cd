"""Methods side by side on the same images and backbone: which there are, the grid of runs, and its tables."""
