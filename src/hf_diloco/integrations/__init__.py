"""The ways into hf-diloco from Transformers and Accelerate."""
