"""How accurate are the clusters really? A few images, drawn fairly and labelled by hand, give a bound on it."""
