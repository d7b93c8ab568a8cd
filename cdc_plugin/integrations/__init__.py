"""Ways to start the stage from inside other tools; each module is imported by the tool it is made for."""
