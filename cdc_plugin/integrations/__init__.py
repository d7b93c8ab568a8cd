"""Connections to other tools: exports, the Hugging Face hub, and callbacks for Hydra and Lightning."""
